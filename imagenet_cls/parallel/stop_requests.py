"""Stop requests: a signal on any rank stops all ranks at the same step.

The handler sets a flag. A single rank reads it after each step. Several ranks all-reduce their
flags every few steps, asynchronously: a check waits for the result of the previous check.
"""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.parallel.signals import (
    STOP_SIGNALS,
    handle_stop_signals,
    set_parent_death_signal,
)

_INTERVAL_SEC = 0.5  # between two checks, unless a step takes longer


class StopRequested(Exception):
    """All ranks agreed to stop at this step, because of `signal_number`."""

    def __init__(self, signal_number: int):
        super().__init__(f"Stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


class StopSignalHandler:
    """Handles `signals.STOP_SIGNALS` from `install` to `close`, both called in the main thread.

    Of several ranks' signals, the highest number has priority. After the first signal of a rank
    only a second Ctrl-C, which ends the process, has an effect.
    """

    def __init__(self, context: RankContext):
        self.context = context
        self.signal = 0
        self.is_stopping = False  # whether `check` has raised StopRequested
        self.every_steps = 1
        self._steps = 0  # since the last check
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._previous: dict[int, Any] = {}
        self._closed = threading.Event()

    def install(self, block_in_children: bool = False) -> None:
        """Install the handlers. block_in_children: processes that this thread starts later don't
        receive the signals: one to the process group would end the compiler that torch.compile
        runs. A second Ctrl-C then has its effect only when the compiler has ended.
        """
        self._previous = handle_stop_signals(self._handle)
        if block_in_children:
            # A thread that does not block them receives them. Python calls handlers in this one.
            threading.Thread(target=self._closed.wait, name="signals", daemon=True).start()
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and LAUNCHED_VARIABLE in os.environ:
            # a second Ctrl-C ends the launching process, and so this one
            set_parent_death_signal(signal.SIGKILL)
        self.signal = self.signal or number

    def set_interval(self, steps: int, seconds: float) -> None:
        """Set `every_steps` to the steps that take half a second. seconds: the duration of this
        rank's last `steps` steps.
        """
        self.every_steps = 1
        if self.context.cpu_group is not None and steps > 1:
            slowest = torch.tensor([seconds / steps], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.context.cpu_group)
            self.every_steps = max(1, min(steps, int(_INTERVAL_SEC / slowest.item())))

    def check_after_step(self, force: bool = False) -> None:
        """Call `check` after every `every_steps`-th step, or if `force`; a single rank checks after
        each step.
        """
        self._steps += 1
        if force or self._steps >= self.every_steps:
            self.check()

    def check(self) -> None:
        """Raise StopRequested on all ranks at the same step, if any of them received a stop signal.
        A collective.
        """
        self._steps = 0
        number = self.signal
        if self.context.cpu_group is not None:
            number = 0
            if self._pending is not None:
                work, flag = self._pending
                work.wait()
                number = int(flag.item())
                self._pending = None
            if not number:
                flag = torch.tensor([self.signal], dtype=torch.int32)
                work = dist.all_reduce(
                    flag, dist.ReduceOp.MAX, group=self.context.cpu_group, async_op=True
                )
                self._pending = (work, flag)
        if number:
            self.signal = self.signal or number
            self.is_stopping = True
            raise StopRequested(number)

    def close(self) -> None:
        """Wait for a pending all-reduce. Restore the previous signal handlers, unless a signal was
        received.
        """
        if self._pending is not None:
            # a rank has exited; the exception that is propagating names it
            with contextlib.suppress(RuntimeError):
                self._pending[0].wait()
            self._pending = None
        self._closed.set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if not self.signal:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
