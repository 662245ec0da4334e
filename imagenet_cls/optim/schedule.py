"""The learning rate of a run as a pure function of the step, and the checks of the `schedule`
section.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from imagenet_cls.config.schema import (
    NOT_NEGATIVE,
    SHARE,
    OptimizerConfig,
    Range,
    ScheduleConfig,
)
from imagenet_cls.errors import ConfigError, Problem, UserError
from imagenet_cls.lookup import (
    NameNotFoundError,
    find_factory,
    kwargs_problems,
    number_problem,
)
from imagenet_cls.optim.signature_check import NotNegative, value_problems
from imagenet_cls.text import format_value

# Arguments that the program passes: to the built-in curves, and to a user's factory.
CURVE_ARGUMENTS = ("t", "horizon")
FACTORY_ARGUMENTS = ("base_lr", "total_steps", "steps_per_epoch")

# Annotations of arguments, by which they are checked. A list of epochs must be in ascending order,
# with none twice.
Numbers = Annotated[list[float], NOT_NEGATIVE]
Share = Annotated[float, SHARE]
Epochs = Annotated[float, Range(0.001)]


@dataclass(frozen=True)
class Horizon:
    """The highest learning rate of a curve and its length. A unit of time is one step, or one epoch
    with `schedule.by_epoch`.

    length: the duration of the curve in units.
    """

    peak_lr: float
    length: float
    units_per_epoch: int


def cosine(t: float, horizon: Horizon, min_lr: NotNegative = 0.0) -> float:
    """Half a cosine from peak_lr down to min_lr (Loshchilov and Hutter, "SGDR", 2017, equation 5),
    without restarts. The same as timm's CosineLRScheduler.
    """
    if horizon.length <= 0:
        return horizon.peak_lr
    passed = t / horizon.length
    return min_lr + (horizon.peak_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * passed))


def polynomial(
    t: float, horizon: Horizon, power: NotNegative = 1.0, min_lr: NotNegative = 0.0
) -> float:
    """min_lr + (peak_lr - min_lr) * (1 - t / length) ** power. A power of 1 is linear."""
    passed = t / horizon.length if horizon.length > 0 else 0.0
    return min_lr + (horizon.peak_lr - min_lr) * (1 - passed) ** power


def step_decay(t: float, horizon: Horizon, every_epochs: Epochs = 30, gamma: Share = 0.1) -> float:
    """Multiply the rate by gamma every `every_epochs` epochs, but not at the end of the horizon.
    The defaults are those of pytorch/examples.
    """
    every = every_epochs * horizon.units_per_epoch
    num_drops = math.ceil(horizon.length / every) - 1
    return horizon.peak_lr * gamma ** max(0, min(t // every, num_drops))


def multistep(t: float, horizon: Horizon, milestones_epochs: Numbers, gamma: Share = 0.1) -> float:
    """Multiply the rate by gamma at the start of each of the given epochs, counted from 0, as
    torch's MultiStepLR.

    A milestone at the end of the horizon has no effect, since the last value stays during the
    cooldown. timm's scheduler fires one unit of time earlier: its milestone 30 is 29 here.
    """
    milestones = [milestone * horizon.units_per_epoch for milestone in milestones_epochs]
    return horizon.peak_lr * gamma ** sum(
        milestone <= t and milestone < horizon.length for milestone in milestones
    )


def piecewise(t: float, horizon: Horizon, epochs: Numbers, factors: Numbers) -> float:
    """peak_lr times a factor, given at some epochs; linear between them, constant before and after.

    FFCV's ramp over 16 epochs has epochs [0, 2, 16] and factors [1e-4, 1, 0].
    """
    now = t / horizon.units_per_epoch
    if now <= epochs[0]:
        return horizon.peak_lr * factors[0]
    for i in range(1, len(epochs)):
        if now < epochs[i]:
            passed = (now - epochs[i - 1]) / (epochs[i] - epochs[i - 1])
            return horizon.peak_lr * (factors[i - 1] + (factors[i] - factors[i - 1]) * passed)
    return horizon.peak_lr * factors[-1]


def constant(t: float, horizon: Horizon) -> float:
    """Always peak_lr."""
    return horizon.peak_lr


# Called as `curve(t, horizon, **kwargs)`, t from 0 to `horizon.length`.
BUILT_IN: dict[str, Callable[..., float]] = {
    "cosine": cosine,
    "step": step_decay,
    "multistep": multistep,
    "polynomial": polynomial,
    "piecewise": piecewise,
    "constant": constant,
}


def scaled_lr(optimizer: OptimizerConfig, global_batch_size: int) -> tuple[float, str | None]:
    """The learning rate for a global batch, and a sentence about the scaling (None if it is
    `optimizer.lr`).

    The rate is proportional to the batch: Goyal et al. 2017, "Accurate, Large Minibatch SGD",
    section 2.1. Only the highest rate is scaled: `min_lr` and `warmup_start_lr` are absolute, as in
    DeiT's script.
    """
    base = optimizer.lr_base_batch
    if base is None or base == global_batch_size:
        return optimizer.lr, None
    ratio = global_batch_size / base
    lr = optimizer.lr * ratio
    return lr, (
        f"lr {optimizer.lr:g} for {base} images, scaled linearly x {ratio:.4g} to {lr:.4g} for "
        f"{global_batch_size}"
    )


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the learning rate of optimizer step 0, 1, 2, ...

    After the last step it is constant. curve: the learning rate as a function of the time since
    `start`, in units of the horizon. warmup: the time at which the warm-up ends.
    """

    settings: ScheduleConfig
    curve: Callable[..., float]
    horizon: Horizon
    start: float
    warmup: float
    steps_per_epoch: int

    def __call__(self, step: int) -> float:
        """The learning rate."""
        settings = self.settings
        # With by_epoch the time of the first step of its epoch.
        now = step // self.steps_per_epoch if settings.by_epoch else step
        since_start = min(max(now - self.start, 0), self.horizon.length)
        rate = self.curve(since_start, self.horizon)
        if now >= self.warmup:
            return rate
        target = rate if settings.warmup_prefix else self.horizon.peak_lr
        start_lr = settings.warmup_start_lr
        if start_lr is not None:
            return start_lr + (target - start_lr) * now / self.warmup
        factor = settings.warmup_start_factor
        return (factor + (1 - factor) * now / self.warmup) * target


def build_schedule(
    schedule: ScheduleConfig, base_lr: float, steps_per_epoch: int, epochs: int
) -> Schedule:
    """The schedule of a run. base_lr: the highest learning rate, after the warm-up.

    During the warm-up (rounded to steps) the rate grows linearly, from warmup_start_lr or
    warmup_start_factor of its target (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section
    2.2; torch's LinearLR). With warmup_prefix the curve starts after it, and the target is the
    curve's first value (torchvision's SequentialLR, timm's warmup_prefix). Without, the warm-up
    replaces the first part of the curve, and the target is base_lr (timm's default). The curve ends
    cooldown_epochs before the run, and its last value stays. With by_epoch it equals a scheduler
    that is stepped once an epoch.

    A user's factory is called as `factory(base_lr=..., total_steps=..., steps_per_epoch=...,
    **kwargs)`; total_steps is the step at which the cooldown starts. It returns the learning rate
    as a function of the step, counted from the start of the run. With warmup_prefix, the warm-up
    multiplies this rate. Raises UserError if it returns something else.
    """
    units_per_epoch = 1 if schedule.by_epoch else steps_per_epoch
    warmup = schedule.warmup_epochs * units_per_epoch
    cooldown = schedule.cooldown_epochs * units_per_epoch
    if not schedule.by_epoch:
        warmup = round(warmup)
        cooldown = round(cooldown)
    is_built_in = schedule.name in BUILT_IN
    start = warmup if schedule.warmup_prefix and is_built_in else 0
    length = max(epochs * units_per_epoch - cooldown - start, 0)
    horizon = Horizon(base_lr, length, units_per_epoch)
    if is_built_in:
        curve: Callable[..., float] = partial(BUILT_IN[schedule.name], **schedule.kwargs)
    else:
        factory = find_factory("schedule", schedule.name, BUILT_IN)
        steps_per_unit = steps_per_epoch // units_per_epoch
        function = factory(
            base_lr=base_lr,
            total_steps=round(horizon.length * steps_per_unit),
            steps_per_epoch=steps_per_epoch,
            **schedule.kwargs,
        )
        if not callable(function):
            raise UserError(
                f"schedule.name: {schedule.name!r} returned {type(function).__name__}.",
                "Return a function of the step.",
            )

        def curve(t: float, horizon: Horizon) -> float:
            step = round(t * steps_per_unit)
            rate: float = function(step)
            if number_problem(rate, NOT_NEGATIVE):
                raise ConfigError(
                    [
                        f"schedule.name: {schedule.name!r} returned {format_value(rate)} for step "
                        f"{step}; return a finite float or int of at least 0"
                    ]
                )
            return rate

        curve(0, horizon)  # so that a dry run checks it, too

    return Schedule(schedule, curve, horizon, start, warmup, steps_per_epoch)


def schedule_problems(schedule: ScheduleConfig, epochs: int) -> list[Problem]:
    """All problems of the section that can be found without data."""
    is_factory = schedule.name not in BUILT_IN
    try:
        factory = find_factory("schedule", schedule.name, BUILT_IN)
    except NameNotFoundError as error:
        return [Problem("schedule.name", str(error))]
    passed = FACTORY_ARGUMENTS if is_factory else CURVE_ARGUMENTS
    problems = kwargs_problems("schedule.kwargs", factory, schedule.kwargs, passed)
    if problems or is_factory:
        return problems
    problems = value_problems("schedule.kwargs", factory, schedule.kwargs)
    return problems or _combination_problems(schedule, epochs)


def _combination_problems(schedule: ScheduleConfig, epochs: int) -> list[Problem]:
    """Arguments of a built-in curve that do not fit each other or the run."""
    kwargs = schedule.kwargs
    length = epochs - schedule.cooldown_epochs
    if schedule.warmup_prefix:
        length -= schedule.warmup_epochs
    found = {}
    for name in ("milestones_epochs", "epochs"):
        values = kwargs.get(name, [])
        if sorted(set(values)) != values:
            text = f"{format_value(values)} is not in ascending order, or has a number twice"
            found[f"kwargs.{name}"] = text
        elif values and values[-1] > length:
            found[f"kwargs.{name}"] = (
                f"{values[-1]:g} is after the end of the run: {length:g} epochs without warm-up "
                f"and cooldown (train.epochs {epochs}); to end early use train.max_steps"
            )
    if "factors" in kwargs and len(kwargs["factors"]) != len(kwargs["epochs"]):
        found["kwargs.factors"] = (
            f"{len(kwargs['factors'])} factors for {len(kwargs['epochs'])} epochs; give one for "
            "each"
        )
    return [Problem(f"schedule.{key}", text) for key, text in found.items()]
