"""What a run prints on stdout, and the log files that receive the messages of libraries.

On a terminal there are a progress bar, which disappears at the end, and colors, unless NO_COLOR is
set; elsewhere there are plain lines. The run continues if stdout fails or nobody reads it. The bar
is drawn when a record arrives and not by a thread, so that no lock is held when DataLoader forks
its workers. The cursor is never hidden, so that even SIGKILL leaves a usable terminal.
"""

import contextlib
import io
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.highlighter import RegexHighlighter
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from imagenet_cls.files import explain_write_errors
from imagenet_cls.report.jsonl import Record
from imagenet_cls.text import printable

WRITE_REMEDY = "Make room or restore access, then resume from the last checkpoint with --resume."
# 0: print no lines about steps, which another process shows.
STEP_LINES_VARIABLE = "IMAGENET_CLS_STEP_LINES"
_EVAL_LINE_SEC = 10.0  # between two plain lines about one evaluation
_MAX_WAITING = 10_000  # texts that wait for a slow reader
_LAST_TEXT_SEC = 5.0  # the longest wait for a slow reader at the end


class BackgroundStream:
    """Writes text in a thread: `write` neither blocks nor raises.

    If the reader is too slow, the oldest texts are dropped. After an error, nothing more is written
    (the file descriptor becomes /dev/null). `logging.handlers.QueueListener` is not used: its
    `stop` waits forever for a pipe that nobody reads.
    """

    def __init__(self, stream: io.TextIOWrapper):
        self._stream = stream
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # encoding, isatty, fileno

    def flush(self) -> None:
        """Flush what was printed without the console."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def write(self, text: str) -> None:
        self.flush()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_waiting, name="console", daemon=True)
            self._thread.start()
        # an ASCII-only stdout gets escapes
        self._put(text.encode(self._stream.encoding, "backslashreplace"))

    def wait(self) -> None:
        """Wait until all is written, for at most five seconds."""
        if self._thread is not None:
            self._put(None)
            self._thread.join(_LAST_TEXT_SEC)
            self._thread = None

    def _put(self, item: bytes | None) -> None:
        if self._waiting.qsize() >= _MAX_WAITING:
            with contextlib.suppress(queue.Empty):
                self._waiting.get_nowait()
        self._waiting.put(item)

    def _write_waiting(self) -> None:
        """Run in the thread. Writes by os.write: a lock of Python's streams could be held when
        DataLoader forks its workers.
        """
        while (data := self._waiting.get()) is not None:
            try:
                while data:
                    data = data[os.write(self._stream.fileno(), data) :]
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class Highlighter(RegexHighlighter):
    """Colors warnings, and the best result so far in the line of an epoch. The name of each group
    is its color.
    """

    highlights = (r"(?m)^(?P<yellow>warning: .*)", r"(?P<green>\S+ % \*)")


class VisibleCursor(RichConsole):
    """A console of rich whose bars do not hide the cursor."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing. A process that ends while the cursor is hidden would leave it hidden."""
        return False


class Console:
    """The lines and the progress bar of a run, on stdout by default."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        with contextlib.suppress(OSError):  # not a file: in a test or a notebook
            if isinstance(self._stream, io.TextIOWrapper) and self._stream.fileno() >= 0:
                self._stream = cast(TextIO, BackgroundStream(self._stream))
        self._terminal: RichConsole | None = None
        if self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            self._terminal = VisibleCursor(
                file=self._stream, markup=False, emoji=False, highlighter=Highlighter()
            )
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._pace_from: tuple[int, float] | None = None  # step and time of the first train record
        self._eval_line_at = 0.0

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print a line for each (name, value)."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.message(f"{name:<{width}}  {value}")

    def message(self, text: str) -> None:
        """Print a message, above the bar if there is one. Control characters in it are escaped."""
        text = "\n".join(map(printable, text.split("\n")))
        if self._terminal is not None:
            self._terminal.print(text, soft_wrap=True)
        else:
            self._stream.write(f"{text}\n")

    def show_step(self, record: Record, total_steps: int, total_epochs: int) -> None:
        """Show the last step of a logging interval. record: a record of kind "train", see `jsonl`.

        A plain line has few fields, so that it fits into 80 columns in a long run. A terminal shows
        as many fields as fit beside the bar.
        """
        step = record["step"]
        epoch = f"epoch {record['epoch'] + 1}/{total_epochs}"
        numbers = [f"loss {record['loss']:.4f}", f"top-1 {record['top1_pct']:.1f} %"]
        if "images_per_sec" in record:
            numbers.append(f"{record['images_per_sec']:.0f} img/s")
        eta = f"eta {self._eta(step, total_steps)}"
        if self._terminal is None:
            if os.environ.get(STEP_LINES_VARIABLE) != "0":
                self.message("  ".join([epoch, f"step {step}", *numbers, eta]))
            return
        fields = [f"{step}/{total_steps}", eta, *numbers, f"lr {_format_lr(record['lr'])}"]
        if "data_wait_pct" in record:
            fields.append(f"waiting for data {record['data_wait_pct']:.0f} %")
        # as wide as "evaluating", whose bar is below it
        self._draw("train", f"{epoch:10}", step, total_steps, fields)

    def eval_progress(self, images_done: int, images_total: int) -> None:
        """Show how far an evaluation is, without a terminal every ten seconds. images_done: 0 in
        its first call.
        """
        numbers = f"{images_done}/{images_total} images"
        now = time.monotonic()
        if self._terminal is not None:
            self._draw("eval", "evaluating", images_done, images_total, [numbers])
        elif images_done == 0:
            self._eval_line_at = now
        elif now - self._eval_line_at >= _EVAL_LINE_SEC:
            self._eval_line_at = now
            self.message(f"evaluating  {numbers}")

    def eval_result(self, text: str) -> None:
        """Print the result of an evaluation in place of the bars."""
        self._remove_bars()
        self.message(text)

    def close(self) -> None:
        """Remove the bars, and wait for the last text. May be called again."""
        self._remove_bars()
        if isinstance(self._stream, BackgroundStream):
            self._stream.wait()

    def _remove_bars(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, task: str, description: str, done: int, total: int, fields: list[str]) -> None:
        """Draw the bar of a task ("train" or "eval"). The last fields are left out where the
        terminal is narrow.
        """
        assert self._terminal is not None
        if self._bar is None:
            self._bar = _create_bar(self._terminal)
            self._bar.start()
            self._tasks = {}
        if task not in self._tasks:
            self._tasks[task] = self._bar.add_task(description, total=total, numbers="")
        width = self._terminal.width - len(description) - _bar_width(self._terminal) - 2
        while fields and len(" ".join(fields)) > width:
            fields.pop()
        self._bar.update(
            self._tasks[task],
            description=description,
            completed=done,
            numbers=" ".join(fields),
            refresh=True,
        )

    def _eta(self, step: int, total_steps: int) -> str:
        """Time to the last step at the pace since the first record, evaluations and checkpoints
        included.
        """
        now = time.monotonic()
        if self._pace_from is None:  # the time before it includes the start of the workers
            self._pace_from = (step, now)
            return "-"
        sec_per_step = (now - self._pace_from[1]) / (step - self._pace_from[0])
        minutes, seconds = divmod(round(sec_per_step * (total_steps - step)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"


def _create_bar(console: RichConsole) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_bar_width(console)),
        TextColumn("{task.fields[numbers]}", markup=False),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,  # a worker that prints would take the bar's lock in a forked process
        redirect_stderr=False,
    )


def _bar_width(console: RichConsole) -> int:
    return max(5, min(40, console.width - 105))


def _format_lr(lr: float) -> str:
    """The learning rate with four decimals, or in scientific notation if it is small or large."""
    return f"{lr:.4f}" if lr == 0 or 1e-3 <= lr < 1e4 else f"{lr:.2e}"


class RankLogHandler(logging.FileHandler):
    """Drops a line that can't be written: checkpoints report a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing; the base class would print a traceback for every line."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the file is closed, but its last lines may be missing
            super().close()


def log_file(folder: Path, rank: int) -> Path:
    """The log of a rank in a run folder."""
    return folder / "logs" / f"rank{rank}.log"


def open_log(folder: Path | None, rank: int) -> logging.Logger:
    """Append all log records and warnings of this process to `folder/logs/rank<rank>.log` instead
    of printing them.

    folder: None to keep them in memory until the next call. Returns the project's logger. Raises
    ResourceError.
    """
    handler: logging.Handler = MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
    if folder is not None:
        path = log_file(folder, rank)
        with explain_write_errors(path, WRITE_REMEDY):
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = RankLogHandler(path, encoding="utf-8")
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(line))
    for earlier in logging.root.handlers:
        if isinstance(earlier, MemoryHandler):
            earlier.setTarget(handler)  # gets its records when `basicConfig` closes it
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    _remove_terminal_handlers()
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_error
    return logging.getLogger("imagenet_cls")


def _remove_terminal_handlers() -> None:
    """Remove the handlers of torch, timm and huggingface_hub that print; their loggers propagate
    instead.
    """
    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    entries = logging.root.manager.loggerDict.values()
    for logger in [entry for entry in entries if isinstance(entry, logging.Logger)]:
        for handler in logger.handlers[:]:
            # By its stream: files are StreamHandlers as well, and so is torch's trace handler,
            # which writes nowhere.
            if getattr(handler, "stream", handler) in terminal:
                logger.removeHandler(handler)
                logger.propagate = True


def _log_thread_error(ended: threading.ExceptHookArgs) -> None:
    """Log an exception that ended a thread, such as TensorBoard's on a full disk."""
    logging.getLogger("imagenet_cls").error(
        "%s ended early", ended.thread, exc_info=ended.exc_value
    )
