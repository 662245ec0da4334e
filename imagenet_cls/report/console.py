"""What a run prints on stdout, and the log files that receive the messages of libraries.

On a terminal there are progress bars; elsewhere there are plain lines. The run continues if stdout
fails. A bar is drawn when a record arrives and not by a thread, so that no lock is held when
DataLoader forks its workers.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO, cast

from tqdm import tqdm

from imagenet_cls.files import explain_write_errors
from imagenet_cls.report.jsonl import Record, describe_step
from imagenet_cls.text import printable

WRITE_REMEDY = "Make room or restore access, then resume from the last checkpoint with --resume."
_SHOWN_WAIT_PCT = 20  # a smaller share of waiting for data is not shown


class OutputStream:
    """A text stream whose errors end no run: after one, such as that of a reader that has gone or
    of a full disk, its file descriptor becomes /dev/null.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # encoding, isatty, fileno

    def write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        try:
            # an ASCII-only stdout gets escapes
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def flush(self) -> None:
        """Do nothing: `write` flushes."""


class Bar(tqdm):
    """A bar of tqdm without its thread, which would hold a lock while workers are forked."""

    monitor_interval = 0


# tqdm's own one includes a semaphore, which a rank that is killed would leave behind.
Bar.set_lock(threading.RLock())


class Console:
    """The lines and the progress bars of a run, on stdout by default."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = cast(TextIO, OutputStream(stream or sys.stdout))
        terminal = os.environ.get("TERM")
        self._has_bars = self._stream.isatty() and terminal not in ("dumb", "unknown")
        self._bars: dict[str, Bar] = {}
        self._pace_from: tuple[int, float] | None = None  # step and time of the first train record

    def message(self, text: str) -> None:
        """Print a message, above the bars if there are any. Control characters in it are
        escaped.
        """
        lines = "\n".join(map(printable, text.split("\n")))
        Bar.write(f"{lines}\n", file=self._stream, end="")

    def show_step(self, record: Record, total_steps: int, total_epochs: int) -> None:
        """Show the last step of a logging interval. record: a record of kind "train", see `jsonl`.

        A plain line has few fields, so that it fits into 80 columns in a long run.
        """
        step = record["step"]
        epoch = f"epoch {record['epoch'] + 1}/{total_epochs}"
        numbers = [describe_step(record)]
        if "images_per_sec" in record:
            numbers.append(f"{record['images_per_sec']:.0f} img/s")
        if record.get("data_wait_pct", 0.0) > _SHOWN_WAIT_PCT:
            numbers.append(f"waits for data {record['data_wait_pct']:.0f} %")
        if self._has_bars:
            self._draw("train", epoch, step, total_steps, "  ".join(numbers))
        else:
            eta = f"eta {self._eta(step, total_steps)}"
            self.message("  ".join([epoch, f"step {step}", *numbers, eta]))

    def eval_progress(self, images_done: int, images_total: int) -> None:
        """Show on a terminal how far an evaluation is."""
        if self._has_bars:
            self._draw("eval", "evaluating", images_done, images_total, "")

    def eval_result(self, text: str) -> None:
        """Print the result of an evaluation in place of its bar."""
        if "eval" in self._bars:
            self._bars.pop("eval").close()
        self.message(text)

    def close(self) -> None:
        """Remove the bars. May be called again."""
        for bar in self._bars.values():
            bar.close()
        self._bars = {}

    def _draw(self, name: str, description: str, done: int, total: int, numbers: str) -> None:
        """Draw the bar "train" or "eval"."""
        if name not in self._bars:
            self._bars[name] = Bar(
                total=total,
                initial=done,
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
                bar_format="{desc} {bar} {n_fmt}/{total_fmt} [{remaining}{postfix}]",
            )
        bar = self._bars[name]
        bar.set_description_str(description, refresh=False)
        bar.set_postfix_str(numbers, refresh=False)
        bar.n = done
        bar.refresh()

    def _eta(self, step: int, total_steps: int) -> str:
        """Time to the last step at the pace since the first record, evaluations and checkpoints
        included.
        """
        now = time.monotonic()
        if self._pace_from is None:  # the time before it includes the start of the workers
            self._pace_from = (step, now)
            return "-"
        sec_per_step = (now - self._pace_from[1]) / (step - self._pace_from[0])
        return Bar.format_interval(round(sec_per_step * (total_steps - step)))


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
