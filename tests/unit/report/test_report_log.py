"""Log files take all logging and warnings, and the screen gets none."""

import os
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


@pytest.mark.parametrize("torch_logs", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_log_takes_what_libraries_and_warnings_print(tmp_path: Path, torch_logs: bool) -> None:
    """With TORCH_LOGS torch's own loggers stay on the screen."""
    env = os.environ | ({"TORCH_LOGS": "distributed"} if torch_logs else {})
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=True, timeout=120)
    screen = result.stderr + result.stdout
    first, second = ((tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in (3, 4))
    for text in ("from the project", "from warnings", "WARNING timm.models: from timm"):
        assert first.count(text) == 1 and text not in screen
    assert ("from torch" in screen) == torch_logs and "a trace" not in first
    assert "after the move" in second and "from a fork" in second and "after the move" not in first
    assert "on the screen again" in result.stderr


def test_log_opened_again_appends(tmp_path: Path) -> None:
    for text in ("first", "second"):
        open_log(tmp_path, 0).info(text)
        close_log()
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert "first" in log and "second" in log


def test_log_folder_that_cannot_be_created_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    with pytest.raises(ResourceError):
        open_log(tmp_path, 0)
    close_log()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
def test_log_on_full_disk_drops_lines_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").symlink_to("/dev/full")
    log = open_log(tmp_path, 0)
    log.error("lost")
    assert capsys.readouterr().err == ""
    log.root.removeHandler(log.root.handlers[-1])  # its buffer can't be flushed, so it isn't closed either
