"""Loss and accuracy of every step, speed, and the share of time spent waiting for data."""

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from imagenet_cls.guards.memory import peak_memory_bytes
from imagenet_cls.optim.losses import Outputs
from imagenet_cls.parallel.collectives import all_reduce_mean
from imagenet_cls.parallel.process_group import Group

T = TypeVar("T")


class Meter:
    """Collects steps and turns them into records for metrics.jsonl. Tensors stay on the device until `flush`."""

    def __init__(self, group: Group, global_batch: int):
        self.group, self.global_batch = group, global_batch
        self.own_losses: Tensor | None = (
            None  # of the steps of the last `flush`, this rank's own: (steps,)
        )
        self.rows: list[tuple[int, int, float]] = []
        self.values: list[tuple[Tensor, Tensor | None, Tensor]] = []
        self.created = time.perf_counter()
        self.total_steps = 0
        self.total_timed_steps, self.total_seconds = 0, 0.0
        self.last_interval = (0, 0.0)  # steps and seconds of the last `flush`
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude what came before (an evaluation, a checkpoint) from the speed."""
        self.started = time.perf_counter()
        self.waited = 0.0
        self.timed_steps = 0

    def time_waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches and add up the time that the loop waits for them."""
        before = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - before
            yield batch
            before = time.perf_counter()

    def add(
        self,
        step: int,
        epoch: int,
        lr: float,
        loss_and_top1: Tensor,
        norm: Tensor | None,
        skipped: Tensor,
    ) -> None:
        """One step. loss_and_top1: of `forward_backward`; norm: of the reduced gradient (scalar); all on the device."""
        self.rows.append((step, epoch, lr))
        self.values.append((loss_and_top1, norm, skipped))
        self.timed_steps += 1

    def flush(self) -> list[dict[str, Any]]:
        """The records of all steps since the last call, loss and accuracy averaged over the ranks. A collective."""
        if not self.rows:
            return []
        losses_and_top1, norms, skips = zip(*self.values, strict=True)
        own = torch.stack(losses_and_top1)
        self.own_losses = own[:, 0]
        known_norms = torch.stack([own.new_zeros(()) if norm is None else norm for norm in norms])
        columns = torch.column_stack([own, known_norms, torch.stack(skips)])
        values = all_reduce_mean(columns, self.group).tolist()
        records = [
            {
                "kind": "train",
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "top1_pct": 100 * top1,
                "lr": lr,
            }
            | ({} if norms[row] is None else {"grad_norm": norm})
            | ({"skipped": True} if skipped else {})
            for row, ((step, epoch, lr), (loss, top1, norm, skipped)) in enumerate(
                zip(self.rows, values, strict=True)
            )
        ]
        self.rows, self.values = [], []
        seconds = time.perf_counter() - self.started
        self.last_interval = (self.timed_steps, seconds)
        self.total_steps += len(records)
        self.total_timed_steps += self.timed_steps
        self.total_seconds += seconds
        records[-1] |= {
            "images_per_sec": self.timed_steps * self.global_batch / seconds,
            "data_wait_pct": 100 * self.waited / seconds,
            "memory_mib": peak_memory_bytes() / 2**20,
        }
        self.restart_clock()
        return records

    def describe_total(self) -> str:
        """`66 steps in 0:01:23, 512 img/s` of this process: the duration includes evaluations, the speed does not."""
        duration = timedelta(seconds=round(time.perf_counter() - self.created))
        speed = self.total_timed_steps * self.global_batch / max(self.total_seconds, 1e-9)
        return f"{self.total_steps} steps in {duration}, {speed:.0f} img/s"


def top1_share(outputs: Outputs, targets: Tensor) -> Tensor:
    """The share of images (0 to 1) whose highest logit is that of the target: a float32 scalar on the device.

    outputs, targets: as the criterion takes them. A mixed target counts as the class with the largest share, as in
    torchvision's reference scripts. With `augment.splits` the first views count.
    """
    logits = (outputs if isinstance(outputs, Tensor) else outputs[0])[: len(targets)]
    classes = targets.argmax(1) if targets.is_floating_point() else targets
    return (logits.argmax(1) == classes.to(logits.device, non_blocking=True)).float().mean()
