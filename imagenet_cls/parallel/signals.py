"""Stop requests: a signal on any rank becomes a decision of all ranks at the same step.

A handler only sets a flag; nothing is saved inside one. After each step the flags of all ranks are reduced over the
control group, asynchronously: step s + 1 waits for the answer to step s, which has mostly come by then. A second Ctrl-C
waits for nothing: the process is gone, whatever it was doing. Called by `engine.train`.
"""

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from imagenet_cls.parallel.process_group import Group

# Two interrupts closer than this are one: a terminal and a launcher may both pass a single Ctrl-C on.
_SECOND_CTRL_C_SEC = 0.5


# What asks for a stop. SIGUSR2 is SLURM's word before a time limit (`parallel.requeue`); SIGUSR1 is taken by nccl.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequested(Exception):
    """The ranks agreed to stop the run. signal: the number of the signal that asked for it."""

    def __init__(self, signal: int):
        super().__init__(signal)
        self.signal = signal


class StopRequest:
    """Listens for the signals of `STOPPING` from `listen` to `close`. One for each run, in each rank's main thread.

    Where ranks got different ones, SIGTERM counts first, then SIGUSR2. One that this process was told to ignore, as a
    script's `&` does with Ctrl-C, stays ignored.

    Python's handlers run between two of the main thread's instructions, which can be seconds apart: a backward, a wait
    for another rank. So a thread reads signals as they arrive, from the pipe that Python's own C handler writes to,
    tells a second Ctrl-C from the first one passed on twice, and ends the process as a kill would. Nothing that was
    saved is lost by that, and nothing has to clean up: raised into the main thread, it might be swallowed by a
    finalizer, or held up by what cleans up.
    """

    def __init__(self, group: Group):
        self.group = group
        self.signal = 0
        self.pending: tuple[Any, torch.Tensor] | None = None
        self.previous: dict[int, Any] = {}
        self.arrivals: int | None = None  # the pipe's end that is written to
        self.previous_arrivals = -1

    def listen(self) -> None:
        """To be called, as `close`, in the main thread."""
        for number in STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self._note)
        arrivals, self.arrivals = os.pipe()
        os.set_blocking(self.arrivals, False)
        self.previous_arrivals = signal.set_wakeup_fd(self.arrivals, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(arrivals,), name="signals", daemon=True).start()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal = number

    def _watch(self, arrivals: int) -> None:
        """In the thread, until `close`, or the second Ctrl-C."""
        first_at: float | None = None
        # torchrun's ranks have sessions of their own, and it passes a second Ctrl-C on as SIGTERM.
        second = (signal.SIGINT, signal.SIGTERM) if "TORCHELASTIC_RUN_ID" in os.environ else (signal.SIGINT,)
        while number := os.read(arrivals, 1)[0]:
            now = time.monotonic()
            if first_at is None:
                first_at = now if number == signal.SIGINT else None
            elif number in second and now - first_at > _SECOND_CTRL_C_SEC:
                os._exit(128 + signal.SIGINT)
        os.close(arrivals)

    def check(self) -> None:
        """Raise StopRequested, on every rank at the same step, once any rank has received a signal."""
        if number := self.agreed():
            raise StopRequested(number)

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
        if self.arrivals is not None:
            signal.set_wakeup_fd(self.previous_arrivals)
            os.write(self.arrivals, b"\0")  # the thread's last: no signal has this number
            os.close(self.arrivals)
            self.arrivals = None
            for number, handler in self.previous.items():
                signal.signal(number, handler)
            self.previous.clear()
