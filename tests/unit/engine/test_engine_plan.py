"""From a global batch to micro-batches, against counting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import AugmentConfig, Config, ParallelConfig, TrainConfig
from imagenet_cls.engine.plan import (
    Plan,
    batch_problem,
    describe_batch_sizes,
    due_after,
    micro_batch_for,
    part_sizes,
    plan_run,
)
from imagenet_cls.errors import DataError

shares = st.integers(1, 120)
world_sizes = st.integers(1, 9)
limits = st.none() | st.integers(1, 150)


@given(shares, world_sizes, limits)
def test_equal_micro_batches_largest_divisor_that_fits(
    share: int, world_size: int, limit: int | None
) -> None:
    fitting = [
        size
        for size in range(1, share + 1)
        if share % size == 0 and (limit is None or size <= limit)
    ]
    assert micro_batch_for(share * world_size, world_size, limit, equal=True) == fitting[-1]


@given(
    shares,
    world_sizes,
    limits,
    st.integers(1, 5000),
    st.integers(1, 4),
    st.none() | st.integers(1, 50),
)
def test_plan_counts_steps_of_whole_batches(
    share: int, world_size: int, limit: int | None, images: int, epochs: int, max_steps: int | None
) -> None:
    batch = share * world_size
    train = TrainConfig(
        epochs=epochs, global_batch_size=batch, micro_batch_size=limit, max_steps=max_steps
    )
    if images < batch:
        with pytest.raises(DataError, match=r"train\.global_batch_size"):
            plan_run(train, images, world_size)
        return
    plan = plan_run(train, images, world_size)
    assert plan.global_batch == batch
    assert plan.steps_per_epoch * batch <= images < (plan.steps_per_epoch + 1) * batch
    whole = plan.steps_per_epoch * epochs
    assert plan.total_steps == (whole if max_steps is None else min(whole, max_steps))


@given(st.integers(2, 3000), st.integers(2, 30), limits)
def test_plan_has_the_fewest_micro_batches(batch: int, world_size: int, limit: int | None) -> None:
    train = TrainConfig(global_batch_size=batch, micro_batch_size=limit)
    if batch_problem(train, world_size):
        assert batch % world_size != 0 and (batch < world_size or limit == 1)
        return
    plan = plan_run(train, batch, world_size)
    passes = world_size * plan.accumulation
    assert plan.forward_passes == passes <= batch  # none is empty
    groups = [len(range(group, batch, passes)) for group in range(passes)]
    assert sorted(set(groups)) == part_sizes(batch, passes) and max(
        groups
    ) == plan.device_micro_batch <= (limit or batch)
    assert plan.accumulation == 1 or -(-batch // (passes - world_size)) > (limit or batch)


@given(st.integers(1, 300), st.integers(1, 40))
def test_batch_problem_names_nearest_divisors(batch: int, world_size: int) -> None:
    problem = batch_problem(TrainConfig(global_batch_size=batch), world_size, uneven=False)
    below = batch // world_size * world_size
    if below == batch:
        assert problem is None
        return
    assert problem.key == "train.global_batch_size"
    nearest = [below, below + world_size] if below else [world_size]
    assert problem.message.endswith(" or ".join(map(str, nearest)))


def config_with(*overrides: str) -> Config:
    return load_config(None, overrides).config


def steps_due(name: str, config: Config, stopped_early: int = 0) -> list[int]:
    """The steps after which `name` is due, of epochs with 10 steps."""
    plan = Plan(1, 32, 1, 32, steps_per_epoch=10, epochs=9, total_steps=25)
    steps = range(1, 26)
    due = {step: due_after(step, plan, config, step == stopped_early) for step in steps}
    return [step for step in steps if getattr(due[step], name)]


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("end_of_epoch", [], [10, 20]),
        ("log", ["log.every_steps=8"], [8, 16, 24]),
        ("regular_evaluation", ["eval.every_epochs=2"], [20]),
        ("evaluation", ["eval.every_epochs=2"], [20, 25]),
        ("save", ["checkpoint.every_epochs=2"], [20, 25]),
        ("save", ["checkpoint.every_steps=10", "checkpoint.every_epochs=null"], [10, 20, 25]),
        ("save", ["checkpoint.every_steps=12", "checkpoint.every_epochs=1"], [10, 12, 20, 24, 25]),
    ],
)
def test_what_is_due_after_a_step(name: str, overrides: list[str], expected: list[int]) -> None:
    assert steps_due(name, config_with(*overrides)) == expected


@pytest.mark.parametrize("name", ["end", "save", "evaluation"])
def test_an_early_stop_is_the_end_of_the_run(name: str) -> None:
    assert 13 in steps_due(name, config_with(), stopped_early=13)


@pytest.mark.parametrize(
    ("mode", "devices", "images"), [("dp", 1, 12), ("dp", 2, 3), ("ddp", 1, 12)]
)
def test_stated_batch_of_a_device_is_the_one_that_runs(
    mode: str, devices: int, images: int
) -> None:
    """With three splits; 10 images in micro-batches of at most 4, of equal size on two devices."""
    train = TrainConfig(global_batch_size=10, micro_batch_size=4)
    config = Config(
        train=train, augment=AugmentConfig(splits=3), parallel=ParallelConfig(mode=mode)
    )
    plan = plan_run(train, 10, 1, devices)
    assert 3 * plan.device_micro_batch == images
    assert describe_batch_sizes(config, 1, devices).startswith(f"{images} images ")
