"""From a global batch to micro-batches, against counting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagenet_cls.config.schema import TrainConfig
from imagenet_cls.engine.plan import Plan, accumulation_for, batch_problem, plan_run
from imagenet_cls.errors import DataError

shares = st.integers(1, 120)
world_sizes = st.integers(1, 9)
limits = st.none() | st.integers(1, 150)


@given(shares, world_sizes, limits)
def test_accumulation_smallest_divisor_that_fits(share: int, world_size: int, limit: int | None) -> None:
    global_batch = share * world_size
    found = accumulation_for(global_batch, world_size, limit)
    fitting = [
        k
        for k in range(1, global_batch + 1)
        if global_batch % (world_size * k) == 0 and (limit is None or global_batch / (world_size * k) <= limit)
    ]
    assert found == fitting[0]


@given(shares, world_sizes, limits, st.integers(1, 5000), st.integers(1, 4), st.none() | st.integers(1, 50))
def test_plan_counts_multiply_to_global_batch(
    share: int, world_size: int, limit: int | None, images: int, epochs: int, max_steps: int | None
) -> None:
    batch = share * world_size
    train = TrainConfig(epochs=epochs, global_batch_size=batch, micro_batch_size=limit, max_steps=max_steps)
    if images < batch:
        with pytest.raises(DataError, match=f"at most {images}"):
            plan_run(train, images, world_size)
        return
    plan = plan_run(train, images, world_size)
    assert plan.world_size * plan.accumulation * plan.micro_batch == plan.global_batch == batch
    assert plan.share == share == plan.accumulation * plan.micro_batch
    assert limit is None or plan.micro_batch <= limit
    assert plan.steps_per_epoch * batch <= images < (plan.steps_per_epoch + 1) * batch
    whole = plan.steps_per_epoch * epochs
    assert plan.total_steps == (whole if max_steps is None else min(whole, max_steps))


@given(st.integers(1, 300), st.integers(1, 40))
def test_batch_problem_names_nearest_divisors(batch: int, world_size: int) -> None:
    problem = batch_problem(TrainConfig(global_batch_size=batch), world_size)
    if batch % world_size == 0:
        assert problem is None
        return
    assert problem is not None and problem.key == "train.global_batch_size"
    multiples = range(world_size, batch + world_size + 1, world_size)
    below = [m for m in multiples if m < batch][-1:]
    above = next(m for m in multiples if m > batch)
    assert problem.message.endswith("nearest that do: " + " or ".join(map(str, [*below, above])))


def test_plan_equality_by_value() -> None:
    train = TrainConfig(epochs=2, global_batch_size=6, micro_batch_size=2)
    assert plan_run(train, 20, 1) == Plan(1, 6, 3, 2, 3, 2, 6)
