"""Log files: `logs/rank<r>.log` in the run folder receives all logging and warnings of this process."""

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

from imagenet_cls.files import explain_write_errors
from imagenet_cls.report.jsonl import WRITE_REMEDY

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RankLog(logging.FileHandler):
    """The handler of this process. A line that can't be written is dropped: checkpoints report a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing; the base class would print a traceback for every line."""


def open_log(folder: Path, rank: int) -> logging.Logger:
    """Send all logging and warnings of this process to `folder/logs/rank<rank>.log`, and not to the terminal.

    Appends to the file. A second call moves the log to the new file. Messages of libraries are kept from INFO on. With
    TORCH_LOGS set, torch's own loggers also print to the terminal. Returns the project's logger. Raises ResourceError.
    """
    close_log()
    path = folder / "logs" / f"rank{rank}.log"
    with explain_write_errors(path, WRITE_REMEDY):
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RankLog(path, mode="a", encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    _remove_screen_handlers(root)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_error
    return logging.getLogger("imagenet_cls")


def close_log() -> None:
    """Close the file that `open_log` opened, if any, and print warnings to stderr again."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, RankLog)]:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):  # the file is closed, but its last lines may be missing
            handler.close()
        root.setLevel(logging.WARNING)
        logging.captureWarnings(False)
        threading.excepthook = threading.__excepthook__


def _log_thread_error(ended: threading.ExceptHookArgs) -> None:
    """Log an exception that ended a thread, such as TensorBoard's on a full disk; the caller detects it separately."""
    if ended.exc_type is not SystemExit and ended.exc_value is not None:
        name = ended.thread.name if ended.thread is not None else "a thread"
        logging.getLogger("imagenet_cls").error("%s ended early", name, exc_info=ended.exc_value)


def _remove_screen_handlers(root: logging.Logger) -> None:
    """Remove the handlers that print (torch, timm and huggingface_hub have some); their loggers propagate instead."""
    screens = [stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) if stream is not None]
    loggers = [logger for logger in root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in [root, *loggers]:
        if "TORCH_LOGS" in os.environ and logger.name.partition(".")[0] == "torch":
            continue
        for handler in logger.handlers[:]:
            # By its stream: files are StreamHandlers as well, and so is torch's trace handler, which writes nowhere.
            if getattr(handler, "stream", None) in screens:
                logger.removeHandler(handler)
                logger.propagate = True
