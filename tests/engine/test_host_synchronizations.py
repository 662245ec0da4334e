"""The training loop does not wait for the device between two reports, except where
docs/architecture.md says so.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.config.load import load_config
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.build import build
from imagenet_cls.engine.meter import Meter, StepResult
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.train import train
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import RankContext

STEPS = 12
WORDS = [
    "data.name=synthetic",
    "data.kwargs={train_images: 96, val_images: 8, num_classes: 5, size_px: 16}",
    "augment.size_px=16",
    "eval.crop_px=16",
    "train.epochs=1",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
    "augment.erasing.prob=0.5",
    "ema.decay=0.9",
    "log.writers=[jsonl]",
]


class CountReads(TorchDispatchMode):
    """Counts the operations that read a number from a tensor: `item`, `bool`, `float`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


class Steps:
    """In place of `engine.run.Run`: what it does between two reports. Its checks begin after the
    first step.
    """

    def __init__(self, parts: TrainingParts):
        self.parts, self.progress = parts, Progress()
        self.meter = Meter(parts.context, parts.plan.global_batch)
        self.reads, self.checks = CountReads(), ExitStack()

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        return self.parts.prefetch(self.parts.train_loader.epoch(epoch, first_step))

    def after_step(self, result: StepResult) -> None:
        self.meter.add(result)
        if self.progress.step == 1:
            self.checks.enter_context(self.reads)
            if self.parts.context.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
                self.checks.callback(torch.cuda.set_sync_debug_mode, "default")

    def after_epoch(self) -> None:
        self.checks.close()
        records = self.meter.flush()
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))


def reads_after_first_step(device: torch.device, *words: str) -> int:
    steps = Steps(
        build(load_config(None, [*WORDS, *words]).config, RankContext(RankInfo(), device))
    )
    with steps.checks:  # they end after a failure, too
        train(steps)
    return steps.reads.count


@pytest.mark.parametrize(
    ("words", "reads"),
    [
        ([], 0),
        (["train.clip_norm=1.0", "optimizer.name=adamw", "optimizer.lr=0.001"], 0),
        (["mix.mixup_alpha=0.2", "mix.cutmix_alpha=1.0"], 0),
        (["optimizer.kwargs.fused=false"], STEPS - 1),
    ],
)
def test_steps_on_a_cpu_read_nothing_but_the_flag_for_optimizers_that_are_not_fused(
    words: list[str], reads: int
) -> None:
    assert (
        reads_after_first_step(
            torch.device("cpu"), "device=cpu", "model.name=helpers:plain", *words
        )
        == reads
    )
