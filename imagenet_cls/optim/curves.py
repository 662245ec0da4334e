"""The built-in schedules as curves: the learning rate as a pure function of the time since the schedule's start.

The unit of time is an optimizer step, or an epoch if the rate changes between epochs only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """The time of a curve. base_lr: the highest learning rate. length: in units of time. per_epoch: units in an
    epoch."""

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
    """Times gamma after every so many epochs (He et al., "Deep Residual Learning", 2016, and pytorch/examples: 30,
    0.1). There is no decay at the end of the span."""
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
