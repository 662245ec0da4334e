"""The console, in a pipe and on a pseudo-terminal: what is shown, that it ends sanely, and that it ends no run."""

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

RECORD = {
    "kind": "train",
    "step": 120,
    "epoch": 2,
    "loss": 0.04117,
    "lr": 0.05,
    "grad_norm": 1.0,
    "images_per_sec": 4210.4,
    "data_wait_pct": 3.2,
    "memory_mib": 1.0,
}
EVAL = {
    "kind": "eval",
    "step": 120,
    "epoch": 2,
    "weights": "ema",
    "top1_pct": 97.214,
    "top5_pct": 99.9,
    "loss": 0.0931,
    "images": 359,
    "seconds": 0.41,
}


def lines_of(actions) -> list[str]:
    stream = io.StringIO()
    actions(Console(stream))
    return stream.getvalue().splitlines()


def test_plain_train_line():
    def actions(console: Console) -> None:
        console.train({**RECORD, "step": 60, "lr": 1e-5}, total_steps=176, total_epochs=8)
        console.train(RECORD, total_steps=176, total_epochs=8)
        console.close()

    first, second = lines_of(actions)
    assert re.fullmatch(
        r"epoch 3/8  step 120/176  loss 0\.0412  lr 0\.0500  4210 img/s  data 3 %  eta \d:\d\d:\d\d", second
    )
    assert "lr 1.00e-05" in first


def test_eta_follows_the_pace_and_knows_of_resumed_steps(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream, start_step=100)
    now[0] += 60  # a slow start is not part of the pace
    console.banner([("device", "cpu")])
    for step in (110, 120):
        now[0] += 20
        console.train({**RECORD, "step": step}, total_steps=150, total_epochs=3)
    etas = re.findall(r"eta (\S+)", stream.getvalue())
    assert etas == ["0:01:20", "0:01:00"]


def test_plain_banner_messages_and_results():
    def actions(console: Console) -> None:
        console.banner([("device", "cpu"), ("parameters", "11.7 M")])
        console.say("[bold] :smile: stays as it is")
        console.evaluation(EVAL, total_epochs=8)
        console.evaluation(EVAL)

    result = "ema weights: top-1 97.21 %  top-5 99.90 %  loss 0.0931  359 images in 0.4 s"
    assert lines_of(actions) == [
        "device      cpu",
        "parameters  11.7 M",
        "[bold] :smile: stays as it is",
        f"epoch 3/8  {result}",
        result,
    ]


def test_a_long_evaluation_says_a_line_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream)
    for done in range(31):
        console.evaluating(done, 30)
        now[0] += 1
    assert stream.getvalue().splitlines() == [f"evaluating  {done}/30 images" for done in (10, 20, 30)]


def test_an_ascii_stdout_gets_escapes_instead_of_an_error():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream).say("Münsterländer")
    assert raw.getvalue() == b"M\\xfcnsterl\\xe4nder\n"


def test_a_reader_that_leaves_does_not_end_the_run():
    code = (
        "import sys, time\n"
        "from imagenet_cls.report.console import Console\n"
        "console = Console()\n"
        "for number in range(3000):\n"
        "    console.say(f'line {number} ' + 'x' * 100)\n"
        "print('still here', file=sys.stderr)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("line 0")
    process.stdout.close()
    assert process.stderr.read() == "still here\n"
    assert process.wait(timeout=30) == 0


TERMINAL_SCRIPT = """
import signal, sys, time
from imagenet_cls.report.console import Console
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it, and so would we
console = Console()
record = dict(kind="train", epoch=2, loss=0.0412, lr=0.05, images_per_sec=4210.0, data_wait_pct=3.0)
try:
    console.say("hello [bold]terminal[/bold]")
    for step in range(1, 6):
        console.train(record | {"step": step}, 176, 8)
    for done in (0, 180, 359):
        time.sleep(0.15)
        console.evaluating(done, 359)
    result = dict(epoch=2, weights="raw", top1_pct=97.2, top5_pct=99.9, loss=0.1, images=359, seconds=0.4)
    console.evaluation(result, 8)
    while sys.argv[1] == "wait":
        console.train(record | {"step": 6}, 176, 8)
        time.sleep(0.01)
except KeyboardInterrupt:
    pass
finally:
    console.close()
console.say("the end")
"""


def on_terminal(mode: str, columns: int, stop_with: int | None = None) -> tuple[str, int, bool]:
    """What the script shows on a pseudo-terminal, its exit status, whether the settings are as before."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    before = termios.tcgetattr(slave)
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL_SCRIPT, mode],
        stdout=slave,
        stderr=slave,
        stdin=slave,
        env={**environment, "TERM": "xterm", "PYTHONUTF8": "1"},
    )
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
    status, same = process.wait(timeout=10), termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)
    return shown.decode(), status, same


def test_terminal_shows_a_bar_with_all_numbers_in_80_columns():
    shown, status, same = on_terminal("end", columns=80)
    assert (status, same) == (0, True)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "hello [bold]terminal[/bold]" in text
    assert re.search(r"epoch 3/8 \S+ +5/176 eta \d:\d\d:\d\d loss 0\.0412 lr 0\.0500 4210 img/s data 3 %", text), text[
        -800:
    ]
    assert "━" in text
    assert re.search(r"evaluating \S+ +180/359 images", text)
    assert "epoch 3/8  raw weights: top-1 97.20 %" in text
    assert text.rstrip().endswith("the end")
    assert "\r\nthe end" in text, "the end has a line of its own"


@pytest.mark.parametrize("stop_with", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_terminal_is_sane(stop_with):
    shown, status, same = on_terminal("wait", columns=120, stop_with=stop_with)
    assert same
    assert shown.rfind("\x1b[?25h") >= shown.rfind("\x1b[?25l"), "the cursor is left hidden"
    assert status == (0 if stop_with == signal.SIGINT else -signal.SIGKILL)
    if stop_with == signal.SIGINT:
        assert shown.rstrip().endswith("the end")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    class Dumb(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "dumb")
    stream = Dumb()
    Console(stream).train(RECORD, 176, 8)
    assert "\x1b" not in stream.getvalue()
    assert "step 120/176" in stream.getvalue()
