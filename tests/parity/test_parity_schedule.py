"""Every step's learning rate against timm's, for the same settings."""

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

from imagenet_cls.config.schema import ScheduleConfig
from imagenet_cls.optim.schedule import Schedule, build_schedule, schedule_problems

BASE, PER_EPOCH, EPOCHS = 0.4, 7, 12
TOTAL = PER_EPOCH * EPOCHS
WARMUP, START_LR = 3, 1e-5


def ours(name: str, kwargs: dict | None = None, epochs: int = EPOCHS, **settings) -> Schedule:
    config = ScheduleConfig(name, kwargs=kwargs or {}, **settings)
    assert schedule_problems(config, epochs) == []
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


def test_piecewise_equals_numpys_interpolation() -> None:
    points, factors = [0.5, 2.25, 6, 9], [0.1, 1.0, 0.3, 0.7]
    expected = BASE * np.interp(np.arange(TOTAL) / PER_EPOCH, points, factors)
    close(ours("piecewise", {"epochs": points, "factors": factors}), expected)
