"""What Ctrl-C does to this process: end it, raise KeyboardInterrupt, or nothing."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def end_by_interrupts() -> None:
    """From here on Ctrl-C ends this process without a word.

    Raised while libraries are imported, as Python would have it, it might be taken for a missing module by one of them,
    which goes on without it.
    """
    _on_interrupt(lambda number, frame: os._exit(128 + number))


def raise_interrupts() -> None:
    """From here on Ctrl-C is KeyboardInterrupt, as Python has it: for what has to clean up."""
    _on_interrupt(signal.default_int_handler)


def ignore_interrupts() -> None:
    """From here on Ctrl-C changes nothing: this process is on its way out, which takes a moment.

    A terminal and a launcher may both pass a Ctrl-C on, and people press it again.
    """
    _on_interrupt(signal.SIG_IGN)


def _on_interrupt(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Where this process was told to ignore Ctrl-C, as by a script's `&`, it stays so. Python hands signals to the main
    thread only: from another one this does nothing.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
