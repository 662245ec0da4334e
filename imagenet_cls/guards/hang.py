"""The stacks of a rank that hangs, in its log."""

import faulthandler
import time
from contextlib import AbstractContextManager
from pathlib import Path

_RESET_SEC = 1.0  # each reset starts a thread


class HangLog(AbstractContextManager["HangLog"]):
    """Appends the Python stacks of all threads to a file if `reset` is not called for `after_sec`.

    It works also while a thread that waits in C holds the GIL.
    """

    def __init__(self, path: Path, after_sec: float):
        self.after_sec = after_sec
        self._file = path.open("a", encoding="utf-8")
        self._started = 0.0
        self.reset()

    def __exit__(self, *exception: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()

    def reset(self) -> None:
        """Start the time again, at most once a second."""
        now = time.monotonic()
        if now - self._started >= _RESET_SEC:
            self._started = now
            faulthandler.dump_traceback_later(self.after_sec, file=self._file)
