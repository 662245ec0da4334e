"""What a run measures of itself: losses of every step, speed, and the share of time spent waiting for data.

Losses stay on the device until `flush`, which reads all of them at once. Counts the steps that were not finite, and
ends a run that has too many of them in a row. Called by `engine.train`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from imagenet_cls.guards.nonfinite import nonfinite_error
from imagenet_cls.parallel.collectives import all_mean
from imagenet_cls.parallel.process_group import Group

T = TypeVar("T")

# fp16: the loss scale starts at 65,536 and is halved at each overflow until gradients fit.
_LOSS_SCALE_SEARCH_STEPS = 50


class Meter:
    """Collects rows of steps and turns them into records for `report`."""

    def __init__(
        self,
        group: Group,
        global_batch: int,
        max_nonfinite_steps: int,
        overflow_is_normal: bool,
        samples_of: Callable[[int], Sequence[str]] = lambda step: (),
    ):
        """samples_of: names of the images that this rank saw in a step; asked once, when a run gives up."""
        self.group = group
        self.global_batch = global_batch
        self.max_nonfinite_steps = max_nonfinite_steps
        self.overflow_is_normal = overflow_is_normal  # fp16, while the loss scale finds its height
        self.samples_of = samples_of
        self.nonfinite_steps = 0
        self.nonfinite_in_a_row = 0
        self.in_doubt = False  # the last step had no finite loss and gradient
        self.own_losses: Tensor | None = None
        self.rows: list[tuple[int, int, float]] = []
        self.values: list[Tensor] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what came before (an evaluation, a checkpoint) out of the speed."""
        self.started = time.perf_counter()
        self.waited = 0.0
        self.timed_steps = 0

    def waiting_for(self, batches: Iterator[T]) -> Iterator[T]:
        """Pass batches through and add up the time that the loop waits for them."""
        while True:
            before = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - before
            yield batch

    def add(self, step: int, epoch: int, lr: float, loss: Tensor, norm: Tensor, skipped: Tensor) -> None:
        """One step. loss: this rank's mean; norm: of the reduced gradient; all scalars on the device."""
        self.rows.append((step, epoch, lr))
        self.values.append(torch.stack([loss, norm.to(loss.dtype), skipped.to(loss.dtype)]))
        self.timed_steps += 1

    def flush(self) -> list[dict[str, Any]]:
        """The records of all steps since the last call, losses averaged over the ranks. A collective."""
        if not self.rows:
            return []
        own = torch.stack(self.values)
        self.own_losses = own[:, 0]  # stays on the device: who it was is asked only when a run gives up
        values = all_mean(own.clone(), self.group).tolist()
        records = [
            {"kind": "train", "step": step, "epoch": epoch, "loss": loss, "lr": lr, "grad_norm": norm}
            | ({"skipped": True} if skipped else {})
            for (step, epoch, lr), (loss, norm, skipped) in zip(self.rows, values, strict=True)
        ]
        self.rows, self.values = [], []
        seconds = time.perf_counter() - self.started
        records[-1] |= {
            "images_per_sec": self.timed_steps * self.global_batch / seconds,
            "data_wait_pct": 100 * self.waited / seconds,
            "memory_mib": self._memory_mib(),
        }
        self.restart_clock()
        return records

    def note_nonfinite(self, records: list[dict[str, Any]], last_step: int) -> str | None:
        """What a user should see of steps without a finite loss and gradient; None where there was none, or where only
        a loss scale found its height. last_step: of the run, which ends as if all were well.
        """
        steps = [
            record["step"]
            for record in records
            if not math.isfinite(record["loss"]) or ("skipped" in record and not self.overflow_is_normal)
        ]
        if not steps:
            return None
        self.nonfinite_steps += len(steps)
        which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        ending = "; the run ends with it: look at the evaluation before you use the weights"
        return (
            f"{which}: loss or gradient was NaN or infinite ({self.nonfinite_steps} such steps since the start)"
            f"{ending if steps[-1] == last_step else ''}"
        )

    def check_finite(self, records: list[dict[str, Any]]) -> None:
        """Raise NonFiniteError after too many steps in a row without a finite loss and gradient, alike on every rank.

        records: what `flush` has returned, all of it; they are written before this looks at them.
        """
        for row, record in enumerate(records):
            finite_loss = math.isfinite(record["loss"])
            self.in_doubt = not finite_loss or ("skipped" in record and not self.overflow_is_normal)
            self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if "skipped" in record or not finite_loss else 0
            patience = _LOSS_SCALE_SEARCH_STEPS if self.overflow_is_normal and finite_loss else 0
            if self.nonfinite_in_a_row >= self.max_nonfinite_steps + patience:
                assert self.own_losses is not None and len(self.own_losses) == len(records), "flush comes first"
                own_loss, samples = self.own_losses[row].item(), self.samples_of(record["step"])
                raise nonfinite_error(record, self.nonfinite_in_a_row, own_loss, samples, self.group)

    def _memory_mib(self) -> float:
        """Peak memory so far: of the GPU's allocator, or this process's resident set."""
        if self.group.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.group.device) / 2**20
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
