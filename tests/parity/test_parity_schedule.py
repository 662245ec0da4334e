"""Every step's learning rate and momentum against timm's and torch's, for the same settings."""

import math
import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from timm.scheduler import (
    CosineLRScheduler,
    MultiStepLRScheduler,
    PolyLRScheduler,
    StepLRScheduler,
)
from timm.scheduler.scheduler import Scheduler as TimmScheduler
from torch.optim import lr_scheduler

from imagenet_cls.config.schema import ScheduleConfig
from imagenet_cls.optim.schedule import Schedule, build_schedule, schedule_problems

BASE, PER_EPOCH, EPOCHS = 0.4, 7, 12
TOTAL = PER_EPOCH * EPOCHS
WARMUP, START_LR = 3, 1e-5


def ours(name: str, kwargs: dict | None = None, epochs: int = EPOCHS, **settings) -> Schedule:
    config = ScheduleConfig(name, kwargs=kwargs or {}, **settings)
    assert schedule_problems(config, epochs, BASE) == []
    return build_schedule(config, BASE, PER_EPOCH, epochs)


def close(mine: Callable[[int], float], theirs: Iterable[float]) -> None:
    expected = list(theirs)
    assert [mine(step) for step in range(len(expected))] == pytest.approx(
        expected, rel=1e-9, abs=1e-300
    )


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE, momentum=0.9)


def timms(
    make: Callable[..., TimmScheduler], unit: int, epochs: int = EPOCHS, **settings
) -> list[float]:
    """The rate at every step, as timm's train.py calls the scheduler. unit: of its times, in
    steps.
    """
    scheduler = make(sgd(), t_in_epochs=unit == PER_EPOCH, **settings)
    rates = []
    for step in range(epochs * PER_EPOCH):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step_update(step + 1)
        if (step + 1) % PER_EPOCH == 0:
            scheduler.step((step + 1) // PER_EPOCH)
    return rates


def torchs(
    make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], by_epoch: bool
) -> list[dict[str, float]]:
    """Learning rate and momentum at every step of a scheduler that is stepped after each epoch, or
    after each step.
    """
    optimizer = sgd()
    scheduler = make(optimizer)
    groups = []
    for step in range(TOTAL):
        groups.append({key: optimizer.param_groups[0][key] for key in ("lr", "momentum")})
        optimizer.step()
        if not by_epoch or (step + 1) % PER_EPOCH == 0:
            scheduler.step()
    return groups


# Of our schedule and of timm's scheduler, whose times are epochs or steps.
TIMMS: dict[str, tuple[tuple[str, dict], Callable]] = {
    "cosine": (
        ("cosine", {"min_lr": 0.01}),
        lambda unit, length: (CosineLRScheduler, {"t_initial": length, "lr_min": 0.01}),
    ),
    "step": (
        ("step", {"every_epochs": 2, "gamma": 0.3}),
        lambda unit, length: (StepLRScheduler, {"decay_t": 2 * unit, "decay_rate": 0.3}),
    ),
    "step of a fraction": (
        ("step", {"every_epochs": 2.4, "gamma": 0.97}),
        lambda unit, length: (StepLRScheduler, {"decay_t": 2.4 * unit, "decay_rate": 0.97}),
    ),
    "exponential": (
        ("exponential", {"gamma": 0.9}),
        lambda unit, length: (StepLRScheduler, {"decay_t": unit, "decay_rate": 0.9}),
    ),
    # timm's milestones fire one unit early; here they are written one unit later.
    "multistep": (
        ("multistep", {"milestones_epochs": [4, 5, 8], "gamma": 0.3}),
        lambda unit, length: (
            MultiStepLRScheduler,
            {"decay_t": [m * unit + 1 for m in (4, 5, 8)], "decay_rate": 0.3},
        ),
    ),
    "polynomial": (
        ("polynomial", {"min_lr": 0.01, "power": 2.0}),
        lambda unit, length: (PolyLRScheduler, {"t_initial": length, "lr_min": 0.01, "power": 2.0}),
    ),
}


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("case", TIMMS)
def test_schedule_equals_timms(case: str, warmup: int, prefix: bool, by_epoch: bool) -> None:
    (name, kwargs), theirs = TIMMS[case]
    # timm counts time in whole epochs, or in steps.
    unit, scale = (PER_EPOCH, 1) if by_epoch else (1, PER_EPOCH)
    length = (EPOCHS - (warmup if prefix else 0)) * scale
    make, settings = theirs(scale, length)
    settings |= {"warmup_t": warmup * scale, "warmup_lr_init": START_LR, "warmup_prefix": prefix}
    mine = ours(
        name,
        kwargs,
        warmup_epochs=warmup,
        warmup_start_lr=START_LR,
        warmup_prefix=prefix,
        by_epoch=by_epoch,
    )
    close(mine, timms(make, unit, **settings))


def top1s(seed: int) -> list[float]:
    """Top-1 after each epoch: rises, stands still, and takes steps back."""
    draw = random.Random(seed)
    return [
        round(70 * (1 - math.exp(-epoch / 8)) + draw.uniform(-4, 4), 2) for epoch in range(1, 41)
    ]


@pytest.mark.parametrize("threshold", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("patience", [0, 2])
def test_plateau_equals_torchs_to_the_bit(patience: int, threshold: float) -> None:
    optimizer = sgd()
    min_lr = 1e-3 * patience  # reached with patience 2
    theirs = lr_scheduler.ReduceLROnPlateau(
        optimizer, "max", 0.3, patience, threshold, min_lr=min_lr
    )
    kwargs = {"patience": patience, "gamma": 0.3, "threshold": threshold, "min_lr": min_lr}
    mine = ours("plateau", kwargs, epochs=80, by_epoch=True)
    recorded: list[tuple[int, float]] = []
    rates = []
    # many reductions, with patience 0 the last ones below 1e-8
    for epoch, metric in enumerate([*top1s(0), *top1s(1)]):
        assert mine(epoch * PER_EPOCH, recorded) == optimizer.param_groups[0]["lr"], epoch
        rates.append(optimizer.param_groups[0]["lr"])
        theirs.step(metric)
        recorded.append(((epoch + 1) * PER_EPOCH, metric))
    assert len(set(rates)) > 3


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize(
    ("pct_start", "div_factor", "final_div_factor"),
    [(0.3, 25.0, 1e4), (0.45, 10.0, 100.0), (0.95, 5.0, 5.0)],
)
def test_one_cycle_equals_torchs(
    anneal: str, pct_start: float, div_factor: float, final_div_factor: float, by_epoch: bool
) -> None:
    shape = {"pct_start": pct_start, "div_factor": div_factor, "final_div_factor": final_div_factor}
    momenta = {"min_momentum": 0.8, "max_momentum": 0.95}

    def theirs(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        steps = EPOCHS if by_epoch else TOTAL
        more = {"base_momentum": 0.8, "max_momentum": 0.95, "anneal_strategy": anneal}
        return lr_scheduler.OneCycleLR(optimizer, BASE, total_steps=steps, **shape, **more)

    mine = ours("one_cycle", {**shape, **momenta, "anneal": anneal}, by_epoch=by_epoch)
    expected = torchs(theirs, by_epoch)
    close(mine, [group["lr"] for group in expected])
    close(mine.momentum, [group["momentum"] for group in expected])
    unmoved = ours("one_cycle", {**shape, "anneal": anneal}, by_epoch=by_epoch)
    close(unmoved, [group["lr"] for group in expected])
    assert unmoved.momentum(0) is None


def test_piecewise_equals_numpys_interpolation() -> None:
    points, factors = [0.5, 2.25, 6, 9], [0.1, 1.0, 0.3, 0.7]
    expected = BASE * np.interp(np.arange(TOTAL) / PER_EPOCH, points, factors)
    close(ours("piecewise", {"epochs": points, "factors": factors}), expected)
