"""The stacks of a rank that hangs, in its log."""

import faulthandler
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_RESET_SEC = 1.0  # each reset starts a thread


class HangLog:
    """Appends the Python stacks of all threads to a file if `reset` is not called for a time. A context manager.

    `faulthandler` writes them from a thread that does not need the GIL, so also while a call of a library blocks.
    Nothing else happens: whether the run ends is decided by the timeouts.
    """

    def __init__(self, path: Path, after_sec: float):
        self.after_sec = after_sec
        self._file = path.open("a", encoding="utf-8")
        self._started = 0.0

    def __enter__(self) -> Self:
        self.reset()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()

    def reset(self) -> None:
        """Start the time again, at most once a second."""
        now = time.monotonic()
        if now - self._started >= _RESET_SEC:
            self._started = now
            faulthandler.dump_traceback_later(self.after_sec, file=self._file)
