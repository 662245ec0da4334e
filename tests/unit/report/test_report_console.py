"""The console, in a pipe and on a pseudo-terminal, and the log files: what they show, and that
errors end no run.
"""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from imagenet_cls.errors import ResourceError
from imagenet_cls.report.console import Console, open_log

RECORD = {
    "kind": "train",
    "step": 120,
    "epoch": 2,
    "loss": 0.04117,
    "top1_pct": 98.44,
    "lr": 0.05,
    "grad_norm": 1.0,
}
RECORD |= {"images_per_sec": 4210.4, "data_wait_pct": 3.2, "memory_mib": 1.0}
EPOCH_LINE = "epoch 3/8  train loss 0.5123, 85.2 %  val 97.21 % *  EMA 96.94 %"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_lines_in_a_pipe_or_a_dumb_terminal_are_plain(monkeypatch, stream_type):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(time, "monotonic", iter([1000.0, 1030.0]).__next__)
    stream = stream_type()
    console = Console(stream)
    console.message("[bold] :smile: stays as it is")
    console.message("\x1b[31mred")
    console.show_step({**RECORD, "step": 60, "lr": 1e-5}, total_steps=180, total_epochs=8)
    console.show_step(RECORD, total_steps=180, total_epochs=8)
    for done in (0, 100, 100):
        console.eval_progress(done, 100)
    console.eval_result(EPOCH_LINE)
    console.message("warning: [red]a warning")
    console.close()
    assert stream.getvalue().splitlines() == [
        "[bold] :smile: stays as it is",
        "\\x1b[31mred",
        "epoch 3/8  step 60  loss 0.0412  top-1 98.4 %  4210 img/s  eta -",
        "epoch 3/8  step 120  loss 0.0412  top-1 98.4 %  4210 img/s  eta 00:30",
        EPOCH_LINE,
        "warning: [red]a warning",
    ]


def test_step_line_of_a_long_run_fits_80_columns(monkeypatch):
    monkeypatch.setattr(time, "monotonic", iter([0.0, 3600.0]).__next__)
    stream = io.StringIO()
    console = Console(stream)
    record = {**RECORD, "epoch": 89, "loss": 6.9, "images_per_sec": 12345.6}
    for step in (350_000, 360_000):
        console.show_step({**record, "step": step}, total_steps=650_000, total_epochs=100)
    lines = stream.getvalue().splitlines()
    assert lines[1].endswith("  12346 img/s  eta 29:00:00")
    assert max(map(len, lines)) <= 80


def test_message_on_ascii_stdout_is_escaped():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="ascii") as stream, os.fdopen(reader, "rb") as shown:
        console = Console(stream)
        console.message("Münsterländer")
        console.close()
        assert shown.readline() == b"M\\xfcnsterl\\xe4nder\n"


def test_output_whose_reader_left_is_silenced():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        console = Console(stream)
        for number in range(3):
            console.message(f"line {number}")
            console.close()


TERMINAL_SCRIPT = """
from imagenet_cls.report.console import Console
console = Console()
record = dict(kind="train", epoch=2, loss=0.0412, top1_pct=98.44, lr=0.05)
record |= dict(images_per_sec=4210.0, data_wait_pct=43.0)
console.message("hello [bold]terminal[/bold]")
for step in range(1, 6):
    console.show_step(record | {"step": step}, 176, 8)
console.message("above the bar")
for done in (0, 180, 359):
    console.eval_progress(done, 359)
console.eval_result("the result")
console.message("warning: one\\nno warning: two \\x1b[31m")
console.show_step(record | {"step": 6}, 176, 8)
console.close()
"""


def test_terminal_shows_bars_in_80_columns():
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    command = [sys.executable, "-c", TERMINAL_SCRIPT]
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # Linux has no end of a terminal
            while read := os.read(master, 65536):
                shown += read
    os.close(master)
    assert process.returncode == 0
    drawn = re.split(r"[\r\n]|\x1b\[[0-9;]*[A-Z]", shown.decode())
    assert max(map(len, drawn)) <= 80
    (bar, *_) = [line for line in drawn if line.startswith("epoch 3/8 ") and "5/176" in line]
    assert "loss 0.0412  top-1 98.4 %  4210 img/s" in bar
    assert any(line.startswith("evaluating ") and "180/359" in line for line in drawn)
    lines = ["hello [bold]terminal[/bold]", "above the bar", "the result"]
    assert {*lines, "warning: one", "no warning: two \\x1b[31m"} <= {*drawn}
    _, _, after = shown.decode().partition("the result")
    assert "evaluating" not in after and "6/176" in after


LOG_SCRIPT = """
import logging, os, sys, torch, warnings
from pathlib import Path
from imagenet_cls.report.console import open_log
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
"""


def test_log_takes_what_libraries_and_warnings_print(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOG_SCRIPT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    first, second = ((tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in (3, 4))
    for text in (
        "from the project",
        "UserWarning: from warnings",
        "WARNING timm.models: from timm",
        "from torch",
    ):
        assert first.count(text) == 1
    assert "a trace" not in first and "after the move" not in first
    assert "after the move" in second and "from a fork" in second


def test_log_that_cannot_be_written_is_an_error_only_when_opened(tmp_path: Path, capsys) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    with pytest.raises(ResourceError):
        open_log(tmp_path, 0)
    (tmp_path / "full" / "logs").mkdir(parents=True)
    (tmp_path / "full" / "logs" / "rank0.log").symlink_to("/dev/full")
    open_log(tmp_path / "full", 0).error("lost")
    open_log(tmp_path / "full", 1)
    assert capsys.readouterr().err == ""
