"""Every step of every schedule against torch's and timm's schedulers, and slips told before a run starts."""

import math

import pytest
import torch
from timm.scheduler import CosineLRScheduler, PolyLRScheduler
from torch.optim import lr_scheduler

from imagenet_cls.config.schema import ScheduleConfig
from imagenet_cls.errors import ConfigError, Problem, UserError
from imagenet_cls.optim.schedule import build_schedule, schedule_problems

BASE, PER_EPOCH, EPOCHS = 0.4, 7, 10
TOTAL = PER_EPOCH * EPOCHS


def rates(name: str, warmup_epochs: float = 0.0, factor: float = 0.01, **kwargs) -> list[float]:
    schedule = ScheduleConfig(name=name, warmup_epochs=warmup_epochs, warmup_start_factor=factor, kwargs=kwargs)
    learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
    return [learning_rate(step) for step in range(TOTAL)]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)


def torchs(make, per_epoch: bool = False) -> list[float]:
    """The rate at every step of a torch scheduler that is stepped after each step, or after each epoch."""
    optimizer = sgd()
    scheduler = make(optimizer)
    result = []
    for step in range(TOTAL):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if not per_epoch or (step + 1) % PER_EPOCH == 0:
            scheduler.step()
    return result


def close(a: list[float], b: list[float]) -> None:
    assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


def test_cosine() -> None:
    close(rates("cosine", min_lr=0.02), torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL, eta_min=0.02)))


def test_step() -> None:
    expected = torchs(lambda o: lr_scheduler.StepLR(o, 3, gamma=0.2), per_epoch=True)
    close(rates("step", every_epochs=3, gamma=0.2), expected)


def test_step_defaults_are_pytorch_examples() -> None:
    learning_rate = build_schedule(ScheduleConfig(name="step"), 0.1, 5, 90)
    assert [learning_rate(step) for step in (0, 149, 150, 449)] == pytest.approx([0.1, 0.1, 0.01, 0.001])


def test_multistep() -> None:
    expected = torchs(lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 9], gamma=0.3), per_epoch=True)
    close(rates("multistep", milestones_epochs=[2, 5, 9], gamma=0.3), expected)


def test_exponential() -> None:
    expected = torchs(lambda o: lr_scheduler.ExponentialLR(o, 0.9), per_epoch=True)
    close(rates("exponential", gamma=0.9), expected)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_polynomial(power: float) -> None:
    close(rates("polynomial", power=power), torchs(lambda o: lr_scheduler.PolynomialLR(o, TOTAL, power)))


def test_constant() -> None:
    assert rates("constant") == [BASE] * TOTAL


def test_warmup_equals_torchs_linear() -> None:
    expected = torchs(lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=2 * PER_EPOCH))
    close(rates("constant", warmup_epochs=2, factor=0.1), expected)


def test_a_schedule_starts_behind_its_warmup() -> None:
    """Milestones too: torchvision's SequentialLR."""

    def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
        linear = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2 * PER_EPOCH)
        milestones = lr_scheduler.MultiStepLR(optimizer, [PER_EPOCH, 4 * PER_EPOCH], gamma=0.3)
        return lr_scheduler.SequentialLR(optimizer, [linear, milestones], [2 * PER_EPOCH])

    close(rates("multistep", warmup_epochs=2, factor=0.1, milestones_epochs=[1, 4], gamma=0.3), torchs(sequential))


def test_or_with_the_run_and_the_warmup_covers_its_beginning() -> None:
    schedule = ScheduleConfig("multistep", 2, 0.1, warmup_prefix=False, kwargs={"milestones_epochs": [1, 4]})
    learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
    line = [BASE * (0.1 + 0.9 * step / (2 * PER_EPOCH)) for step in range(2 * PER_EPOCH)]
    behind = [BASE * 0.1] * (2 * PER_EPOCH) + [BASE * 0.01] * (6 * PER_EPOCH)
    close([learning_rate(step) for step in range(TOTAL)], line + behind)


@pytest.mark.parametrize("warmup_epochs", [0, 3, 1 / 7, 2.5])
def test_cosine_and_polynomial_with_warmup_equal_timms(warmup_epochs: float) -> None:
    warmup_steps = round(warmup_epochs * PER_EPOCH)
    shared = {"t_initial": TOTAL - warmup_steps, "lr_min": 0.02, "warmup_t": warmup_steps, "warmup_prefix": True}
    shared |= {"warmup_lr_init": BASE * 0.05, "t_in_epochs": False}
    theirs = {"cosine": CosineLRScheduler(sgd(), **shared), "polynomial": PolyLRScheduler(sgd(), power=2.0, **shared)}
    ours = {
        "cosine": rates("cosine", warmup_epochs, 0.05, min_lr=0.02),
        "polynomial": rates("polynomial", warmup_epochs, 0.05, min_lr=0.02, power=2.0),
    }
    for name, scheduler in theirs.items():
        expected = []
        for step in range(TOTAL):
            scheduler.step_update(step)
            expected.append(scheduler.optimizer.param_groups[0]["lr"])
        close(ours[name], expected)


def test_the_end_is_one_after_the_last_step_and_stays() -> None:
    for name in ("cosine", "polynomial"):
        learning_rate = build_schedule(ScheduleConfig(name=name, kwargs={"min_lr": 0.02}), BASE, PER_EPOCH, EPOCHS)
        assert learning_rate(TOTAL - 1) > 0.02
        assert learning_rate(TOTAL) == learning_rate(TOTAL + 100) == pytest.approx(0.02)


def test_a_staircase_stands_still_in_the_cooldown() -> None:
    """Also where its next step would fall on the cooldown's beginning."""
    for name, kwargs in (("step", {"every_epochs": 4}), ("multistep", {"milestones_epochs": [4, 8]})):
        schedule = ScheduleConfig(name, cooldown_epochs=2, kwargs={"gamma": 0.5, **kwargs})
        learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
        expected = [BASE] * (4 * PER_EPOCH) + [BASE * 0.5] * (6 * PER_EPOCH)
        assert [learning_rate(step) for step in range(TOTAL)] == expected


def test_a_warmup_ends_where_the_schedule_starts() -> None:
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


def test_a_plateau_regards_evaluations_between_epochs_only() -> None:
    schedule = ScheduleConfig("plateau", cooldown_epochs=2, kwargs={"patience": 0, "gamma": 0.5})
    learning_rate = build_schedule(schedule, BASE, PER_EPOCH, EPOCHS)
    recorded = [(PER_EPOCH, 50.0), (PER_EPOCH + 1, 40.0), (2 * PER_EPOCH, 49.0), (9 * PER_EPOCH, 30.0)]
    steps = (0, PER_EPOCH + 1, 2 * PER_EPOCH - 1, 2 * PER_EPOCH, 9 * PER_EPOCH)
    assert [learning_rate(step, recorded) for step in steps] == [BASE, BASE, BASE, BASE / 2, BASE / 2]
    assert learning_rate.momentum(0) is None


def test_the_momentum_waits_for_the_warmup() -> None:
    kwargs = {"min_momentum": 0.8, "max_momentum": 0.9, "pct_start": 0.5}
    schedule = build_schedule(ScheduleConfig("one_cycle", 2, kwargs=kwargs), BASE, PER_EPOCH, EPOCHS)
    momenta = [schedule.momentum(step) for step in range(TOTAL)]
    assert set(momenta[: 2 * PER_EPOCH]) == {0.9}
    assert min(momenta) == pytest.approx(0.8)
    assert momenta[-1] == schedule.momentum(TOTAL + 5) == pytest.approx(0.9)


def test_a_warmup_that_never_ends() -> None:
    learning_rate = build_schedule(ScheduleConfig(warmup_epochs=2, warmup_start_factor=0.0), BASE, 5, 1)
    assert [learning_rate(step) for step in range(5)] == pytest.approx([BASE * step / 10 for step in range(5)])


def own_halving(base_lr, total_steps, steps_per_epoch, times):
    return lambda step: base_lr * 0.5 ** (times * step / total_steps)


def own_step(base_lr, total_steps, steps_per_epoch):
    return lambda step: (step + 1) / (total_steps + 1)


def test_own_factories_by_epoch_and_with_cooldown() -> None:
    name, end = f"{__name__}:own_step", TOTAL - 2 * PER_EPOCH
    mine = build_schedule(ScheduleConfig(name, cooldown_epochs=2), BASE, PER_EPOCH, EPOCHS)
    close([mine(step) for step in range(TOTAL)], [(min(step, end) + 1) / (end + 1) for step in range(TOTAL)])
    mine = build_schedule(ScheduleConfig(name, by_epoch=True), BASE, PER_EPOCH, EPOCHS)
    close([mine(step) for step in range(TOTAL)], [(step - step % PER_EPOCH + 1) / (TOTAL + 1) for step in range(TOTAL)])
    covered = ScheduleConfig(name, warmup_epochs=1, warmup_start_lr=0.0, warmup_prefix=False)
    mine = build_schedule(covered, BASE, PER_EPOCH, EPOCHS)
    close([mine(step) for step in (0, PER_EPOCH - 1, PER_EPOCH)], [0, BASE * 6 / 7, 8 / (TOTAL + 1)])


def own_number(base_lr, total_steps, steps_per_epoch):
    return 0.1


def test_own_factories() -> None:
    close(rates(f"{__name__}:own_halving", times=2), [BASE * 0.5 ** (2 * step / TOTAL) for step in range(TOTAL)])
    factors = [min(1, 0.5 + 0.5 * step / PER_EPOCH) for step in range(TOTAL)]  # counted from the run's start, like this
    multiplied = [factor * BASE * 0.5 ** (2 * step / TOTAL) for step, factor in enumerate(factors)]
    close(rates(f"{__name__}:own_halving", warmup_epochs=1, factor=0.5, times=2), multiplied)
    with pytest.raises(UserError, match="returned float"):
        rates(f"{__name__}:own_number")
    assert schedule_problems(ScheduleConfig(name=f"{__name__}:own_halving", kwargs={"times": 2}), 100) == []
    assert "'times'" in only(f"{__name__}:own_halving")[1]
    assert only(f"{__name__}:own_number", base_lr=3)[0] == "schedule.kwargs.base_lr"
    assert only(f"{__name__}:own_nothing")[0] == "schedule.name"


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
def test_good_sections_pass(name: str, kwargs: dict) -> None:
    assert schedule_problems(ScheduleConfig(name=name, kwargs=kwargs), 100) == []


def test_slips() -> None:
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
        ("multistep", {"milestones_epochs": [60, 30]}, "milestones_epochs", "the smallest first"),
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
def test_values_that_give_no_learning_rate(name: str, kwargs: dict, argument: str, allowed: str) -> None:
    key, message = only(name, **kwargs)
    assert key == f"schedule.kwargs.{argument}"
    assert allowed in message


def test_numbers_that_grow_beyond_all_numbers() -> None:
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
def test_numbers_that_grow_absurd_within_an_epoch(name: str, kwargs: dict) -> None:
    """At whole epochs nothing of it shows. Found before the number of steps is known, and once more when it is."""
    schedule = ScheduleConfig(name=name, kwargs=kwargs)
    (problem,) = schedule_problems(schedule, 1)
    assert problem.key == "schedule.kwargs" and next(iter(kwargs)) in problem.message
    with pytest.raises(ConfigError, match=r"schedule\.kwargs: .*(from 0 to|can't work with)"):
        build_schedule(schedule, BASE, 1000, 1)


def test_a_range_test_of_the_learning_rate_is_not_absurd() -> None:
    assert schedule_problems(ScheduleConfig(name="exponential", kwargs={"gamma": 10}), 9, 1e-7) == []
    assert schedule_problems(ScheduleConfig(name="constant"), 9, 1e6) == []


def test_rates_above_the_runs_own() -> None:
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
def test_a_schedule_longer_than_the_run(name: str, key: str, kwargs: dict) -> None:
    def problems(epochs: int, **more) -> list[Problem]:
        return schedule_problems(ScheduleConfig(name=name, kwargs=kwargs, **more), epochs)

    assert problems(60) == problems(66, warmup_epochs=4, cooldown_epochs=2) == []
    assert problems(60, warmup_epochs=5, warmup_prefix=False) == []
    (beyond,) = problems(59)
    assert beyond.key == f"schedule.kwargs.{key}"
    assert "60 is beyond the run, which has 59 epochs" in beyond.message
    (beyond,) = problems(65, warmup_epochs=4, cooldown_epochs=2)
    assert "59 epochs without warm-up and cooldown" in beyond.message
