"""Learning rate as a pure function of the step.

Owns the built-in schedules, the warm-up in front of them, and the check of the section. Keeps no state, so that a
resumed run needs the step and nothing else. Refuses unknown names and keywords, and numbers that give no learning rate.
Called by `engine.build` (to make it); `engine.train` calls the result before each optimizer step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from imagenet_cls.config.schema import ScheduleConfig
from imagenet_cls.errors import Problem, UserError
from imagenet_cls.lookup import check_kwargs, did_you_mean, import_factory, is_factory_name, missing_kwargs

# What the program passes: to the built-in schedules, and to a factory of the user's.
RESERVED = ("step", "span")
RESERVED_OWN = ("base_lr", "total_steps", "steps_per_epoch")


@dataclass(frozen=True)
class Span:
    """What a schedule runs over. base_lr: the learning rate at its highest. All lengths in optimizer steps."""

    base_lr: float
    total_steps: int
    steps_per_epoch: int
    warmup_steps: int

    def progress(self, step: int) -> float:
        """Share, 0 to 1, of the steps behind the warm-up that lie before `step`; 1 at step `total_steps`."""
        return min(max(step - self.warmup_steps, 0) / max(self.total_steps - self.warmup_steps, 1), 1.0)


def cosine(step: int, span: Span, min_lr: float = 0.0) -> float:
    """Half a cosine from base_lr down to min_lr (Loshchilov and Hutter, "SGDR", 2017, equation 5, without restarts)."""
    return min_lr + (span.base_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * span.progress(step)))


def polynomial(step: int, span: Span, power: float = 1.0, min_lr: float = 0.0) -> float:
    """From base_lr down to min_lr with the given power of what remains; 1 is a straight line."""
    return min_lr + (span.base_lr - min_lr) * (1 - span.progress(step)) ** power


def step_decay(step: int, span: Span, every_epochs: int = 30, gamma: float = 0.1) -> float:
    """Times gamma after every so many epochs (He et al., "Deep Residual Learning", 2016, and pytorch/examples: 30,
    0.1)."""
    return span.base_lr * gamma ** (step // span.steps_per_epoch // every_epochs)


def multistep(step: int, span: Span, milestones_epochs: list[int], gamma: float = 0.1) -> float:
    """Times gamma at the start of each of the epochs named (counted from 0, so 30 is after thirty epochs)."""
    epoch = step // span.steps_per_epoch
    return span.base_lr * gamma ** sum(epoch >= milestone for milestone in milestones_epochs)


def exponential(step: int, span: Span, gamma: float) -> float:
    """Times gamma at the start of each epoch but the first, as torchvision's reference script steps its
    ExponentialLR."""
    return span.base_lr * gamma ** (step // span.steps_per_epoch)


def constant(step: int, span: Span) -> float:
    """Always base_lr."""
    return span.base_lr


BUILT_IN: dict[str, Callable[..., float]] = {
    "cosine": cosine,
    "step": step_decay,
    "multistep": multistep,
    "polynomial": polynomial,
    "exponential": exponential,
    "constant": constant,
}


def build_schedule(
    schedule: ScheduleConfig, base_lr: float, steps_per_epoch: int, epochs: int
) -> Callable[[int], float]:
    """The learning rate for optimizer step 0, 1, 2, ...; defined (and constant or at its end) beyond the last step too.

    During the first warmup_epochs * steps_per_epoch steps (rounded) it is multiplied by a factor that grows linearly
    from warmup_start_factor at step 0 and reaches 1 at the first step behind the warm-up (Goyal et al., "Accurate,
    Large Minibatch SGD", 2017, section 2.2; torch's LinearLR). `cosine` and `polynomial` run over the steps behind the
    warm-up and would reach min_lr at step `epochs * steps_per_epoch`, one after the last; `step`, `multistep` and
    `exponential` count epochs from the run's start, warm-up included.

    A factory of the user's is called as `factory(base_lr=..., total_steps=..., steps_per_epoch=..., **kwargs)` and
    returns a function of the step; the warm-up, if any, multiplies it too. Raises UserError where it does not.
    """
    total_steps = epochs * steps_per_epoch
    warmup_steps = round(schedule.warmup_epochs * steps_per_epoch)
    if schedule.name in BUILT_IN:
        span = Span(base_lr, total_steps, steps_per_epoch, warmup_steps)
        after_warmup = partial(BUILT_IN[schedule.name], span=span, **schedule.kwargs)
    else:
        factory = import_factory(schedule.name)
        after_warmup = factory(
            base_lr=base_lr, total_steps=total_steps, steps_per_epoch=steps_per_epoch, **schedule.kwargs
        )
        if not callable(after_warmup):
            returned = type(after_warmup).__name__
            raise UserError(
                f"schedule.name: {schedule.name!r} returned {returned}; let it return a function of the step"
            )

    def learning_rate(step: int) -> float:
        factor = 1.0
        if step < warmup_steps:
            factor = schedule.warmup_start_factor + (1 - schedule.warmup_start_factor) * step / warmup_steps
        return factor * after_warmup(step)

    return learning_rate


def check_schedule(schedule: ScheduleConfig) -> list[Problem]:
    """Everything wrong with the section that shows without data: name, kwargs, and numbers that give no learning
    rate."""
    own = is_factory_name(schedule.name)
    if not own and schedule.name not in BUILT_IN:
        allowed = f"(built in: {', '.join(BUILT_IN)}; or my_module:my_factory)"
        return [
            Problem(
                "schedule.name", f"unknown schedule {schedule.name!r}{did_you_mean(schedule.name, BUILT_IN)} {allowed}"
            )
        ]
    try:
        factory: Callable[..., Any] = import_factory(schedule.name) if own else BUILT_IN[schedule.name]
    except LookupError as error:
        return [Problem("schedule.name", str(error))]
    reserved = RESERVED_OWN if own else RESERVED
    problems = check_kwargs("schedule", factory, schedule.kwargs, reserved)
    problems += missing_kwargs("schedule", factory, schedule.kwargs, given=reserved)
    # A factory of the user's is not called with made-up numbers: it may rightly refuse them.
    return problems if problems or own else _trial(schedule)


def _trial(schedule: ScheduleConfig) -> list[Problem]:
    """Run a built-in schedule over a hundred epochs of one step and look at what comes out."""
    try:
        learning_rate = build_schedule(schedule, base_lr=1.0, steps_per_epoch=1, epochs=100)
        rates = [learning_rate(step) for step in range(101)]
        bad = next((rate for rate in rates if isinstance(rate, complex) or not 0 <= rate < math.inf), None)
    except (TypeError, ValueError, ArithmeticError) as error:
        return [Problem("schedule.kwargs", f"{schedule.name!r} can't work with {schedule.kwargs}: {error}")]
    if bad is not None:
        text = f"{schedule.name!r} gives a learning rate of {bad} with {schedule.kwargs}"
        return [Problem("schedule.kwargs", f"{text}; it must be finite and not negative")]
    return []
