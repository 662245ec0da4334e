"""Every step's learning rate and momentum against timm's, torch's and FFCV's, for the same settings."""

import math
import random
import warnings
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PlateauLRScheduler, PolyLRScheduler, StepLRScheduler
from timm.scheduler.scheduler import Scheduler as TimmScheduler
from torch.optim import lr_scheduler

from imagenet_cls.config.schema import ScheduleConfig
from imagenet_cls.optim.schedule import Schedule, build_schedule

BASE, PER_EPOCH, EPOCHS = 0.4, 7, 12
TOTAL = PER_EPOCH * EPOCHS
WARMUP, START_LR = 3, 1e-5


def ours(name: str, kwargs: dict | None = None, epochs: int = EPOCHS, **settings) -> Schedule:
    return build_schedule(ScheduleConfig(name, kwargs=kwargs or {}, **settings), BASE, PER_EPOCH, epochs)


def close(mine: Callable[[int], float], theirs: Iterable[float]) -> None:
    expected = list(theirs)
    assert [mine(step) for step in range(len(expected))] == pytest.approx(expected, rel=1e-9, abs=1e-300)


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE, momentum=0.9)


def timms(make: Callable[..., TimmScheduler], unit: int, epochs: int = EPOCHS, **settings) -> list[float]:
    """The rate at every step, as timm's train.py calls the scheduler. unit: of its times, in steps."""
    scheduler = make(sgd(), t_in_epochs=unit == PER_EPOCH, **settings)
    rates = []
    for step in range(epochs * PER_EPOCH):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step_update(step + 1)
        if (step + 1) % PER_EPOCH == 0:
            scheduler.step((step + 1) // PER_EPOCH)
    return rates


def torchs(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], by_epoch: bool) -> list[dict[str, float]]:
    """Learning rate and momentum at every step of a scheduler that is stepped after each epoch, or after each step."""
    optimizer = sgd()
    scheduler = make(optimizer)
    groups = []
    for step in range(TOTAL):
        groups.append({key: optimizer.param_groups[0][key] for key in ("lr", "momentum")})
        optimizer.step()
        if not by_epoch or (step + 1) % PER_EPOCH == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SequentialLR steps its parts in a way that torch itself warns about
                scheduler.step()
    return groups


# Of our schedule and of timm's scheduler, whose times are epochs or steps.
TIMMS: dict[str, tuple[tuple[str, dict], Callable[[int, float], tuple[type, dict]]]] = {
    "cosine": (
        ("cosine", {"min_lr": 0.01}),
        lambda unit, length: (CosineLRScheduler, {"t_initial": length, "lr_min": 0.01}),
    ),
    "cosine in three cycles": (
        ("cosine", {"min_lr": 0.01, "cycles": 3, "cycle_decay": 0.6}),
        lambda unit, length: (
            CosineLRScheduler,
            {"t_initial": length / 3, "lr_min": 0.01, "cycle_limit": 3, "cycle_decay": 0.6},
        ),
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
        lambda unit, length: (MultiStepLRScheduler, {"decay_t": [m * unit + 1 for m in (4, 5, 8)], "decay_rate": 0.3}),
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
def test_timm(case: str, warmup: int, prefix: bool, by_epoch: bool) -> None:
    (name, kwargs), theirs = TIMMS[case]
    # timm counts time in whole epochs, or in steps.
    unit, scale = (PER_EPOCH, 1) if by_epoch else (1, PER_EPOCH)
    length = (EPOCHS - (warmup if prefix else 0)) * scale
    make, settings = theirs(scale, length)
    settings |= {"warmup_t": warmup * scale, "warmup_lr_init": START_LR, "warmup_prefix": prefix}
    mine = ours(name, kwargs, warmup_epochs=warmup, warmup_start_lr=START_LR, warmup_prefix=prefix, by_epoch=by_epoch)
    close(mine, timms(make, unit, **settings))


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("case", ["cosine", "cosine in three cycles", "polynomial"])
def test_timms_cooldown(case: str, by_epoch: bool) -> None:
    """DeiT's: the schedule's own epochs, and more of them at the lowest rate behind it."""
    (name, kwargs), theirs = TIMMS[case]
    unit, scale = (PER_EPOCH, 1) if by_epoch else (1, PER_EPOCH)
    make, settings = theirs(scale, EPOCHS * scale)
    expected = timms(make, unit, epochs=EPOCHS + 2, **settings)
    assert set(expected[-2 * PER_EPOCH :]) == {0.01}
    close(ours(name, kwargs, epochs=EPOCHS + 2, cooldown_epochs=2, by_epoch=by_epoch), expected)


def top1s(seed: int) -> list[float]:
    """Top-1 after each epoch: rises, stands still, and takes steps back."""
    draw = random.Random(seed)
    return [round(70 * (1 - math.exp(-epoch / 8)) + draw.uniform(-4, 4), 2) for epoch in range(1, 41)]


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("seed", range(3))
def test_timms_plateau(seed: int, warmup: int) -> None:
    metrics = [60.0, *top1s(seed)[1:]]  # within the warm-up, and then not to be regarded
    optimizer = sgd()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is to be taken out of timm
        theirs = PlateauLRScheduler(
            optimizer, 0.5, patience_t=2, mode="max", lr_min=0.02, warmup_t=warmup, warmup_lr_init=START_LR
        )
    expected = []
    for epoch, metric in enumerate(metrics):
        expected += [optimizer.param_groups[0]["lr"]] * PER_EPOCH
        theirs.step(epoch + 1, metric)
    mine = ours(
        "plateau",
        {"patience": 2, "gamma": 0.5, "min_lr": 0.02},
        epochs=len(metrics),
        warmup_epochs=warmup,
        warmup_start_lr=START_LR,
        by_epoch=True,
    )
    recorded = [((epoch + 1) * PER_EPOCH, metric) for epoch, metric in enumerate(metrics)]
    close(lambda step: mine(step, recorded), expected)
    assert len(set(expected)) > 3
    # What is recorded later changes nothing earlier: a resumed run has the same rates.
    close(lambda step: mine(step, [pair for pair in recorded if pair[0] <= step]), expected)


@pytest.mark.parametrize("threshold", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("patience", [0, 1, 3])
def test_torchs_plateau(patience: int, threshold: float) -> None:
    metrics = top1s(7)
    optimizer = sgd()
    theirs = lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max", factor=0.1, patience=patience, threshold=threshold, min_lr=1e-9
    )
    expected = []
    for metric in metrics:
        expected += [optimizer.param_groups[0]["lr"]] * PER_EPOCH
        theirs.step(metric)
    kwargs = {"patience": patience, "threshold": threshold, "min_lr": 1e-9}
    mine = ours("plateau", kwargs, epochs=len(metrics))
    recorded = [((epoch + 1) * PER_EPOCH, metric) for epoch, metric in enumerate(metrics)]
    close(lambda step: mine(step, recorded), expected)


def test_torchvisions_v2_recipe() -> None:
    """LinearLR by epochs from 0.01, then CosineAnnealingLR by epochs (`--lr-warmup-method linear`)."""

    def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=WARMUP)
        main = lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS - WARMUP, eta_min=1e-3)
        return lr_scheduler.SequentialLR(optimizer, [warmup, main], milestones=[WARMUP])

    mine = ours("cosine", {"min_lr": 1e-3}, warmup_epochs=WARMUP, warmup_start_factor=0.01, by_epoch=True)
    close(mine, [group["lr"] for group in torchs(sequential, by_epoch=True)])


@pytest.mark.parametrize(
    ("name", "kwargs", "main"),
    [
        ("step", {"every_epochs": 2, "gamma": 0.3}, lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3)),
        ("exponential", {"gamma": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        (
            "multistep",
            {"milestones_epochs": [2, 5], "gamma": 0.3},
            lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.3),
        ),
    ],
)
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_torchvisions_other_schedulers(name: str, kwargs: dict, main: Callable, warmup: int) -> None:
    def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        if not warmup:
            return main(optimizer)
        first = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warmup)
        return lr_scheduler.SequentialLR(optimizer, [first, main(optimizer)], milestones=[warmup])

    mine = ours(name, kwargs, warmup_epochs=warmup, warmup_start_factor=0.1, by_epoch=True)
    close(mine, [group["lr"] for group in torchs(sequential, by_epoch=True)])


@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_cosine_annealing_by_steps(warmup: int) -> None:
    def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        steps = warmup * PER_EPOCH
        main = lr_scheduler.CosineAnnealingLR(optimizer, T_max=TOTAL - steps)
        if not steps:
            return main
        first = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=steps)
        return lr_scheduler.SequentialLR(optimizer, [first, main], milestones=[steps])

    mine = ours("cosine", warmup_epochs=warmup, warmup_start_factor=0.1)
    close(mine, [group["lr"] for group in torchs(sequential, by_epoch=False)])


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize(
    ("pct_start", "div_factor", "final_div_factor"), [(0.3, 25.0, 1e4), (0.45, 10.0, 100.0), (0.95, 5.0, 5.0)]
)
def test_one_cycle(anneal: str, pct_start: float, div_factor: float, final_div_factor: float, by_epoch: bool) -> None:
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


@pytest.mark.parametrize("epochs", [16, 18, 40])
def test_ffcvs_ramp(epochs: int) -> None:
    """`get_step_lr` of its train script: rates at the epochs, and from each epoch to the next in equal steps."""

    def at_epoch(epoch: int) -> float:
        return float(np.interp([epoch], [0, 2, epochs], [1e-4 * BASE, 1 * BASE, 0])[0])

    expected: list[float] = []
    for epoch in range(epochs):
        expected += list(np.interp(np.arange(PER_EPOCH), [0, PER_EPOCH], [at_epoch(epoch), at_epoch(epoch + 1)]))
    close(ours("piecewise", {"epochs": [0, 2, epochs], "factors": [1e-4, 1, 0]}, epochs=epochs), expected)


def test_piecewise_is_numpys_interpolation() -> None:
    points, factors = [0.5, 2.25, 6, 9], [0.1, 1.0, 0.3, 0.7]
    expected = BASE * np.interp(np.arange(TOTAL) / PER_EPOCH, points, factors)
    close(ours("piecewise", {"epochs": points, "factors": factors}), expected)
