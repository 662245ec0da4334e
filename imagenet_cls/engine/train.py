"""The training loop.

The position of a run is one number, `progress.step`, so a resumed run is this loop started at another step.
"""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.build import TrainingParts
from imagenet_cls.engine.meter import top1_share
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
    while progress.step < plan.total_steps and not progress.stopped_early:
        epoch, first_step = divmod(progress.step, plan.steps_per_epoch)
        batches = run.epoch_batches(epoch, first_step)
        for step in range(progress.step, min((epoch + 1) * plan.steps_per_epoch, plan.total_steps)):
            micro_batches: Iterable[TrainBatch] = islice(batches, plan.accumulation)
            if parts.sam.due(step):
                micro_batches = list(
                    micro_batches
                )  # sharpness-aware minimization (SAM) iterates twice
            loss_and_top1 = forward_backward(parts, micro_batches, epoch, step)
            if parts.sam.due(step):
                with parts.sam.perturbed_weights():
                    forward_backward(parts, micro_batches, epoch, step)
            lr = parts.schedule(
                step, progress.evaluations
            )  # only the plateau schedule uses the evaluations
            with_norm = parts.config.log.has_grad_norm(step)
            grad_norm, skipped = parts.updater.update(lr, parts.schedule.momentum(step), with_norm)
            parts.batch_norm_statistics.sync(skipped)
            parts.ema.update(parts.model, step)
            progress.step = step + 1
            run.after_step(epoch, lr, loss_and_top1, grad_norm, skipped)
        run.after_epoch()


def forward_backward(
    parts: TrainingParts, micro_batches: Iterable[TrainBatch], epoch: int, step: int
) -> Tensor:
    """Run forward and backward over a step's micro-batches.

    `.grad` then holds the gradient of the mean loss, averaged over ranks and multiplied by the loss scale.

    Returns the loss and the top-1 accuracy (0 to 1): (2,), detached, on the device. Averaged over ranks they are those
    of the global batch.
    """
    plan, rank = parts.plan, parts.group.rank
    metrics = []
    for micro_step, batch in enumerate(micro_batches):
        images, targets = parts.preprocess(
            batch, epoch, step, micro_step
        )  # to the device: normalize, erase, mix
        seed_generators(
            hash_key("batch", parts.config.seed, step, micro_step, rank), *parts.devices.all
        )  # for dropout
        # `accumulation` if all micro-batches have the same size; else each loss is weighted by its number of images.
        divisor = plan.global_batch / (plan.world_size * len(targets))
        with gradient_sync(
            parts.wrapped, micro_step == plan.accumulation - 1
        ):  # all-reduce with the last one only
            with autocast(parts.group.device, parts.evaluation.autocast_dtype):
                logits = parts.wrapped(images)
                loss = parts.criterion(logits, targets, images) / divisor
            parts.scaler.scale(loss).backward()
        loss_and_top1 = torch.stack([loss.detach(), top1_share(logits, targets) / divisor])
        # With DataParallel, the loss may be on another device (`parallel.output_device`).
        metrics.append(loss_and_top1.to(parts.group.device, non_blocking=True))
    return sum(metrics[1:], metrics[0])
