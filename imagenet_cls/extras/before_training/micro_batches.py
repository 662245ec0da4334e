"""Short trainings on random images, which find the largest micro-batch that fits."""

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.engine.meter import StepResult
from imagenet_cls.engine.short_run import run_steps
from imagenet_cls.errors import OutOfMemoryError
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


def trial_config(config: Config) -> Config:
    """The config for random images of the largest size, initial weights drawn at random, and a tiny
    learning rate.

    Opens the data to count the classes where `model.num_classes` is not set. Raises DataError.
    """
    defaults = Config()
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
        augment=replace(config.augment, progressive=defaults.augment.progressive),
        loss=replace(loss, class_weights=None) if isinstance(loss.class_weights, str) else loss,
        distill=replace(config.distill, teacher=teacher),
        optimizer=replace(config.optimizer, lr=_NO_UPDATE_LR, lr_base_batch=None),
        schedule=replace(defaults.schedule, name="constant"),
        eval=replace(config.eval, classes="all"),
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
    share = math.ceil(config.train.global_batch_size / num_devices)
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
        every = config.train.sam_every_steps
        steps = math.ceil(steps / every) * every
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
    times = []

    def after_step(result: StepResult, _: object) -> None:
        if result.step in (warmup, warmup + steps):
            if not is_cpu:
                torch.accelerator.synchronize(context.device)
            times.append(time.perf_counter())

    try:
        peak_bytes = run_steps(trial, context, after_step, one_batch=True)
    except OutOfMemoryError:
        return Trial(images, problem="out of memory")
    reserved = torch.cuda.max_memory_reserved() if context.device.type == "cuda" else 0
    seconds = times[1] - times[0]
    return Trial(images, steps * batch / seconds, peak_bytes, reserved)
