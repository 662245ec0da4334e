"""Warm-up, cooldown and user factories, and problems found before a run starts. The curves:
tests/parity.
"""

import math

import pytest
import torch

from imagenet_cls.config.schema import OptimizerConfig, ScheduleConfig
from imagenet_cls.errors import ConfigError, UserError
from imagenet_cls.optim.schedule import Schedule, build_schedule, scaled_lr, schedule_problems

BASE, PER_EPOCH, EPOCHS = 0.4, 7, 10
TOTAL = PER_EPOCH * EPOCHS


def built(name: str, kwargs: dict | None = None, **settings) -> Schedule:
    return build_schedule(
        ScheduleConfig(name, kwargs=kwargs or {}, **settings), BASE, PER_EPOCH, EPOCHS
    )


def rates(schedule: Schedule) -> list[float]:
    return [schedule(step) for step in range(TOTAL)]


def test_step_defaults_are_those_of_pytorch_examples() -> None:
    ours = build_schedule(ScheduleConfig(name="step"), 0.1, 5, 90)
    assert [ours(step) for step in (0, 149, 150, 449)] == pytest.approx([0.1, 0.1, 0.01, 0.001])


@pytest.mark.parametrize(
    ("name", "kwargs", "by_epoch"),
    [("step", {"every_epochs": 4}, False), ("multistep", {"milestones_epochs": [4, 8]}, True)],
)
def test_staircase_in_the_cooldown_is_constant(name: str, kwargs: dict, by_epoch: bool) -> None:
    """Also if its next step would be at the start of the cooldown."""
    ours = built(name, {"gamma": 0.5, **kwargs}, cooldown_epochs=2, by_epoch=by_epoch)
    assert rates(ours) == [BASE] * (4 * PER_EPOCH) + [BASE * 0.5] * (6 * PER_EPOCH)


def test_warmup_ends_at_the_first_value_of_the_curve() -> None:
    """With an absolute start too; and by epochs it need not be whole."""
    kwargs = {"epochs": [0, 4], "factors": [0.5, 0]}
    ours = built("piecewise", kwargs, warmup_epochs=2, warmup_start_lr=0.04)
    by_epoch = [ours(epoch * PER_EPOCH) for epoch in range(7)]
    assert by_epoch == pytest.approx([0.04, 0.12, 0.2, 0.15, 0.1, 0.05, 0])
    ours = built("polynomial", warmup_epochs=1.5, warmup_start_factor=0.1, by_epoch=True)
    factors = [0.1, 0.7, *(1 - (epoch - 1.5) / 8.5 for epoch in range(2, EPOCHS))]
    expected = [BASE * factor for factor in factors for _ in range(PER_EPOCH)]
    assert rates(ours) == pytest.approx(expected)


def halving(base_lr, total_steps, steps_per_epoch, times):
    return lambda step: base_lr * 0.5 ** (times * step / total_steps)


def listed(base_lr, total_steps, steps_per_epoch, rates):
    return rates.__getitem__


def constant_number(base_lr, total_steps, steps_per_epoch):
    return 0.1


def test_user_factory_is_called_with_steps() -> None:
    """Counted from the run's start, before the cooldown; the warm-up multiplies, or replaces its
    beginning.
    """
    name, kwargs, steps = f"{__name__}:halving", {"times": 2}, range(TOTAL)
    assert problem_keys(name, kwargs) == []

    def rate(step: int, total_steps: int = TOTAL) -> float:
        return BASE * 0.5 ** (2 * step / total_steps)

    end = TOTAL - 2 * PER_EPOCH
    cooled = rates(built(name, kwargs, cooldown_epochs=2))
    assert cooled == pytest.approx([rate(min(step, end), end) for step in steps])
    by_epoch = rates(built(name, kwargs, by_epoch=True))
    assert by_epoch == pytest.approx([rate(step - step % PER_EPOCH) for step in steps])
    warmed = rates(built(name, kwargs, warmup_epochs=1, warmup_start_factor=0.5))
    factors = [min(1, 0.5 + 0.5 * step / PER_EPOCH) for step in steps]
    assert warmed == pytest.approx([rate(step) * factors[step] for step in steps])
    ours = built(name, kwargs, warmup_epochs=1, warmup_start_lr=0.0, warmup_prefix=False)
    assert [ours(0), ours(6), ours(7)] == pytest.approx([0, BASE * 6 / 7, rate(7)])
    with pytest.raises(UserError, match="returned float"):
        built(f"{__name__}:constant_number")


@pytest.mark.parametrize("rate", [None, math.nan, -0.1, [0.1], torch.tensor(0.1), True])
def test_user_schedule_without_a_rate_is_an_error(rate: object) -> None:
    """At step 0 when it is built, so that a dry run shows it."""
    schedule = built(f"{__name__}:listed", {"rates": [0.1, rate]})
    assert schedule(0) == 0.1
    with pytest.raises(ConfigError, match=r"^schedule\.name: "):
        schedule(1)
    with pytest.raises(ConfigError, match=r"^schedule\.name: "):
        built(f"{__name__}:listed", {"rates": [rate]})


def problem_keys(name: str, kwargs: dict | None = None, epochs: int = 100, **settings) -> list[str]:
    problems = schedule_problems(ScheduleConfig(name, kwargs=kwargs or {}, **settings), epochs)
    return [problem.key.removeprefix("schedule.").removeprefix("kwargs.") for problem in problems]


@pytest.mark.parametrize(
    ("name", "kwargs", "key"),
    [
        (f"{__name__}:halving", {}, "kwargs"),
        (f"{__name__}:constant_number", {"base_lr": 3}, "base_lr"),
        ("multistep", {}, "kwargs"),
        ("cosine", {"min_lr": -0.1}, "min_lr"),
        ("step", {"every_epochs": 1e-310}, "every_epochs"),
        ("multistep", {"milestones_epochs": 30}, "milestones_epochs"),
        ("multistep", {"milestones_epochs": [60, 30]}, "milestones_epochs"),
        ("piecewise", {"epochs": [0, 2], "factors": [0, -1]}, "factors"),
        ("piecewise", {"epochs": [0, 2], "factors": [0, 1, 0]}, "factors"),
        ("polynomial", {"power": "two"}, "power"),
    ],
)
def test_bad_section_is_a_problem(name: str, kwargs: dict, key: str) -> None:
    assert problem_keys(name, kwargs) == [key]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("multistep", {"milestones_epochs": [30, 60]}),
        ("piecewise", {"epochs": [0, 2, 60], "factors": [0, 1, 0]}),
    ],
)
def test_schedule_longer_than_the_run_is_a_problem(name: str, kwargs: dict) -> None:
    around = {"warmup_epochs": 4, "cooldown_epochs": 2}
    inside = {"warmup_epochs": 5, "warmup_prefix": False}
    for epochs, settings in ((60, {}), (66, around), (60, inside)):
        assert problem_keys(name, kwargs, epochs, **settings) == []
        assert problem_keys(name, kwargs, epochs - 1, **settings) == [next(iter(kwargs))]


@pytest.mark.parametrize(
    ("lr", "base", "batch", "expected"),
    [(0.1, None, 1024, 0.1), (0.1, 256, 256, 0.1), (5e-4, 512, 1024, 1e-3)],  # the last is DeiT's
)
def test_lr_scales_with_the_batch(lr: float, base: int | None, batch: int, expected: float) -> None:
    found, sentence = scaled_lr(OptimizerConfig(lr=lr, lr_base_batch=base), batch)
    assert found == pytest.approx(expected, rel=1e-12)
    assert (sentence is None) == (found == lr)
