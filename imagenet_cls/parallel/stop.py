"""Stop requests: a signal on any rank becomes a decision of all ranks at the same step.

A handler only sets a flag; nothing is saved inside one. After each step the flags of all ranks are reduced over the
control group, asynchronously: the answer to step s is read at step s + 1, so no step waits for it. Called by
`engine.train`.
"""

import contextlib
import signal
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from imagenet_cls.parallel.group import Group

# Two interrupts closer than this are one: a terminal and a launcher may both pass a single Ctrl-C on.
_SECOND_CTRL_C_SEC = 0.5


# What asks for a stop. SIGUSR2 is SLURM's word before a time limit (`parallel.requeue`); SIGUSR1 is taken by nccl.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequest:
    """Listens for the signals of `STOPPING` from `listen` to `close`. One for each run, in each rank's main thread.

    Where ranks got different ones, SIGTERM counts first, then SIGUSR2.
    """

    def __init__(self, group: Group):
        self.group = group
        self.signal = 0
        self.first_at = 0.0
        self.pending: tuple[Any, torch.Tensor] | None = None
        self.previous: dict[int, Any] = {}

    def listen(self) -> None:
        for number in STOPPING:
            self.previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C: out at once. torchrun passes the second one on as SIGTERM.
        if self.signal == signal.SIGINT and time.monotonic() - self.first_at > _SECOND_CTRL_C_SEC:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self.first_at = number, time.monotonic()

    def agreed(self) -> int:
        """The signal that the run has to stop for, or 0; the same answer on every rank at the same step.

        To be called by every rank equally often: after each optimizer step, and before batches of an evaluation.
        """
        if self.group.control is None:
            return self.signal
        answer = 0
        if self.pending is not None:
            work, flag = self.pending
            work.wait()
            answer = int(flag.item())
        flag = torch.tensor([self.signal], dtype=torch.int32)
        self.pending = (dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group.control, async_op=True), flag)
        return answer

    def close(self) -> None:
        """Wait for the reduction in flight and give the signals back."""
        if self.pending is not None:
            with contextlib.suppress(RuntimeError):  # a rank is gone: what is on its way up already says so
                self.pending[0].wait()
            self.pending = None
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous.clear()
