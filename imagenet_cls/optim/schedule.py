"""Learning rate and momentum as pure functions of the step.

Owns the time that a schedule keeps, the warm-up in front of it, the cooldown behind it, and the check of the section;
the curves themselves are in `curves`. Keeps no state: a resumed run needs the step and, for `plateau`, the recorded
evaluations. Refuses unknown names and keywords, numbers that give no learning rate or an absurd one, rates above the
run's own, and schedules longer than the run. Called by `engine.check` and `engine.build` (to make it); `engine.train`
asks the result before each optimizer step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from imagenet_cls.config.fields import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range
from imagenet_cls.config.schema import ScheduleConfig
from imagenet_cls.errors import ConfigError, Problem, UserError, format_value
from imagenet_cls.lookup import did_you_mean, import_factory, is_factory_name, kwargs_problems, missing_kwargs_problems
from imagenet_cls.optim.curves import BUILT_IN, Span, one_cycle_momentum

# What the program passes: to the built-in curves, and to a factory of the user's.
RESERVED = ("t", "span", "evaluations")
RESERVED_OWN = ("base_lr", "total_steps", "steps_per_epoch")

Evaluations = Sequence[tuple[int, float]]
"""(steps made until then, top-1 in per cent of the raw weights) of each evaluation so far, in order."""


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the learning rate of optimizer step 0, 1, 2, ...; `schedule.momentum(step)` its momentum.

    Made by `build_schedule`. Defined beyond the last step, too, where both stay as they are at the end. Time is in
    units of span.per_epoch an epoch. curve: from the time since `start` to the learning rate. warmup: where the warm-up
    ends; like `start` counted from the run's start.
    """

    settings: ScheduleConfig
    curve: Callable[..., float]
    span: Span
    start: float
    warmup: float
    steps_per_epoch: int

    def __call__(self, step: int, evaluations: Evaluations = ()) -> float:
        """The learning rate. evaluations: those recorded so far, in a resumed run too; only `plateau` looks at them."""
        now = self._now(step)
        if self.settings.name == "plateau":
            return self._warm(now, evaluations=[top1 for when, top1 in evaluations if self._counts(when, now)])
        return self._warm(now)

    def momentum(self, step: int) -> float | None:
        """The momentum (Adam's first beta) where the schedule moves it, else None."""
        if self.settings.name != "one_cycle":
            return None
        return one_cycle_momentum(self._since_start(self._now(step)), self.span, **self.settings.kwargs)

    def _now(self, step: int) -> float:
        """The time of a step: where the rate changes between epochs only, that of its epoch's first one."""
        return step // self.steps_per_epoch if self.settings.by_epoch else step

    def _since_start(self, now: float) -> float:
        return min(max(now - self.start, 0), self.span.length)

    def _counts(self, step: int, now: float) -> bool:
        """Whether `plateau` regards an evaluation after so many steps: only those between epochs, behind the warm-up
        (as timm does) and before the cooldown. One that a run was stopped for in mid-epoch is none of the schedule."""
        when = self._now(step)
        return step % self.steps_per_epoch == 0 and self.warmup < when <= min(now, self.start + self.span.length)

    def _warm(self, now: float, **more: Any) -> float:
        """The curve, or the straight line that leads to it."""
        if now >= self.warmup:
            return self.curve(self._since_start(now), self.span, **more)
        settings = self.settings
        goal = self.curve(self._since_start(now), self.span, **more) if settings.warmup_prefix else self.span.base_lr
        if settings.warmup_start_lr is not None:
            return settings.warmup_start_lr + (goal - settings.warmup_start_lr) * now / self.warmup
        return (settings.warmup_start_factor + (1 - settings.warmup_start_factor) * now / self.warmup) * goal


def build_schedule(schedule: ScheduleConfig, base_lr: float, steps_per_epoch: int, epochs: int) -> Schedule:
    """The schedule of a run of so many epochs; base_lr: the learning rate at its highest, behind the warm-up.

    During the first warmup_epochs * steps_per_epoch steps (rounded) the rate grows linearly from warmup_start_lr, or
    warmup_start_factor of what it grows to, at step 0 (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section
    2.2; torch's LinearLR). With warmup_prefix the curve begins behind it, and it grows to where the curve begins
    (torchvision's SequentialLR, timm's warmup_prefix). Without, the curve begins with the run, the warm-up covers its
    first part, and grows to base_lr whatever the curve is then (timm's default). The curve ends cooldown_epochs before
    the run does, and what it has come to stays: cosine's min_lr, or the last step of a staircase.

    With by_epoch time is counted in epochs from the outset, so that a curve has the values that a scheduler has which
    is stepped once an epoch; a warm-up or cooldown of 2.5 epochs then is not rounded.

    A factory of the user's is called as `factory(base_lr=..., total_steps=..., steps_per_epoch=..., **kwargs)` and
    returns a function of the step, counted from the run's start; total_steps: up to the cooldown. With warmup_prefix
    the warm-up multiplies that function. Raises UserError where it returns something else, and ConfigError where a
    built-in schedule gives rates that nothing can be trained with at this number of steps (`unusable_rates`).
    """
    made = _made(schedule, base_lr, steps_per_epoch, epochs)
    if schedule.name in BUILT_IN and (text := unusable_rates(made, steps_per_epoch * epochs)):
        raise ConfigError([f"schedule.kwargs: {text}"])
    return made


def _made(schedule: ScheduleConfig, base_lr: float, steps_per_epoch: int, epochs: int) -> Schedule:
    """`build_schedule` without a look at its rates."""
    per_epoch = 1 if schedule.by_epoch else steps_per_epoch
    warmup, cooldown = schedule.warmup_epochs * per_epoch, schedule.cooldown_epochs * per_epoch
    if not schedule.by_epoch:
        warmup, cooldown = round(warmup), round(cooldown)
    built_in = schedule.name in BUILT_IN
    start = warmup if schedule.warmup_prefix and built_in else 0
    span = Span(base_lr, max(epochs * per_epoch - cooldown - start, 0), per_epoch)
    curve: Callable[..., float]
    if built_in:
        curve = partial(BUILT_IN[schedule.name], **schedule.kwargs)
    else:
        curve = _own_curve(schedule, span, steps_per_epoch)
    return Schedule(schedule, curve, span, start, warmup, steps_per_epoch)


def _own_curve(schedule: ScheduleConfig, span: Span, steps_per_epoch: int) -> Callable[..., float]:
    """A factory's function of the step as a curve, whose time may be counted in epochs."""
    steps = steps_per_epoch // span.per_epoch
    function = import_factory(schedule.name)(
        base_lr=span.base_lr,
        total_steps=round(span.length * steps),
        steps_per_epoch=steps_per_epoch,
        **schedule.kwargs,
    )
    if not callable(function):
        returned = type(function).__name__
        raise UserError(f"schedule.name: {schedule.name!r} returned {returned}; let it return a function of the step")
    return lambda t, span: function(round(t * steps))


# Which numbers each argument of a curve may be. Whole: of evaluations or cycles.
NUMBERS: dict[str, Range] = {
    "min_lr": NOT_NEGATIVE,
    "cycles": COUNT,
    "cycle_decay": NOT_NEGATIVE,
    "power": NOT_NEGATIVE,
    "every_epochs": POSITIVE,
    "gamma": NOT_NEGATIVE,
    "pct_start": SHARE,
    "div_factor": POSITIVE,
    "final_div_factor": POSITIVE,
    "min_momentum": Range(0, 1, high_open=True),
    "max_momentum": Range(0, 1, high_open=True),
    "patience": NOT_NEGATIVE,
    "threshold": NOT_NEGATIVE,
}
WHOLE = ("cycles", "patience")
# Points in time, in epochs.
TIMES = ("milestones_epochs", "epochs")
ANNEALS = ("cos", "linear")


def schedule_problems(schedule: ScheduleConfig, epochs: int, lr: float = 1.0) -> list[Problem]:
    """Everything wrong with the section that shows without data: name, kwargs, numbers that give no learning rate or an
    absurd one, points in time that lie beyond the run's `epochs`, and rates that lie above `lr`.

    lr: the run's rate at its highest, scaled for the batch.
    """
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
    problems = kwargs_problems("schedule", factory, schedule.kwargs, reserved)
    problems += missing_kwargs_problems("schedule", factory, schedule.kwargs, given=reserved)
    # A factory of the user's takes what it takes, and is not called with made-up numbers: it may rightly refuse them.
    if problems or own:
        return problems
    problems = list(_wrong_values(schedule.kwargs)) or list(_unfit(schedule, epochs)) or list(_above(schedule, lr))
    return problems or _trial(schedule, epochs, lr)


def _wrong_values(kwargs: dict[str, Any]) -> Iterator[Problem]:
    """Arguments of a built-in curve that are wrong by themselves."""
    for name, value in kwargs.items():
        key = f"schedule.kwargs.{name}"
        if name == "anneal" and value not in ANNEALS:
            yield Problem(key, f"{format_value(value)} is not one of {', '.join(ANNEALS)}")
        elif name in TIMES and not (_numbers(value, NOT_NEGATIVE) and sorted(set(value)) == value):
            yield Problem(key, f"{format_value(value)} is not a list of different epochs from 0 on, the smallest first")
        elif name == "factors" and not _numbers(value, NOT_NEGATIVE):
            yield Problem(key, f"{format_value(value)} is not a list of numbers, each {NOT_NEGATIVE}")
        elif name in NUMBERS and not (name.endswith("_momentum") and value is None):
            whole = name in WHOLE
            if not _numbers([value], NUMBERS[name]) or (whole and not isinstance(value, int)):
                kind = "a whole number, " if whole else ""
                limits = NUMBERS[name].limits_for(value) if isinstance(value, int | float) else NUMBERS[name]
                yield Problem(key, f"{format_value(value)} is out of range: {kind}{limits}")


def _numbers(value: Any, allowed: Range) -> bool:
    """Whether this is a list, not empty, of such numbers."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(x, int | float) and not isinstance(x, bool) and x in allowed for x in value)
    )


def _unfit(schedule: ScheduleConfig, epochs: int) -> Iterator[Problem]:
    """Arguments of a built-in curve that do not fit each other, or the run."""
    kwargs = schedule.kwargs
    if "factors" in kwargs and len(kwargs["factors"]) != len(kwargs["epochs"]):
        counts = f"{len(kwargs['factors'])} factors for {len(kwargs['epochs'])} epochs"
        yield Problem("schedule.kwargs.factors", f"{counts}; give one for each")
    low, high = kwargs.get("min_momentum"), kwargs.get("max_momentum")
    if (low is None) != (high is None):
        absent = "min_momentum" if low is None else "max_momentum"
        yield Problem(f"schedule.kwargs.{absent}", "is missing: give both momenta, or none to leave it as it is")
    elif low is not None and high is not None and low > high:
        yield Problem("schedule.kwargs.min_momentum", f"{low} is more than max_momentum {high}")
    warmup = schedule.warmup_epochs if schedule.warmup_prefix else 0
    length = epochs - warmup - schedule.cooldown_epochs
    for name in TIMES:
        latest = max(kwargs.get(name, [0]))
        if latest > length:
            without = " without warm-up and cooldown" if length < epochs else ""
            text = f"{latest:g} is beyond the run, which has {length:g} epochs{without} (train.epochs {epochs})"
            yield Problem(f"schedule.kwargs.{name}", f"{text}; to end early use train.max_steps")


def _above(schedule: ScheduleConfig, lr: float) -> Iterator[Problem]:
    """Rates that a schedule names itself and that lie above the run's own: with them it would climb where it should
    fall, and fall where it should climb."""
    text = f"is more than the learning rate {lr:.4g} (optimizer.lr, scaled for the batch); give at most that"
    least, begin = schedule.kwargs.get("min_lr", 0.0), schedule.warmup_start_lr
    if least > lr:
        yield Problem("schedule.kwargs.min_lr", f"{least:g} {text}")
    if begin is not None and begin > lr and schedule.warmup_epochs > 0:
        yield Problem("schedule.warmup_start_lr", f"{begin:g} {text}")


# No run learns at such rates: a range test, which begins at 1e-7 or so, climbs to 10. What lies higher is a slip, such
# as a gamma above 1 in short intervals, and would end in NaN, or in numbers that no float holds.
_HIGHEST_FACTOR = 1e4
# Steps an epoch is tried with where the real number is not known yet: as few as can be, and as many as matter.
_TRIAL_STEPS = (1, 10_000)
# Of a longer run, so many evenly spaced steps are looked at, and the last one.
_MOST_LOOKED_AT = 5000


def _trial(schedule: ScheduleConfig, epochs: int, lr: float) -> list[Problem]:
    """Run a built-in schedule over its epochs, finely enough for curves that change within an epoch."""
    texts = [unusable_rates(_made(schedule, lr, steps, epochs), epochs * steps) for steps in _TRIAL_STEPS]
    return [Problem("schedule.kwargs", text) for text in texts if text is not None][:1]


def unusable_rates(schedule: Schedule, total_steps: int) -> str | None:
    """What is wrong with the learning rates that a built-in schedule gives to a run of so many steps; None: nothing.

    Each must be finite, not negative, and at most 10,000 times the run's own rate, or 10,000 where that is below 1.
    """
    name, kwargs = schedule.settings.name, format_value(schedule.settings.kwargs)
    highest = _HIGHEST_FACTOR * max(schedule.span.base_lr, 1.0)
    spaced = range(0, total_steps, math.ceil(total_steps / _MOST_LOOKED_AT))
    for step in (*spaced, total_steps - 1):
        try:
            rate = schedule(step)
        except ArithmeticError as error:
            return f"{name!r} can't work with {kwargs}: {error.args[-1]}"
        if isinstance(rate, complex) or not 0 <= rate <= highest:
            when = f"after {step / schedule.steps_per_epoch:.4g} epochs"
            return f"{name!r} gives a learning rate of {rate:g} {when} with {kwargs}; it must be from 0 to {highest:g}"
    return None
