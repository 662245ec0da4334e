"""Loss and accuracy of every step, speed, and the share of time spent waiting for data."""

import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from imagenet_cls.config.metrics import TRAIN_METRICS, Metric
from imagenet_cls.parallel.collectives import all_reduce_mean
from imagenet_cls.parallel.memory import peak_memory_bytes
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.text import count_of


class StepResult(NamedTuple):
    """A step of the training loop; the tensors are on the device.

    step: counted from 1. lr: the learning rate, before the factor `lr_scale` of each parameter
    group. loss_and_metric: what `forward_backward` returned, (2,). grad_norm: scalar, before
    clipping. skipped: bool scalar, whether the update was skipped.
    """

    step: int
    epoch: int
    lr: float
    loss_and_metric: Tensor
    grad_norm: Tensor
    skipped: Tensor


class Meter:
    """Collects steps and turns them into records for metrics.jsonl. Tensors stay on the device
    until `flush`.
    """

    def __init__(
        self, context: RankContext, global_batch: int, metric: Metric = TRAIN_METRICS["single"]
    ):
        """metric: that of `StepResult.loss_and_metric`."""
        self.context = context
        self.global_batch = global_batch
        self.metric = metric
        # This rank's losses in the steps of the last `flush`: (steps,)
        self.own_losses: Tensor | None = None
        self.results: list[StepResult] = []  # since the last `flush`
        # Of the last `flush`, and of earlier ones in the same epoch.
        self.epoch_records: list[dict[str, Any]] = []
        self.created_at = time.perf_counter()
        self.total_steps = 0
        self.total_seconds = 0.0
        self.last_interval = (0, 0.0)  # steps and seconds of the last `flush`
        self.restart_clock()

    def restart_clock(self) -> None:
        """Start timing again after a `flush`, so that what came in between (an evaluation, a save)
        does not count.
        """
        self.started_at = time.perf_counter()
        self.waited_sec = 0.0  # for data

    def add(self, result: StepResult) -> None:
        self.results.append(result)

    def add_wait(self, seconds: float) -> None:
        """Add the time that the loop waited for a batch."""
        self.waited_sec += seconds

    def flush(self) -> list[dict[str, Any]]:
        """The records of all steps since the last call, loss and accuracy averaged over the ranks.
        A collective.
        """
        results, self.results = self.results, []
        if not results:
            return []
        own = torch.stack([result.loss_and_metric for result in results])
        self.own_losses = own[:, 0]
        norms = [result.grad_norm for result in results]
        skips = [result.skipped for result in results]
        columns = torch.column_stack([own, torch.stack(norms), torch.stack(skips)])
        means = all_reduce_mean(columns, self.context).tolist()
        records = []
        for result, (loss, share, norm, skipped) in zip(results, means, strict=True):
            record: dict[str, Any] = {
                "kind": "train",
                "step": result.step,
                "epoch": result.epoch,
                "loss": loss,
                self.metric.field: 100 * share,
                "lr": result.lr,
                "grad_norm": norm,
            }
            if skipped:
                record["skipped"] = True
            records.append(record)
        if self.epoch_records and self.epoch_records[0]["epoch"] != records[0]["epoch"]:
            self.epoch_records = []
        self.epoch_records += records
        seconds = time.perf_counter() - self.started_at
        self.last_interval = (len(records), seconds)
        self.total_steps += len(records)
        self.total_seconds += seconds
        records[-1] |= {
            "images_per_sec": len(records) * self.global_batch / seconds,
            "data_wait_pct": 100 * self.waited_sec / seconds,
            "memory_mib": peak_memory_bytes() / 2**20,
        }
        self.restart_clock()
        return records

    def describe_epoch(self, steps: int) -> str:
        """`train loss 0.5123, 85.2 %`: the mean loss and metric of the last epoch's steps in this
        process; "" if there are none.

        steps: the number of steps of the epoch. After a resume this process may have made fewer;
        then the text ends with their number.
        """
        made = len(self.epoch_records)
        if made == 0:
            return ""
        loss = sum(record["loss"] for record in self.epoch_records) / made
        percent = sum(record[self.metric.field] for record in self.epoch_records) / made
        text = f"train loss {loss:.4f}, {percent:.1f} %"
        return text if made == steps else f"{text} in {made} steps"

    def describe_total(self) -> str:
        """`66 steps in 0:01:23, 512 img/s` of this process: the duration includes evaluations, the
        speed does not.
        """
        duration = timedelta(seconds=round(time.perf_counter() - self.created_at))
        speed = self.total_steps * self.global_batch / max(self.total_seconds, 1e-9)
        return f"{count_of(self.total_steps, 'step')} in {duration}, {speed:.0f} img/s"
