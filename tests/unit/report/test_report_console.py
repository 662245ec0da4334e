"""The console, in a pipe and on a pseudo-terminal: what it shows, and that it never ends the run."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from imagenet_cls.report.console import Console

RECORD = {"kind": "train", "step": 120, "epoch": 2, "loss": 0.04117, "lr": 0.05, "grad_norm": 1.0}
RECORD |= {"images_per_sec": 4210.4, "data_wait_pct": 3.2, "memory_mib": 1.0}
EVAL = {"kind": "eval", "step": 120, "epoch": 2, "weights": "ema", "top1_pct": 97.214, "top5_pct": 99.9}
EVAL |= {"loss": 0.0931, "images": 359, "seconds": 0.41}


def test_train_in_a_pipe_prints_one_line_each():
    stream = io.StringIO()
    console = Console(stream)
    console.train({**RECORD, "step": 60, "lr": 1e-5}, total_steps=176, total_epochs=8)
    console.train(RECORD, total_steps=176, total_epochs=8)
    console.close()
    first, second = stream.getvalue().splitlines()
    assert "lr 1.00e-05" in first
    assert re.fullmatch(
        r"epoch 3/8  step 120/176  loss 0\.0412  lr 0\.0500  4210 img/s  data 3 %  eta \d:\d\d:\d\d", second
    )


def test_table_messages_and_results_in_a_pipe():
    stream = io.StringIO()
    console = Console(stream)
    console.table([("device", "cpu"), ("parameters", "11.7 M")])
    console.message("[bold] :smile: stays as it is")
    console.eval_result(EVAL, total_epochs=8)
    assert stream.getvalue().splitlines() == [
        "device      cpu",
        "parameters  11.7 M",
        "[bold] :smile: stays as it is",
        "epoch 3/8  ema weights: top-1 97.21 %  top-5 99.90 %  loss 0.0931  359 images in 0.4 s",
    ]


def test_eta_after_resume_counts_only_steps_of_this_process(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream, start_step=100)
    now[0] += 60  # a slow start is not part of the pace
    console.table([("device", "cpu")])
    for step in (110, 120):
        now[0] += 20
        console.train({**RECORD, "step": step}, total_steps=150, total_epochs=3)
    assert re.findall(r"eta (\S+)", stream.getvalue()) == ["0:01:20", "0:01:00"]


def test_eval_progress_in_a_pipe_prints_every_ten_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream)
    for done in range(31):
        console.eval_progress(done, 30)
        now[0] += 1
    assert stream.getvalue().splitlines() == [f"evaluating  {done}/30 images" for done in (10, 20, 30)]


def test_message_on_ascii_stdout_is_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream).message("Münsterländer")
    assert raw.getvalue() == b"M\\xfcnsterl\\xe4nder\n"


def test_output_whose_reader_left_is_silenced():
    code = (
        "import sys\n"
        "from imagenet_cls.report.console import Console\n"
        "console = Console()\n"
        "for number in range(3000):\n"
        "    console.message(f'line {number} ' + 'x' * 100)\n"
        "print('still here', file=sys.stderr)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("line 0")
    process.stdout.close()
    assert process.stderr.read() == "still here\n"
    assert process.wait(timeout=120) == 0


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    class Dumb(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "dumb")
    stream = Dumb()
    Console(stream).train(RECORD, 176, 8)
    assert "\x1b" not in stream.getvalue() and "step 120/176" in stream.getvalue()


TERMINAL_SCRIPT = """
import signal, sys, time
from imagenet_cls.report.console import Console
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
console = Console()
record = dict(kind="train", epoch=2, loss=0.0412, lr=0.05, images_per_sec=4210.0, data_wait_pct=3.0)
try:
    console.message("hello [bold]terminal[/bold]")
    for step in range(1, 6):
        console.train(record | {"step": step}, 176, 8)
    for done in (0, 180, 359):
        time.sleep(0.15)
        console.eval_progress(done, 359)
    result = dict(epoch=2, weights="raw", top1_pct=97.2, top5_pct=99.9, loss=0.1, images=359, seconds=0.4)
    console.eval_result(result, 8)
    while sys.argv[1] == "wait":
        console.train(record | {"step": 6}, 176, 8)
        time.sleep(0.01)
except KeyboardInterrupt:
    pass
finally:
    console.close()
console.message("the end")
"""


def on_terminal(mode: str, columns: int, stop_with: int | None = None) -> tuple[str, int, bool]:
    """What the script shows on a pseudo-terminal, its exit status, whether the settings are as before."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    before = termios.tcgetattr(slave)
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL_SCRIPT, mode], stdout=slave, stderr=slave, stdin=slave,
        env={**environment, "TERM": "xterm", "PYTHONUTF8": "1"},
    )  # fmt: skip
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.05)[0]:
            shown += os.read(master, 65536)
        elif process.poll() is not None:
            break
        if stop_with is not None and b"top-1" in shown:
            process.send_signal(stop_with)
            stop_with = None
    status, same = process.wait(timeout=120), termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)
    return shown.decode(), status, same


def test_terminal_shows_a_bar_with_all_numbers_in_80_columns():
    shown, status, same = on_terminal("end", columns=80)
    assert (status, same) == (0, True)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "hello [bold]terminal[/bold]" in text and "━" in text
    numbers = r"epoch 3/8 \S+ +5/176 eta \d:\d\d:\d\d loss 0\.0412 lr 0\.0500 4210 img/s data 3 %"
    assert re.search(numbers, text), text[-800:]
    assert re.search(r"evaluating \S+ +180/359 images", text)
    assert "epoch 3/8  raw weights: top-1 97.20 %" in text
    assert text.rstrip().endswith("\r\nthe end")


@pytest.mark.parametrize("stop_with", [signal.SIGINT, signal.SIGKILL])
def test_terminal_after_interrupt_is_usable(stop_with):
    shown, status, same = on_terminal("wait", columns=120, stop_with=stop_with)
    assert same
    assert shown.rfind("\x1b[?25h") >= shown.rfind("\x1b[?25l"), "the cursor is left hidden"
    assert status == (0 if stop_with == signal.SIGINT else -signal.SIGKILL)
    assert stop_with == signal.SIGKILL or shown.rstrip().endswith("the end")
