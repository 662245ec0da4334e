"""The built-in schedules as curves: the learning rate as a pure function of the time that a schedule has run.

Owns the formulas and the names that a config calls them by. Refuses nothing: `schedule` checks the numbers, puts the
warm-up in front and keeps the time. Called by `schedule`.

Time has a unit: optimizer steps, or whole epochs where the rate changes between epochs only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """What a curve runs over. base_lr: the learning rate at its highest.

    length: from the first to one behind the last unit of time, at least 0. per_epoch: units in an epoch.
    """

    base_lr: float
    length: float
    per_epoch: int

    def share(self, t: float) -> float:
        """Share of the span that lies before t, 0 to 1."""
        return t / self.length if self.length > 0 else 0.0


def cosine(t: float, span: Span, min_lr: float = 0.0, cycles: int = 1, cycle_decay: float = 1.0) -> float:
    """Half a cosine from base_lr down to min_lr (Loshchilov and Hutter, "SGDR", 2017, equation 5).

    cycles: so many of them, of equal length, fill the span. cycle_decay: each begins at so many times the rate that
    the one before it began at. As timm's CosineLRScheduler, whose t_initial is the length of one.
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
    0.1). A decay that would fall on the end of the span is none."""
    every = every_epochs * span.per_epoch
    return span.base_lr * gamma ** max(0, min(t // every, math.ceil(span.length / every) - 1))


def multistep(t: float, span: Span, milestones_epochs: list[float], gamma: float = 0.1) -> float:
    """Times gamma at the start of each of the epochs named (counted from 0, so 30 is after thirty epochs).

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
    """Up from base_lr / div_factor to base_lr in the first share pct_start of the span, then down to the start's
    final_div_factor-th part, which the last step has (Smith and Topin, "Super-Convergence", 2018). As torch's
    OneCycleLR in two phases. For the momenta see `one_cycle_momentum`.
    """
    start = span.base_lr / div_factor
    return _there_and_back(t, span, (start, span.base_lr, start / final_div_factor), pct_start, anneal)


def one_cycle_momentum(
    t: float,
    span: Span,
    pct_start: float = 0.3,
    anneal: str = "cos",
    min_momentum: float | None = None,
    max_momentum: float | None = None,
    **_: float,
) -> float | None:
    """The momentum beside `one_cycle`: from max_momentum to min_momentum and back. None where they are not given.

    torch's OneCycleLR moves the momentum unless it is told not to, between 0.85 and 0.95; here a config says so.
    """
    if min_momentum is None or max_momentum is None:
        return None
    return _there_and_back(t, span, (max_momentum, min_momentum, max_momentum), pct_start, anneal)


def _there_and_back(t: float, span: Span, values: tuple[float, float, float], pct_start: float, anneal: str) -> float:
    """From the first value to the second, which is reached one unit before pct_start of the span, and on to the third,
    which the last unit has."""
    turn, last = pct_start * span.length - 1, span.length - 1
    if t <= turn:
        begin, end, passed = values[0], values[1], t / turn if turn > 0 else 1.0
    else:
        begin, end, passed = values[1], values[2], min((t - turn) / (last - turn), 1.0) if last > turn else 1.0
    remains = 0.5 * (1 + math.cos(math.pi * passed)) if anneal == "cos" else 1 - passed
    return end + (begin - end) * remains


def piecewise(t: float, span: Span, epochs: list[float], factors: list[float]) -> float:
    """base_lr times a factor that is given at some epochs; straight lines between them, and flat beyond them.

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


# torch's `eps`: a change of the learning rate that is smaller is not made.
_LEAST_CHANGE = 1e-8


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
    lr, best, without_gain = span.base_lr, -math.inf, 0
    for top1_pct in evaluations:
        if top1_pct > best * (1 + threshold):
            best, without_gain = top1_pct, 0
        else:
            without_gain += 1
        if without_gain > patience:
            lower = max(lr * gamma, min_lr)
            lr, without_gain = lower if lr - lower > _LEAST_CHANGE else lr, 0
    return lr


def constant(t: float, span: Span) -> float:
    """Always base_lr."""
    return span.base_lr


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
"""Each is called as `curve(t, span, **kwargs)`, t from 0 to `span.length`; `plateau` with `evaluations` besides."""
