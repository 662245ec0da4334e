"""The handlers of signals that stop a process, and the signal at the end of its parent.

Imports no torch.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE

# What stops a run after saving. A terminal that closes sends SIGHUP; SLURM sends SIGUSR2 before the
# time limit of a job that was submitted with --signal=USR2@SECONDS; SIGUSR1 is used by NCCL.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object]

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Two interrupts closer than this are one: `timeout` and some launchers deliver a single Ctrl-C
# twice.
_SECOND_INTERRUPT_SEC = 0.5


def handle_interrupts(handler: Handler | signal.Handlers) -> None:
    """Set the handler of Ctrl-C in the main thread, unless it is ignored, as in a background job of
    a script.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    ):
        signal.signal(signal.SIGINT, handler)


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler that ends this process silently."""
    os._exit(128 + number)


def handle_stop_signals(handler: Handler) -> dict[int, Any]:
    """Set the handler of the `STOP_SIGNALS` that are not ignored; returns the previous ones. A
    second Ctrl-C exits.
    """
    times: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            times.append(time.monotonic())
            if times[-1] - times[0] > _SECOND_INTERRUPT_SEC:
                exit_on_signal(number, frame)
        handler(number, frame)

    return {
        n: signal.signal(n, handle) for n in STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN
    }


def terminate_with_launching_process() -> None:
    """In a rank started by our launching process: receive SIGTERM when that process ends, even by
    SIGKILL (Linux).
    """
    launcher = os.environ.get(LAUNCHED_VARIABLE)
    if launcher is not None and set_parent_death_signal() and os.getppid() != int(launcher):
        os._exit(128 + signal.SIGTERM)  # the launching process ended before the call to prctl


def set_parent_death_signal(number: signal.Signals = signal.SIGTERM) -> bool:
    """Set the signal that the kernel sends to this process when its parent ends. False if
    unsupported.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0


def signal_launching_process(number: int) -> None:
    """Send our launching process, if any, the signal by which this rank was stopped, or it restarts
    the ranks.

    SIGINT is sent as SIGTERM, since a second SIGINT would end it at once.
    """
    if os.environ.get(LAUNCHED_VARIABLE) == str(os.getppid()):
        for forwarded in STOP_SIGNALS:
            signal.signal(forwarded, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM if number == signal.SIGINT else number)
