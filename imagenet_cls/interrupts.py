"""What SIGINT (Ctrl-C) does to this process. Nothing changes if it was ignored before, as in a script's `&`."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def end_by_interrupts() -> None:
    """Ctrl-C ends this process silently. While libraries are imported, one might swallow a KeyboardInterrupt."""
    _on_interrupt(lambda number, frame: os._exit(128 + number))


def raise_interrupts() -> None:
    """Ctrl-C raises KeyboardInterrupt, Python's default: for a command that has to clean up."""
    _on_interrupt(signal.default_int_handler)


def ignore_interrupts() -> None:
    """Ctrl-C is ignored: this process is about to end."""
    _on_interrupt(signal.SIG_IGN)


def _on_interrupt(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Python allows signal handlers in the main thread only; in another thread this does nothing."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
