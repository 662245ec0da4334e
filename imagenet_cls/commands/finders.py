"""Short trainings that measure: the largest micro-batch, and a range of learning rates."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import torch
from torch.nn import functional

from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.config.schema import (
    Config,
    DataConfig,
    EmaConfig,
    ProgressiveConfig,
    ScheduleConfig,
)
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.build import TrainingParts, build
from imagenet_cls.engine.meter import StepResult
from imagenet_cls.engine.plan import ceil_div
from imagenet_cls.engine.train import train
from imagenet_cls.errors import out_of_memory_line
from imagenet_cls.guards.device import explain_device_errors
from imagenet_cls.optim.schedule import Horizon, Schedule
from imagenet_cls.parallel.memory import peak_memory_bytes, reset_peak_memory
from imagenet_cls.parallel.process_group import RankContext

_MANY_EPOCHS = 10**6  # so that any ema.every_steps is less than the steps of the run
_NO_UPDATE_LR = 1e-12  # the weights stay as they are; some optimizers reject 0


@dataclass(frozen=True)
class Trial:
    """Training steps with micro-batches of `images` images.

    images_per_sec: 0 where there is a `problem`. reserved_bytes: by the CUDA allocator, 0 on a CPU.
    """

    images: int
    images_per_sec: float = 0.0
    peak_bytes: float = 0.0
    reserved_bytes: float = 0.0
    problem: str = ""


class _TimedRun:
    """An `engine.train.TrainingRun` that trains on one random batch again and again, and takes the
    time of the steps after the first `warmup` ones.
    """

    def __init__(self, parts: TrainingParts, warmup: int):
        self.parts = parts
        self.progress = Progress()
        self.warmup = warmup

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        batch = next(self.parts.train_loader.epoch(epoch))
        if self.parts.config.data.labels == "multi":
            rows = functional.one_hot(batch.targets, self.parts.num_classes)
            batch = batch._replace(targets=rows.float())
        return repeat(batch)

    def after_step(self, result: StepResult) -> None:
        if result.step == self.warmup:
            self.started = self.time()

    def after_epoch(self) -> None:
        pass

    def time(self) -> float:
        """The time at which the device has done its work."""
        if self.parts.context.device.type != "cpu":
            torch.accelerator.synchronize(self.parts.context.device)
        return time.perf_counter()


def trial_config(config: Config) -> Config:
    """The config for random images of the largest size, initial weights drawn at random, and a tiny
    learning rate.

    Opens the data to count the classes where `model.num_classes` is not set. Raises DataError.
    """
    num_classes = config.model.num_classes or len(open_datasets(config.data, ("train",)).classes)
    data = config.data
    loss = config.loss
    kwargs = {"val_images": 1, "num_classes": num_classes}
    teacher = replace(config.distill.teacher, pretrained=False, checkpoint=None)
    return replace(
        config,
        data=DataConfig(
            name="synthetic",
            kwargs=kwargs,
            labels=data.labels,
            channels=data.channels,
            mean=data.mean,
            std=data.std,
        ),
        # always size_px, which is the largest
        augment=replace(config.augment, progressive=ProgressiveConfig()),
        loss=replace(loss, class_weights=None) if isinstance(loss.class_weights, str) else loss,
        distill=replace(config.distill, teacher=teacher),
        optimizer=replace(config.optimizer, lr=_NO_UPDATE_LR, lr_base_batch=None),
        schedule=ScheduleConfig(name="constant"),
        eval=replace(config.eval, classes="all", real_labels=None),
    )


def micro_batch_trials(
    config: Config, context: RankContext, num_devices: int, most: int
) -> Iterator[Trial]:
    """Try sizes of micro-batches, at most `most`: doubled until one does not fit, then between the
    last two. The largest size without a problem is within an eighth, or 8 images, of the largest
    that fits.

    num_devices: of the run. Steps with several micro-batches, or on several devices, are tried with
    two: the gradients of the first, or the buckets of DDP, then take memory in the second.
    """
    share = ceil_div(config.train.global_batch_size, num_devices)
    config = trial_config(config)
    low, high = 0, most + 1
    first = 2 if context.device.type == "cpu" else 8
    while low < most:
        size = (low + high) // 2
        if high > most:  # every size so far fits
            size = min(2 * low or first, most)
        elif high - low <= (1 if low < 8 else max(8, low // 8)):
            return
        accumulation = 1 if num_devices == 1 and size >= share else 2
        with explain_device_errors():
            trial = try_micro_batch(config, context, size, accumulation)
        if trial.problem:
            high = size
        else:
            low = size
        yield trial


def try_micro_batch(config: Config, context: RankContext, images: int, accumulation: int) -> Trial:
    """Build a run and make some steps. config: of `trial_config`."""
    gc.collect()  # what the last trial has built
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    if config.train.compile:
        torch.compiler.reset()  # there is a limit to how often a model is compiled again
    is_cpu = context.device.type == "cpu"
    warmup = 1 if is_cpu else 3
    steps = 2 if is_cpu else 10
    if config.train.sam_rho is not None:
        # The same share of steps with SAM as in a run.
        steps = ceil_div(steps, config.train.sam_every_steps) * config.train.sam_every_steps
    batch = images * accumulation
    kwargs = config.data.kwargs | {"train_images": batch * (warmup + steps)}
    trial = replace(
        config,
        data=replace(config.data, kwargs=kwargs),
        train=replace(
            config.train,
            global_batch_size=batch,
            micro_batch_size=images,
            epochs=_MANY_EPOCHS,
            max_steps=warmup + steps,
        ),
    )
    reset_peak_memory()
    try:
        run = _TimedRun(build(trial, context, load_initial_weights=False), warmup)
        train(run)
        seconds = run.time() - run.started
    except RuntimeError as error:
        if not out_of_memory_line(error):
            raise
        return Trial(images, problem="out of memory")
    reserved = torch.cuda.max_memory_reserved() if context.device.type == "cuda" else 0
    return Trial(images, steps * batch / seconds, peak_memory_bytes(), reserved)


@dataclass
class LrRange:
    """The steps of a learning rate range test. smoothed: moving average of the losses with bias
    correction.
    """

    lrs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    end: str = "at the last step"

    def lowest(self) -> int:
        """The step with the lowest smoothed loss. The first tenth does not count: its averages are
        of few losses.
        """
        first = len(self.lrs) // 10
        return first + int(np.argmin(self.smoothed[first:]))

    def steepest(self) -> float | None:
        """The rate up to `lowest` where the smoothed loss falls fastest with the logarithm of the
        rate.

        A rule of fastai's lr_find, as is a tenth of the rate with the lowest loss. None if the loss
        does not fall.
        """
        first = len(self.lrs) // 10
        if not self.lrs or self.lowest() == first:
            return None
        slopes = np.gradient(self.smoothed, np.log(self.lrs))
        return self.lrs[first + int(np.argmin(slopes[first : self.lowest() + 1]))]


class _RangeEnd(Exception):
    """Ends the loop within an epoch."""


class _LrRangeRun:
    """An `engine.train.TrainingRun` that records the loss of each step. Raises _RangeEnd once it is
    not finite or has diverged.
    """

    SMOOTHING = 0.9
    DIVERGED = 4.0  # times the lowest

    def __init__(self, parts: TrainingParts, report: Callable[[LrRange], None]):
        self.parts = parts
        self.progress = Progress()
        self.found = LrRange()
        self.report = report
        self.average = 0.0

    def epoch_batches(self, epoch: int, first_step: int) -> Iterator[TrainBatch]:
        return self.parts.prefetch(self.parts.train_loader.epoch(epoch, first_step))

    def after_epoch(self) -> None:
        pass

    def after_step(self, result: StepResult) -> None:
        found = self.found
        lr = result.lr
        loss = float(result.loss_and_top1[0])
        if not math.isfinite(loss):
            found.end = f"at lr {lr:.3g}, where the loss is not finite"
            raise _RangeEnd
        self.average = self.SMOOTHING * self.average + (1 - self.SMOOTHING) * loss
        found.lrs.append(lr)
        found.losses.append(loss)
        found.smoothed.append(self.average / (1 - self.SMOOTHING ** len(found.lrs)))
        self.report(found)
        if found.smoothed[-1] > self.DIVERGED * min(found.smoothed):
            found.end = (
                f"at lr {lr:.3g}, where the smoothed loss is above {self.DIVERGED:g} "
                "times the lowest"
            )
            raise _RangeEnd


def lr_range(
    config: Config,
    context: RankContext,
    low: float,
    high: float,
    steps: int,
    report: Callable[[LrRange], None],
) -> LrRange:
    """The learning rate range test (Smith 2015, "Cyclical Learning Rates for Training Neural
    Networks", section 3.3), from the config's initial weights, with a rate that grows
    geometrically. report: called after each step.
    """
    epochs = max(config.train.epochs, steps)
    train_config = replace(config.train, epochs=epochs, max_steps=steps)
    schedule = ScheduleConfig(name="constant")
    config = replace(config, train=train_config, schedule=schedule, ema=EmaConfig())
    parts = build(config, context)
    per_epoch = parts.plan.steps_per_epoch

    def rate(t: float, _: Horizon) -> float:
        return low * (high / low) ** (t / (steps - 1))

    parts.schedule = Schedule(
        settings=config.schedule,
        curve=rate,
        horizon=Horizon(high, steps, per_epoch),
        start=0,
        warmup=0,
        steps_per_epoch=per_epoch,
    )
    run = _LrRangeRun(parts, report)
    with closing(parts.train_loader), suppress(_RangeEnd):
        train(run)
    return run.found
