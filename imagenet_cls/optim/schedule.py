"""The learning rate and momentum of a run as pure functions of the step.

First the built-in curves between warm-up and cooldown, then the schedule of a run, then the checks of the `schedule`
section. A resumed run needs the step and, for `plateau`, the recorded evaluations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from imagenet_cls.config.fields import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range
from imagenet_cls.config.schema import OptimizerConfig, ScheduleConfig
from imagenet_cls.errors import ConfigError, Problem, UserError, format_value
from imagenet_cls.lookup import (
    did_you_mean,
    import_factory,
    is_factory_name,
    kwargs_problems,
    number_problem,
)

# Arguments that the program passes: to the built-in curves, and to a user's factory.
RESERVED = ("t", "span", "evaluations")
RESERVED_OF_FACTORY = ("base_lr", "total_steps", "steps_per_epoch")

# (steps made until then, top-1 in per cent of the raw weights) of each evaluation so far, in order.
Evaluations = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Span:
    """The time of a curve, in units of an optimizer step, or of an epoch if the rate changes between epochs only.

    base_lr: the highest learning rate. length: in units of time. per_epoch: units in an epoch.
    """

    base_lr: float
    length: float
    per_epoch: int

    def share(self, t: float) -> float:
        """Share of the span before t, 0 to 1."""
        return t / self.length if self.length > 0 else 0.0


def cosine(t: float, span: Span, min_lr: float = 0.0, cycles: int = 1, cycle_decay: float = 1.0) -> float:
    """Half a cosine from base_lr down to min_lr (Loshchilov and Hutter, "SGDR", 2017, equation 5).

    cycles: number of cycles of equal length in the span. cycle_decay: factor of the highest rate from one cycle to the
    next. As timm's CosineLRScheduler, whose t_initial is the length of a cycle.
    """
    if span.length <= 0:
        return span.base_lr
    cycle, position = divmod(t * cycles, span.length)
    if cycle >= cycles:
        return min_lr
    highest = span.base_lr * cycle_decay**cycle
    return min_lr + (highest - min_lr) * 0.5 * (1 + math.cos(math.pi * (position / span.length)))


def polynomial(t: float, span: Span, power: float = 1.0, min_lr: float = 0.0) -> float:
    """From base_lr down to min_lr with the given power of what remains; 1 is a straight line."""
    return min_lr + (span.base_lr - min_lr) * (1 - span.share(t)) ** power


def step_decay(t: float, span: Span, every_epochs: float = 30, gamma: float = 0.1) -> float:
    """Multiplied by gamma every `every_epochs` epochs, but not at the end of the span.

    He et al., "Deep Residual Learning", 2016, and pytorch/examples: 30 and 0.1.
    """
    every = every_epochs * span.per_epoch
    return span.base_lr * gamma ** max(0, min(t // every, math.ceil(span.length / every) - 1))


def multistep(t: float, span: Span, milestones_epochs: list[float], gamma: float = 0.1) -> float:
    """Times gamma at the start of each of the given epochs (counted from 0, so 30 is after thirty epochs).

    As torch's MultiStepLR. timm's fires one unit of time earlier: its milestone 30 is 29 here.
    """
    milestones = [milestone * span.per_epoch for milestone in milestones_epochs]
    return span.base_lr * gamma ** sum(milestone <= t and milestone < span.length for milestone in milestones)


def exponential(t: float, span: Span, gamma: float) -> float:
    """Times gamma at the start of each epoch but the first, as torchvision's reference script steps its
    ExponentialLR."""
    return step_decay(t, span, 1, gamma)


def one_cycle(
    t: float,
    span: Span,
    pct_start: float = 0.3,
    anneal: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    min_momentum: float | None = None,
    max_momentum: float | None = None,
) -> float:
    """Up from base_lr / div_factor to base_lr in the first share pct_start of the span, then down to the start's rate /
    final_div_factor in the last step (Smith and Topin, "Super-Convergence", 2018). As torch's
    OneCycleLR in two phases. `one_cycle_momentum` has the momentum.
    """
    start = span.base_lr / div_factor
    return _two_phases(t, span, (start, span.base_lr, start / final_div_factor), pct_start, anneal)


def one_cycle_momentum(
    t: float,
    span: Span,
    pct_start: float = 0.3,
    anneal: str = "cos",
    min_momentum: float | None = None,
    max_momentum: float | None = None,
    **_: float,
) -> float | None:
    """The momentum of `one_cycle`: from max_momentum to min_momentum and back. None if they are not given.

    torch's OneCycleLR changes the momentum by default, between 0.85 and 0.95.
    """
    if min_momentum is None or max_momentum is None:
        return None
    return _two_phases(t, span, (max_momentum, min_momentum, max_momentum), pct_start, anneal)


def _two_phases(t: float, span: Span, values: tuple[float, float, float], pct_start: float, anneal: str) -> float:
    """From the first value to the second, reached one unit before pct_start of the span, then to the third, reached in
    the last unit."""
    turn, last = pct_start * span.length - 1, span.length - 1
    if t <= turn:
        begin, end, passed = values[0], values[1], t / turn if turn > 0 else 1.0
    else:
        begin, end, passed = values[1], values[2], min((t - turn) / (last - turn), 1.0) if last > turn else 1.0
    remains = 0.5 * (1 + math.cos(math.pi * passed)) if anneal == "cos" else 1 - passed
    return end + (begin - end) * remains


def piecewise(t: float, span: Span, epochs: list[float], factors: list[float]) -> float:
    """base_lr times a factor, given at some epochs; linear between them, constant before and after.

    FFCV's ramp over 16 epochs is epochs [0, 2, 16] and factors [1e-4, 1, 0] with the rate changing in each step.
    """
    now = t / span.per_epoch
    if now <= epochs[0]:
        return span.base_lr * factors[0]
    for i in range(1, len(epochs)):
        if now < epochs[i]:
            passed = (now - epochs[i - 1]) / (epochs[i] - epochs[i - 1])
            return span.base_lr * (factors[i - 1] + (factors[i] - factors[i - 1]) * passed)
    return span.base_lr * factors[-1]


# torch's `eps`: smaller changes of the learning rate are ignored.
_MIN_CHANGE = 1e-8


def plateau(
    t: float,
    span: Span,
    evaluations: Sequence[float],
    patience: int = 10,
    gamma: float = 0.1,
    min_lr: float = 0.0,
    threshold: float = 1e-4,
) -> float:
    """Times gamma, but not below min_lr, after more than `patience` evaluations in a row without a better one.

    evaluations: top-1 (%) of each evaluation up to now; better is more than the best so far times 1 + threshold. As
    torch's ReduceLROnPlateau with mode `max`, and timm's, which is built on it.
    """
    lr, best, bad_evaluations = span.base_lr, -math.inf, 0
    for top1_pct in evaluations:
        if top1_pct > best * (1 + threshold):
            best, bad_evaluations = top1_pct, 0
        else:
            bad_evaluations += 1
        if bad_evaluations > patience:
            lower = max(lr * gamma, min_lr)
            lr, bad_evaluations = lower if lr - lower > _MIN_CHANGE else lr, 0
    return lr


def constant(t: float, span: Span) -> float:
    """Always base_lr."""
    return span.base_lr


# Called as `curve(t, span, **kwargs)`, t from 0 to `span.length`; `plateau` with `evaluations` too.
BUILT_IN: dict[str, Callable[..., float]] = {
    "cosine": cosine,
    "step": step_decay,
    "multistep": multistep,
    "polynomial": polynomial,
    "exponential": exponential,
    "one_cycle": one_cycle,
    "piecewise": piecewise,
    "plateau": plateau,
    "constant": constant,
}


def scaled_lr(optimizer: OptimizerConfig, global_batch_size: int) -> tuple[float, str | None]:
    """The learning rate for a global batch, and a sentence about the scaling (None if it is `optimizer.lr`).

    linear: lr * batch / `lr_base_batch` (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1). sqrt: lr
    times the root of that ratio (Krizhevsky 2014, "One weird trick"). Only the highest rate is scaled: `min_lr` and
    `warmup_start_lr` are absolute, as in DeiT's script, which has the linear rule in the same form.
    """
    base = optimizer.lr_base_batch
    if base is None or base == global_batch_size:
        return optimizer.lr, None
    ratio = global_batch_size / base
    factor, rule = {"linear": (ratio, "linearly"), "sqrt": (math.sqrt(ratio), "by the root")}[optimizer.lr_scaling]
    lr = optimizer.lr * factor
    return lr, (
        f"lr {optimizer.lr:g} for {base} images, scaled {rule} x {factor:.4g} to {lr:.4g} for {global_batch_size}"
    )


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the learning rate of optimizer step 0, 1, 2, ...; `schedule.momentum(step)` its momentum.

    Defined after the last step too, where both are constant. Time has span.per_epoch units in an epoch. curve: the
    learning rate as a function of the time since `start`. warmup: the time at which the warm-up ends.
    """

    settings: ScheduleConfig
    curve: Callable[..., float]
    span: Span
    start: float
    warmup: float
    steps_per_epoch: int

    def __call__(self, step: int, evaluations: Evaluations = ()) -> float:
        """The learning rate. evaluations: all recorded so far, before a resume too; only `plateau` uses them."""
        now = self._now(step)
        if self.settings.name == "plateau":
            return self._warm(now, evaluations=[top1 for when, top1 in evaluations if self._counts(when, now)])
        return self._warm(now)

    def momentum(self, step: int) -> float | None:
        """The momentum (Adam's first beta) if the schedule changes it, else None."""
        if self.settings.name != "one_cycle":
            return None
        return one_cycle_momentum(self._since_start(self._now(step)), self.span, **self.settings.kwargs)

    def _now(self, step: int) -> float:
        """The time of a step; if the rate changes between epochs only, that of its epoch's first step."""
        return step // self.steps_per_epoch if self.settings.by_epoch else step

    def _since_start(self, now: float) -> float:
        return min(max(now - self.start, 0), self.span.length)

    def _counts(self, step: int, now: float) -> bool:
        """Whether `plateau` uses the evaluation after a step: only those between epochs, after the warm-up (as
        timm does) and before the cooldown. A run may also have evaluated within an epoch."""
        when = self._now(step)
        return step % self.steps_per_epoch == 0 and self.warmup < when <= min(now, self.start + self.span.length)

    def _warm(self, now: float, **more: Any) -> float:
        """The curve, or the linear warm-up before it."""
        if now >= self.warmup:
            return self.curve(self._since_start(now), self.span, **more)
        settings = self.settings
        target = self.curve(self._since_start(now), self.span, **more) if settings.warmup_prefix else self.span.base_lr
        if settings.warmup_start_lr is not None:
            return settings.warmup_start_lr + (target - settings.warmup_start_lr) * now / self.warmup
        return (settings.warmup_start_factor + (1 - settings.warmup_start_factor) * now / self.warmup) * target


def build_schedule(schedule: ScheduleConfig, base_lr: float, steps_per_epoch: int, epochs: int) -> Schedule:
    """The schedule of a run. base_lr: the highest learning rate, after the warm-up.

    During the first warmup_epochs * steps_per_epoch steps (rounded) the rate grows linearly, from warmup_start_lr or
    warmup_start_factor of its target at step 0 (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2;
    torch's LinearLR). With warmup_prefix the curve starts after the warm-up, whose target is the curve's first value
    (torchvision's SequentialLR, timm's warmup_prefix). Without, the curve starts with the run, the warm-up replaces its
    first part, and the target is base_lr (timm's default). The curve ends cooldown_epochs before the run, and its last
    value stays: cosine's min_lr, or the last step of a staircase.

    With by_epoch time is counted in epochs from the start, so that the curve equals a scheduler that is stepped once an
    epoch; a warm-up or cooldown of 2.5 epochs is then not rounded.

    A user's factory is called as `factory(base_lr=..., total_steps=..., steps_per_epoch=..., **kwargs)` and returns a
    function of the step, counted from the run's start; total_steps: until the cooldown. With warmup_prefix the warm-up
    multiplies that function. Raises UserError where it returns something else, and ConfigError where a built-in
    schedule has unusable rates (`lr_problem`).
    """
    built = _build_unchecked(schedule, base_lr, steps_per_epoch, epochs)
    if schedule.name in BUILT_IN and (text := lr_problem(built, steps_per_epoch * epochs)):
        raise ConfigError([f"schedule.kwargs: {text}"])
    return built


def _build_unchecked(schedule: ScheduleConfig, base_lr: float, steps_per_epoch: int, epochs: int) -> Schedule:
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
        curve = _curve_from_factory(schedule, span, steps_per_epoch)
    return Schedule(schedule, curve, span, start, warmup, steps_per_epoch)


def _curve_from_factory(schedule: ScheduleConfig, span: Span, steps_per_epoch: int) -> Callable[..., float]:
    """A user's function of the step as a curve, whose time may be counted in epochs."""
    steps = steps_per_epoch // span.per_epoch
    function = import_factory(schedule.name)(
        base_lr=span.base_lr,
        total_steps=round(span.length * steps),
        steps_per_epoch=steps_per_epoch,
        **schedule.kwargs,
    )
    if not callable(function):
        returned = type(function).__name__
        raise UserError(f"schedule.name: {schedule.name!r} returned {returned}; return a function of the step")
    return lambda t, span: function(round(t * steps))


# Ranges of the numbers in kwargs, and which of them are whole.
RANGES: dict[str, Range] = {
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
OPTIONAL = ("min_momentum", "max_momentum")
# Lists of epochs.
EPOCHS = ("milestones_epochs", "epochs")
ANNEALS = ("cos", "linear")


def schedule_problems(schedule: ScheduleConfig, epochs: int, lr: float = 1.0) -> list[Problem]:
    """All problems of the section that can be found without data: name, kwargs, unusable rates, points in time after
    the end of the run, and rates above `lr`, the run's highest rate, scaled for the batch."""
    is_factory = is_factory_name(schedule.name)
    if not is_factory and schedule.name not in BUILT_IN:
        allowed = f"(built in: {', '.join(BUILT_IN)}; or my_module:my_factory)"
        hint = did_you_mean(schedule.name, BUILT_IN)
        return [Problem("schedule.name", f"unknown schedule {schedule.name!r}{hint} {allowed}")]
    try:
        factory: Callable[..., Any] = import_factory(schedule.name) if is_factory else BUILT_IN[schedule.name]
    except LookupError as error:
        return [Problem("schedule.name", str(error))]
    reserved = RESERVED_OF_FACTORY if is_factory else RESERVED
    problems = kwargs_problems("schedule.kwargs", factory, schedule.kwargs, reserved)
    # A user's factory is not called with trial numbers, which it may reject.
    if problems or is_factory:
        return problems
    values = {name: _value_problem(name, value) for name, value in schedule.kwargs.items()}
    problems = [Problem(f"schedule.kwargs.{name}", text) for name, text in values.items() if text]
    problems = problems or _combination_problems(schedule, epochs) or _rates_above(schedule, lr)
    return problems or _trial_problems(schedule, epochs, lr)


def _value_problem(name: str, value: Any) -> str | None:
    """What is wrong with an argument of a built-in curve by itself."""
    if name == "anneal" and value not in ANNEALS:
        return f"{format_value(value)} is not one of {', '.join(ANNEALS)}"
    if name in EPOCHS and not (_is_list_of_numbers(value) and sorted(set(value)) == value):
        return f"{format_value(value)} is not a list of different epochs in ascending order"
    if name == "factors" and not _is_list_of_numbers(value):
        return f"{format_value(value)} is not a list of numbers, each {NOT_NEGATIVE}"
    if name in RANGES and not (name in OPTIONAL and value is None):
        return number_problem(value, RANGES[name], whole=name in WHOLE)
    return None


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and not any(number_problem(x, NOT_NEGATIVE) for x in value)


def _combination_problems(schedule: ScheduleConfig, epochs: int) -> list[Problem]:
    """Arguments of a built-in curve that do not fit each other, or the run."""
    kwargs, problems = schedule.kwargs, []
    if "factors" in kwargs and len(kwargs["factors"]) != len(kwargs["epochs"]):
        counts = f"{len(kwargs['factors'])} factors for {len(kwargs['epochs'])} epochs"
        problems.append(Problem("schedule.kwargs.factors", f"{counts}; give one for each"))
    low, high = kwargs.get("min_momentum"), kwargs.get("max_momentum")
    if (low is None) != (high is None):
        absent = "min_momentum" if low is None else "max_momentum"
        problems.append(Problem(f"schedule.kwargs.{absent}", "is missing: give both momenta, or none"))
    elif low is not None and high is not None and low > high:
        problems.append(Problem("schedule.kwargs.min_momentum", f"{low} is more than max_momentum {high}"))
    warmup = schedule.warmup_epochs if schedule.warmup_prefix else 0
    length = epochs - warmup - schedule.cooldown_epochs
    for name in EPOCHS:
        latest = max(kwargs.get(name, [0]))
        if latest > length:
            without = " without warm-up and cooldown" if length < epochs else ""
            text = f"{latest:g} is after the end of the run: {length:g} epochs{without} (train.epochs {epochs})"
            problems.append(Problem(f"schedule.kwargs.{name}", f"{text}; to end early use train.max_steps"))
    return problems


def _rates_above(schedule: ScheduleConfig, lr: float) -> list[Problem]:
    """Rates above the run's highest, with which the rate would rise where it should fall, or fall where it should
    rise."""
    rates = {"kwargs.min_lr": schedule.kwargs.get("min_lr", 0.0)}
    if schedule.warmup_epochs > 0:
        rates["warmup_start_lr"] = schedule.warmup_start_lr or 0.0
    text = f"is more than the learning rate {lr:.4g} (optimizer.lr, scaled for the batch); give at most that"
    return [Problem(f"schedule.{key}", f"{rate:g} {text}") for key, rate in rates.items() if rate > lr]


# A learning rate range test starts at about 1e-7 and rises to 10. Higher rates are errors, such as a gamma above 1 in
# short intervals, and end in NaN or overflow.
_MAX_FACTOR = 1e4
# Steps per epoch of trials before the real number is known: the fewest, and as many as matter.
_TRIAL_STEPS = (1, 10_000)
# A longer run is tried at this number of evenly spaced steps, and at the last one.
_MAX_TRIED = 5000


def _trial_problems(schedule: ScheduleConfig, epochs: int, lr: float) -> list[Problem]:
    """Evaluate a built-in schedule over its epochs, finely enough for curves that change within an epoch."""
    texts = [lr_problem(_build_unchecked(schedule, lr, steps, epochs), epochs * steps) for steps in _TRIAL_STEPS]
    return [Problem("schedule.kwargs", text) for text in texts if text is not None][:1]


def lr_problem(schedule: Schedule, total_steps: int) -> str | None:
    """What is wrong with the learning rates of a built-in schedule; None if nothing.

    Each must be finite, not negative, and at most 10,000 times the run's highest rate, or 10,000 if that is below 1.
    """
    name, kwargs = schedule.settings.name, format_value(schedule.settings.kwargs)
    highest = _MAX_FACTOR * max(schedule.span.base_lr, 1.0)
    for step in (*range(0, total_steps, math.ceil(total_steps / _MAX_TRIED)), total_steps - 1):
        try:
            rate = schedule(step)
        except ArithmeticError as error:
            return f"{name!r} can't be computed with {kwargs}: {error.args[-1]}"
        if isinstance(rate, complex) or not 0 <= rate <= highest:
            when = f"after {step / schedule.steps_per_epoch:.4g} epochs"
            return f"{name!r} has a learning rate of {rate:g} {when} with {kwargs}; allowed are 0 to {highest:g}"
    return None
