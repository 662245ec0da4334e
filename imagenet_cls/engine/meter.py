"""Losses of every step, speed, and the share of time spent waiting for data."""

import time
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from imagenet_cls.parallel.collectives import all_reduce_mean
from imagenet_cls.parallel.process_group import Group

T = TypeVar("T")


class Meter:
    """Collects steps and turns them into records for metrics.jsonl. Losses stay on the device until `flush`."""

    def __init__(self, group: Group, global_batch: int):
        self.group = group
        self.global_batch = global_batch
        self.own_losses: Tensor | None = None  # of the steps of the last `flush`, this rank's own: (steps,)
        self.rows: list[tuple[int, int, float]] = []
        self.values: list[Tensor] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude what came before (an evaluation, a checkpoint) from the speed."""
        self.started = time.perf_counter()
        self.waited = 0.0
        self.timed_steps = 0

    def time_waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches and add up the time that the loop waits for them."""
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
        self.own_losses = own[:, 0]
        values = all_reduce_mean(own.clone(), self.group).tolist()
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

    def _memory_mib(self) -> float:
        """Peak memory so far: of the CUDA allocator, or the resident set size of this process on CPUs."""
        if self.group.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.group.device) / 2**20
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
