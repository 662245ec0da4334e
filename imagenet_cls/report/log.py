"""Log files: `logs/rank<r>.log` in the run folder takes every message and warning that is not meant for the screen.

Owns where Python's `logging` and `warnings`, and what ends a thread, go in this process, which is global by their
nature; `close_log` puts back what can be. Refuses the screen: libraries (torch, timm, huggingface_hub) attach their own
handlers to stderr, and those are moved into the file. Called by `engine` on every rank, once the libraries are
imported; tracebacks of a run go to the same file.
"""

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

from imagenet_cls.report.jsonl import writing

LOGGER_NAME = "imagenet_cls"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RankLog(logging.FileHandler):
    """The handler of this process. A line that can't be written is dropped: checkpoints report a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing, where the base class would print a traceback on the screen for every line."""


def open_log(folder: Path, rank: int) -> logging.Logger:
    """Send all logging and warnings of this process to `folder/logs/rank<rank>.log`, and to nowhere else.

    Appends, so that a resumed run keeps its history; a second call moves the log to the new file. Messages of libraries
    from INFO on are kept. With TORCH_LOGS set, torch's own loggers stay on the screen, as the user asked. Returns the
    project's logger. Raises ResourceError where the file can't be opened.
    """
    close_log()
    path = folder / "logs" / f"rank{rank}.log"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RankLog(path, mode="a", encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    _take_from_screen(root)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_error
    return logging.getLogger(LOGGER_NAME)


def close_log() -> None:
    """Close the file that `open_log` opened, if any, and let warnings go to the screen again."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, RankLog)]:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):  # the file is closed, its last lines may be lost
            handler.close()
        root.setLevel(logging.WARNING)
        logging.captureWarnings(False)
        threading.excepthook = threading.__excepthook__


def _log_thread_error(ended: threading.ExceptHookArgs) -> None:
    """What ended a thread, such as TensorBoard's on a full disk: whoever waits for the thread learns it by itself."""
    if ended.exc_type is not SystemExit and ended.exc_value is not None:
        name = ended.thread.name if ended.thread is not None else "a thread"
        logging.getLogger(LOGGER_NAME).error("%s ended early", name, exc_info=ended.exc_value)


def _take_from_screen(root: logging.Logger) -> None:
    """Remove the handlers that print, and let their loggers pass messages up to the file instead."""
    screens = [stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) if stream is not None]
    named = [logger for logger in root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in [root, *named]:
        if "TORCH_LOGS" in os.environ and logger.name.partition(".")[0] == "torch":
            continue
        for handler in logger.handlers[:]:
            # By its stream, since files are StreamHandlers as well, and so is torch's trace handler, which writes
            # nowhere.
            if getattr(handler, "stream", None) in screens:
                logger.removeHandler(handler)
                logger.propagate = True
