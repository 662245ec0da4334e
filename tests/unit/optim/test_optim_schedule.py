"""Warm-up, cooldown and user factories, and problems found before a run starts. The curves: tests/parity."""

import math

import pytest
import torch
from timm.scheduler import CosineLRScheduler

from imagenet_cls.config.schema import OptimizerConfig, ScheduleConfig
from imagenet_cls.errors import ConfigError, Problem, UserError
from imagenet_cls.optim.schedule import build_schedule, scaled_lr, schedule_problems

BASE, PER_EPOCH, EPOCHS = 0.4, 7, 10
TOTAL = PER_EPOCH * EPOCHS


def rates(name: str, warmup_epochs: float = 0.0, factor: float = 0.01, **kwargs) -> list[float]:
    schedule = ScheduleConfig(name=name, warmup_epochs=warmup_epochs, warmup_start_factor=factor, kwargs=kwargs)
    learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
    return [learning_rate(step) for step in range(TOTAL)]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)


def close(a: list[float], b: list[float]) -> None:
    assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


def test_step_defaults_are_those_of_pytorch_examples() -> None:
    learning_rate = build_schedule(ScheduleConfig(name="step"), 0.1, 5, 90)
    assert [learning_rate(step) for step in (0, 149, 150, 449)] == pytest.approx([0.1, 0.1, 0.01, 0.001])


def test_constant() -> None:
    assert rates("constant") == [BASE] * TOTAL


def test_warmup_without_prefix_replaces_the_start_of_the_curve() -> None:
    schedule = ScheduleConfig("multistep", 2, 0.1, warmup_prefix=False, kwargs={"milestones_epochs": [1, 4]})
    learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
    line = [BASE * (0.1 + 0.9 * step / (2 * PER_EPOCH)) for step in range(2 * PER_EPOCH)]
    behind = [BASE * 0.1] * (2 * PER_EPOCH) + [BASE * 0.01] * (6 * PER_EPOCH)
    close([learning_rate(step) for step in range(TOTAL)], line + behind)


@pytest.mark.parametrize("warmup_epochs", [1 / 7, 2.5])
def test_warmup_of_fractional_epochs_equals_timms(warmup_epochs: float) -> None:
    warmup_steps = round(warmup_epochs * PER_EPOCH)
    settings = {"t_initial": TOTAL - warmup_steps, "lr_min": 0.02, "warmup_t": warmup_steps, "warmup_prefix": True}
    scheduler = CosineLRScheduler(sgd(), warmup_lr_init=BASE * 0.05, t_in_epochs=False, **settings)
    expected = []
    for step in range(TOTAL):
        scheduler.step_update(step)
        expected.append(scheduler.optimizer.param_groups[0]["lr"])
    close(rates("cosine", warmup_epochs, 0.05, min_lr=0.02), expected)


def test_curve_ends_one_step_after_the_last_and_stays() -> None:
    for name in ("cosine", "polynomial"):
        learning_rate = build_schedule(ScheduleConfig(name=name, kwargs={"min_lr": 0.02}), BASE, PER_EPOCH, EPOCHS)
        assert learning_rate(TOTAL - 1) > 0.02
        assert learning_rate(TOTAL) == learning_rate(TOTAL + 100) == pytest.approx(0.02)


def test_staircase_is_constant_in_the_cooldown() -> None:
    """Also if its next step would be at the start of the cooldown."""
    for name, kwargs in (("step", {"every_epochs": 4}), ("multistep", {"milestones_epochs": [4, 8]})):
        schedule = ScheduleConfig(name, cooldown_epochs=2, kwargs={"gamma": 0.5, **kwargs})
        learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
        expected = [BASE] * (4 * PER_EPOCH) + [BASE * 0.5] * (6 * PER_EPOCH)
        assert [learning_rate(step) for step in range(TOTAL)] == expected


def test_warmup_ends_at_the_first_value_of_the_curve() -> None:
    """With an absolute start too; and by epochs it need not be whole."""
    kwargs = {"epochs": [0, 4], "factors": [0.5, 0]}
    schedule = ScheduleConfig("piecewise", 2, warmup_start_lr=0.04, kwargs=kwargs)
    learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
    halves = [learning_rate(step * PER_EPOCH) for step in range(7)]
    assert halves == pytest.approx([0.04, 0.12, 0.2, 0.15, 0.1, 0.05, 0])
    schedule = ScheduleConfig("polynomial", 1.5, 0.1, by_epoch=True)
    learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
    rates = [learning_rate(step) / BASE for step in range(TOTAL)]
    by_epoch = [0.1, 0.7, *(1 - (epoch - 1.5) / 8.5 for epoch in range(2, EPOCHS))]
    assert rates == pytest.approx([rate for rate in by_epoch for _ in range(PER_EPOCH)])


def test_plateau_uses_evaluations_between_epochs_only() -> None:
    schedule = ScheduleConfig("plateau", cooldown_epochs=2, kwargs={"patience": 0, "gamma": 0.5})
    learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
    recorded = [(PER_EPOCH, 50.0), (PER_EPOCH + 1, 40.0), (2 * PER_EPOCH, 49.0), (9 * PER_EPOCH, 30.0)]
    steps = (0, PER_EPOCH + 1, 2 * PER_EPOCH - 1, 2 * PER_EPOCH, 9 * PER_EPOCH)
    assert [learning_rate(step, recorded) for step in steps] == [BASE, BASE, BASE, BASE / 2, BASE / 2]
    assert learning_rate.momentum(0) is None


def test_momentum_is_constant_during_warmup() -> None:
    kwargs = {"min_momentum": 0.8, "max_momentum": 0.9, "pct_start": 0.5}
    schedule = build_schedule(ScheduleConfig("one_cycle", 2, kwargs=kwargs), BASE, PER_EPOCH, EPOCHS)
    momenta = [schedule.momentum(step) for step in range(TOTAL)]
    assert set(momenta[: 2 * PER_EPOCH]) == {0.9}
    assert min(momenta) == pytest.approx(0.8)
    assert momenta[-1] == schedule.momentum(TOTAL + 5) == pytest.approx(0.9)


def test_warmup_longer_than_the_run() -> None:
    learning_rate = build_schedule(ScheduleConfig(warmup_epochs=2, warmup_start_factor=0.0), BASE, 5, 1)
    assert [learning_rate(step) for step in range(5)] == pytest.approx([BASE * step / 10 for step in range(5)])


def halving(base_lr, total_steps, steps_per_epoch, times):
    return lambda step: base_lr * 0.5 ** (times * step / total_steps)


def rising(base_lr, total_steps, steps_per_epoch):
    return lambda step: (step + 1) / (total_steps + 1)


def test_user_factory_by_epoch_and_with_cooldown() -> None:
    name, end = f"{__name__}:rising", TOTAL - 2 * PER_EPOCH
    mine = build_schedule(ScheduleConfig(name, cooldown_epochs=2), BASE, PER_EPOCH, EPOCHS)
    close([mine(step) for step in range(TOTAL)], [(min(step, end) + 1) / (end + 1) for step in range(TOTAL)])
    mine = build_schedule(ScheduleConfig(name, by_epoch=True), BASE, PER_EPOCH, EPOCHS)
    close([mine(step) for step in range(TOTAL)], [(step - step % PER_EPOCH + 1) / (TOTAL + 1) for step in range(TOTAL)])
    covered = ScheduleConfig(name, warmup_epochs=1, warmup_start_lr=0.0, warmup_prefix=False)
    mine = build_schedule(covered, BASE, PER_EPOCH, EPOCHS)
    close([mine(step) for step in (0, PER_EPOCH - 1, PER_EPOCH)], [0, BASE * 6 / 7, 8 / (TOTAL + 1)])


def constant_number(base_lr, total_steps, steps_per_epoch):
    return 0.1


def test_user_factory_and_its_problems() -> None:
    close(rates(f"{__name__}:halving", times=2), [BASE * 0.5 ** (2 * step / TOTAL) for step in range(TOTAL)])
    factors = [min(1, 0.5 + 0.5 * step / PER_EPOCH) for step in range(TOTAL)]  # counted from the run's start, like this
    multiplied = [factor * BASE * 0.5 ** (2 * step / TOTAL) for step, factor in enumerate(factors)]
    close(rates(f"{__name__}:halving", warmup_epochs=1, factor=0.5, times=2), multiplied)
    with pytest.raises(UserError, match="returned float"):
        rates(f"{__name__}:constant_number")
    assert schedule_problems(ScheduleConfig(name=f"{__name__}:halving", kwargs={"times": 2}), 100) == []
    assert "'times'" in only(f"{__name__}:halving")[1]
    assert only(f"{__name__}:constant_number", base_lr=3)[0] == "schedule.kwargs.base_lr"
    assert only(f"{__name__}:missing")[0] == "schedule.name"


def only(name: str, **kwargs) -> tuple[str, str]:
    (problem,) = schedule_problems(ScheduleConfig(name=name, kwargs=kwargs), 100)
    return problem.key, problem.message


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("cosine", {}),
        ("cosine", {"min_lr": 1e-5}),
        ("step", {}),
        ("multistep", {"milestones_epochs": [30, 60]}),
        ("polynomial", {"power": 0.5}),
        ("exponential", {"gamma": 0.97}),
        ("one_cycle", {"min_momentum": None}),
        ("one_cycle", {"min_momentum": 0.85, "max_momentum": 0.95, "anneal": "linear"}),
        ("piecewise", {"epochs": [0, 2, 16], "factors": [1e-4, 1, 0]}),
        ("plateau", {}),
        ("cosine", {"cycles": 3, "cycle_decay": 0.5}),
        ("step", {"every_epochs": 2.4, "gamma": 0.97}),
        ("constant", {}),
    ],
)
def test_valid_section_has_no_problem(name: str, kwargs: dict) -> None:
    assert schedule_problems(ScheduleConfig(name=name, kwargs=kwargs), 100) == []


def test_unknown_and_missing_arguments_are_problems() -> None:
    key, message = only("cosin")
    assert key == "schedule.name"
    assert "did you mean 'cosine'" in message
    key, message = only("cosine", lr_min=0.1)
    assert key == "schedule.kwargs.lr_min"
    assert "min_lr" in message
    assert "'gamma'" in only("exponential")[1]
    assert "'milestones_epochs'" in only("multistep")[1]
    assert only("cosine", span=3)[0] == "schedule.kwargs.span"


@pytest.mark.parametrize(
    ("name", "kwargs", "argument", "allowed"),
    [
        ("cosine", {"min_lr": "low"}, "min_lr", "at least 0"),
        ("cosine", {"min_lr": -0.1}, "min_lr", "at least 0"),
        ("cosine", {"cycles": 0}, "cycles", "a whole number, at least 1"),
        ("cosine", {"cycles": 1.5}, "cycles", "a whole number, at least 1"),
        ("cosine", {"cycle_decay": -1}, "cycle_decay", "at least 0"),
        ("step", {"every_epochs": 0}, "every_epochs", "more than 0"),
        ("step", {"every_epochs": True}, "every_epochs", "more than 0"),
        ("step", {"gamma": math.nan}, "gamma", "at least 0"),
        ("exponential", {"gamma": -0.9}, "gamma", "at least 0"),
        ("multistep", {"milestones_epochs": 30}, "milestones_epochs", "a list of different epochs"),
        ("multistep", {"milestones_epochs": []}, "milestones_epochs", "a list of different epochs"),
        ("multistep", {"milestones_epochs": [60, 30]}, "milestones_epochs", "ascending order"),
        ("one_cycle", {"pct_start": 1.1}, "pct_start", "0 to 1"),
        ("one_cycle", {"anneal": "cosine"}, "anneal", "cos, linear"),
        ("one_cycle", {"div_factor": 0}, "div_factor", "more than 0"),
        ("one_cycle", {"min_momentum": 0.85, "max_momentum": 1}, "max_momentum", "at least 0 and less than 1"),
        ("one_cycle", {"max_momentum": 0.95}, "min_momentum", "both momenta"),
        ("one_cycle", {"min_momentum": 0.9, "max_momentum": 0.8}, "min_momentum", "max_momentum 0.8"),
        ("piecewise", {"epochs": [0, 2, 2], "factors": [0, 1, 0]}, "epochs", "different epochs"),
        ("piecewise", {"epochs": [0, 2], "factors": [0, -1]}, "factors", "each at least 0"),
        ("piecewise", {"epochs": [0, 2], "factors": [0, 1, 0]}, "factors", "one for each"),
        ("plateau", {"patience": 2.5}, "patience", "a whole number, at least 0"),
        ("plateau", {"threshold": "small"}, "threshold", "at least 0"),
    ],
)
def test_bad_argument_is_a_problem(name: str, kwargs: dict, argument: str, allowed: str) -> None:
    key, message = only(name, **kwargs)
    assert key == f"schedule.kwargs.{argument}"
    assert allowed in message


def test_overflow_is_a_problem() -> None:
    assert only("exponential", gamma=1e9)[0] == "schedule.kwargs"


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("step", {"every_epochs": 0.001, "gamma": 1000}),
        ("step", {"every_epochs": 0.1, "gamma": 4}),
        ("cosine", {"cycles": 100, "cycle_decay": 1e10}),
        ("one_cycle", {"div_factor": 1e-9}),
        ("piecewise", {"epochs": [0, 0.9, 1], "factors": [0, 1e5, 0]}),
    ],
)
def test_too_high_rate_within_an_epoch_is_a_problem(name: str, kwargs: dict) -> None:
    """Not visible at whole epochs. Found before the number of steps is known, and again when it is."""
    schedule = ScheduleConfig(name=name, kwargs=kwargs)
    (problem,) = schedule_problems(schedule, 1)
    assert problem.key == "schedule.kwargs" and next(iter(kwargs)) in problem.message
    with pytest.raises(ConfigError, match=r"schedule\.kwargs: .*(allowed are 0 to|can't be computed)"):
        build_schedule(schedule, BASE, 1000, 1)


def test_learning_rate_range_test_is_allowed() -> None:
    assert schedule_problems(ScheduleConfig(name="exponential", kwargs={"gamma": 10}), 9, 1e-7) == []
    assert schedule_problems(ScheduleConfig(name="constant"), 9, 1e6) == []


def test_rate_above_the_highest_is_a_problem() -> None:
    (problem,) = schedule_problems(ScheduleConfig(kwargs={"min_lr": 0.02}), 9, 0.01)
    assert problem.key == "schedule.kwargs.min_lr" and "0.02 is more than the learning rate 0.01" in problem.message
    (problem,) = schedule_problems(ScheduleConfig(warmup_epochs=1, warmup_start_lr=0.5), 9, 0.25)
    assert problem.key == "schedule.warmup_start_lr" and "0.5 is more than the learning rate 0.25" in problem.message
    level = ScheduleConfig(warmup_epochs=1, warmup_start_lr=0.25, kwargs={"min_lr": 0.25})
    assert schedule_problems(level, 9, 0.25) == []


@pytest.mark.parametrize(
    ("name", "key", "kwargs"),
    [
        ("multistep", "milestones_epochs", {"milestones_epochs": [30, 60]}),
        ("piecewise", "epochs", {"epochs": [0, 2, 60], "factors": [0, 1, 0]}),
    ],
)
def test_schedule_longer_than_the_run_is_a_problem(name: str, key: str, kwargs: dict) -> None:
    def problems(epochs: int, **more) -> list[Problem]:
        return schedule_problems(ScheduleConfig(name=name, kwargs=kwargs, **more), epochs)

    assert problems(60) == problems(66, warmup_epochs=4, cooldown_epochs=2) == []
    assert problems(60, warmup_epochs=5, warmup_prefix=False) == []
    (beyond,) = problems(59)
    assert beyond.key == f"schedule.kwargs.{key}"
    assert "60 is after the end of the run: 59 epochs" in beyond.message
    (beyond,) = problems(65, warmup_epochs=4, cooldown_epochs=2)
    assert "59 epochs without warm-up and cooldown" in beyond.message


@pytest.mark.parametrize(
    ("lr", "base", "batch", "scaling", "expected", "line"),
    [
        (0.1, None, 1024, "linear", 0.1, None),
        (0.1, 256, 256, "sqrt", 0.1, None),
        (0.1, 256, 1024, "linear", 0.4, "lr 0.1 for 256 images, scaled linearly x 4 to 0.4 for 1024"),
        (5e-4, 512, 1024, "linear", 1e-3, "lr 0.0005 for 512 images, scaled linearly x 2 to 0.001 for 1024"),  # DeiT's
        (5e-3, 2048, 512, "sqrt", 2.5e-3, "lr 0.005 for 2048 images, scaled by the root x 0.5 to 0.0025 for 512"),
        (0.1, 3, 1, "linear", 0.1 / 3, "lr 0.1 for 3 images, scaled linearly x 0.3333 to 0.03333 for 1"),
    ],
)
def test_scaled_lr(lr: float, base: int | None, batch: int, scaling: str, expected: float, line: str | None) -> None:
    found, sentence = scaled_lr(OptimizerConfig(lr=lr, lr_base_batch=base, lr_scaling=scaling), batch)  # type: ignore[arg-type]
    assert found == pytest.approx(expected, rel=1e-12)
    assert sentence == line
