"""The training loop.

The position of a run is one number, `progress.step`, so a resumed run is this loop started at
another step. `Plan.place` turns it into an epoch.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.meter import StepResult
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.models.adapt import set_training
from imagenet_cls.parallel.wrap import check_gradients_reduced, gradient_sync
from imagenet_cls.seeding import hash_key, seed_generators


class TrainingRun(Protocol):
    """What the loop needs besides the computation: batches, and the calls between two steps.

    `engine.run.Run` is a training run, and `engine.short_run` has one without a run folder.
    """

    parts: TrainingParts
    progress: Progress

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        """This rank's micro-batches of an epoch, from its step `first_step` on."""
        ...

    def after_step(self, result: StepResult) -> None:
        """Called after each step, when `progress.step` has been increased."""
        ...

    def after_epoch(self) -> None:
        """Called after the last step of each epoch, and of the run. It may evaluate."""
        ...


def train(run: TrainingRun) -> None:
    """Train from `run.progress.step` to the last step. A collective: every rank calls it.

    Raises StopRequested after a stop signal, NonFiniteError, DataError or ResourceError.
    """
    parts = run.parts
    plan = parts.plan
    progress = run.progress
    while progress.step < plan.total_steps and not progress.stopped_early:
        epoch, first_step = plan.place(progress.step)
        end = min(progress.step + plan.steps_per_epoch - first_step, plan.total_steps)
        batches = run.epoch_batches(epoch, first_step)
        # `model.train()`, but frozen BatchNorm layers stay in evaluation mode. An evaluation leaves
        # another mode.
        set_training(parts.model, parts.config.model)
        for step in range(progress.step, end):
            loss_and_metric = compute_gradients(parts, batches, epoch, step)
            lr = parts.schedule(step + plan.offset)
            # unscales, clips, steps unless the gradient is not finite, clears the gradients
            grad_norm, skipped = parts.updater.update(lr)
            parts.batch_norm_statistics.sync(skipped)
            parts.ema.update(parts.model, step)
            progress.step = step + 1
            result = StepResult(step + 1, epoch, lr, loss_and_metric, grad_norm, skipped)
            run.after_step(result)
        run.after_epoch()


def compute_gradients(
    parts: TrainingParts, batches: Iterator[TrainBatch], epoch: int, step: int
) -> Tensor:
    """Take the micro-batches of a step from `batches`, and run `forward_backward` over them, or the
    function that `train.step` names in its place.

    With sharpness-aware minimization (SAM) a second pass over the same micro-batches computes the
    gradient at the perturbed weights. Returns the loss and the metric of the first pass.
    """
    if not parts.sam.due(step):
        return parts.forward_backward(parts, batches, epoch, step)
    micro_batches = [next(batches) for _ in range(parts.plan.accumulation)]
    loss_and_metric = parts.forward_backward(parts, iter(micro_batches), epoch, step)
    with parts.sam.perturbed_weights():
        parts.forward_backward(parts, iter(micro_batches), epoch, step)
    return loss_and_metric


def forward_backward(
    parts: TrainingParts, batches: Iterator[TrainBatch], epoch: int, step: int
) -> Tensor:
    """Run forward and backward over the micro-batches of a step, the next ones of `batches`.

    `.grad` then holds the gradient of the mean loss, averaged over ranks and multiplied by the loss
    scale.

    Returns the loss and the metric (`Task.step_metric`): (2,), detached, on the device. Averaged
    over ranks they are the values of the global batch. Raises StopIteration if the batches end
    early.
    """
    plan = parts.plan
    context = parts.context
    loss_and_metric = torch.zeros(2, device=context.device)
    for micro_step in range(plan.accumulation):
        # Normalizes, erases and mixes the images, on the device.
        images, targets = parts.preprocess(next(batches), epoch, step, micro_step)
        # Dropout and drop-path draw from these generators.
        key = hash_key("batch", parts.config.seed, step, micro_step, context.rank)
        seed_generators(key, *parts.devices.all)
        divisor = plan.loss_divisor(len(targets))
        # DDP all-reduces the gradients in the backward pass of the last micro-batch only.
        with gradient_sync(parts.wrapped, micro_step == plan.accumulation - 1):
            with parts.autocast():
                # Calls the model, the criterion and the metric: see `ModelWithLoss`.
                loss, micro_loss_and_metric = parts.wrapped(images, targets, divisor)
            parts.scaler.scale(loss).backward()
        loss_and_metric += micro_loss_and_metric.to(context.device, non_blocking=True)
    check_gradients_reduced(parts.wrapped)
    return loss_and_metric
