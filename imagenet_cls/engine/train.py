"""The training loop.

The position of a run is one number, `progress.step`, so a resumed run is this loop started at another step.
"""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from imagenet_cls.data import TrainBatch
from imagenet_cls.engine.build import TrainingParts
from imagenet_cls.engine.step import autocast
from imagenet_cls.parallel.wrap import gradient_sync
from imagenet_cls.seeding import hash_key, seed_generators

if TYPE_CHECKING:
    from imagenet_cls.engine.run import Run


def train(run: "Run") -> None:
    """Train from `run.progress.step` to the last step. A collective: every rank calls it.

    Raises StopRequested after a stop signal, NonFiniteError, DataError or ResourceError.
    """
    parts, plan, progress = run.parts, run.parts.plan, run.progress
    while progress.step < plan.total_steps:
        epoch, first_step = divmod(progress.step, plan.steps_per_epoch)
        batches = run.epoch_batches(epoch, first_step)
        for step in range(progress.step, min((epoch + 1) * plan.steps_per_epoch, plan.total_steps)):
            micro_batches: Iterable[TrainBatch] = islice(batches, plan.accumulation)
            if parts.sam.due(step):
                micro_batches = list(micro_batches)  # SAM iterates over them twice
            loss = forward_backward(parts, micro_batches, epoch, step)
            if parts.sam.due(step):
                with parts.sam.perturbed_weights():
                    forward_backward(parts, micro_batches, epoch, step)
            lr = parts.schedule(step, progress.evaluations)
            grad_norm, skipped = parts.updater.update(lr, parts.schedule.momentum(step))
            parts.batch_norm_statistics.sync(skipped)
            parts.ema.update(parts.model, step)
            progress.step = step + 1
            run.after_step(epoch, lr, loss, grad_norm, skipped)
        run.after_epoch()


def forward_backward(parts: TrainingParts, micro_batches: Iterable[TrainBatch], epoch: int, step: int) -> Tensor:
    """Accumulate the gradient of the mean loss over a step's micro-batches in `.grad`.

    Returns the mean loss of this rank's images, a detached scalar on the device.
    """
    accumulation, rank = parts.plan.accumulation, parts.group.rank
    losses = []
    for micro, batch in enumerate(micro_batches):
        images, targets = parts.prepare(batch, epoch, step, micro)  # to the device: normalize, erase, mix
        seed_generators(hash_key("batch", parts.config.seed, step, micro, rank), *parts.devices.all)  # for dropout
        with gradient_sync(parts.wrapped, micro == accumulation - 1):  # all-reduce with the last micro-batch only
            with autocast(parts.group.device, parts.evaluation.autocast_dtype):
                logits = parts.wrapped(images)
                loss = parts.criterion(logits, targets, images) / accumulation
            parts.scaler.scale(loss).backward()
        losses.append(loss.detach().to(parts.group.device, non_blocking=True))
    return sum(losses[1:], losses[0])
