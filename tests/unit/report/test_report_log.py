"""Log files take what libraries and warnings say, and the screen gets nothing of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from imagenet_cls.errors import ResourceError
from imagenet_cls.report.log import close_log, open_log

SCRIPT = """
import logging, os, sys, warnings
from pathlib import Path
import torch
from imagenet_cls.report.log import open_log, close_log
folder = Path(sys.argv[1])
log = open_log(folder, 3)
log.info("from the project")
warnings.warn("from warnings")
logging.getLogger("timm.models").warning("from timm")
logging.getLogger("torch.distributed").warning("from torch")
logging.getLogger("torch.__trace").debug("a trace")
open_log(folder, 4)
logging.getLogger("timm.models").info("after the move")
if os.fork() == 0:
    logging.getLogger("worker").error("from a fork")
    os._exit(0)
os.wait()
close_log()
warnings.warn("on the screen again")
"""


def run(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, env={**os.environ, **env}, check=True,
        timeout=120,
    )  # fmt: skip


def test_everything_goes_into_the_file_and_nothing_onto_the_screen(tmp_path):
    result = run(tmp_path)
    first = (tmp_path / "logs" / "rank3.log").read_text()
    for text in ("from the project", "from warnings", "from timm", "from torch"):
        assert first.count(text) == 1
        assert text not in result.stderr + result.stdout
    assert "a trace" not in first
    assert "WARNING timm.models: from timm" in first
    second = (tmp_path / "logs" / "rank4.log").read_text()
    assert "after the move" in second
    assert "from a fork" in second
    assert "after the move" not in first
    assert "on the screen again" in result.stderr


def test_torch_logs_stay_on_the_screen_when_they_were_asked_for(tmp_path):
    result = run(tmp_path, TORCH_LOGS="distributed")
    assert "from torch" in result.stderr
    assert "from timm" not in result.stderr


def test_a_second_start_appends(tmp_path):
    for word in ("first", "second"):
        open_log(tmp_path, 0).info(word)
        close_log()
    text = (tmp_path / "logs" / "rank0.log").read_text()
    assert "first" in text
    assert "second" in text


def test_a_folder_that_cannot_be_made_is_a_resource_error(tmp_path):
    (tmp_path / "logs").write_text("a file in the way")
    with pytest.raises(ResourceError):
        open_log(tmp_path, 0)
    close_log()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
def test_a_full_disk_drops_lines_without_a_word(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").symlink_to("/dev/full")
    log = open_log(tmp_path, 0)
    log.error("lost")
    assert capsys.readouterr().err == ""
    handler = log.root.handlers[-1]
    log.root.removeHandler(handler)  # its buffer can't be flushed, so it isn't closed either
