"""Steps whose loss or gradient is not finite: what is reported, and when they end a run."""

import math
from typing import Any

import pytest
import torch
from helpers import single_rank

from imagenet_cls.errors import NonFiniteError
from imagenet_cls.guards.nonfinite import NonFiniteGuard, check_finite_weights

ALONE = single_rank()
NAN, OVERFLOW = (math.nan, True), (1.0, True)


def records(*steps: tuple[float, bool], first_step: int = 1) -> list[dict[str, Any]]:
    """As `Meter.flush` returns them, of steps given as (loss, skipped)."""
    return [
        {"step": step, "loss": loss, "lr": 0.1} | ({"skipped": True} if skipped else {})
        for step, (loss, skipped) in enumerate(steps, first_step)
    ]


def check(guard: NonFiniteGuard, rows: list[dict[str, Any]]) -> None:
    guard.check(rows, torch.tensor([row["loss"] for row in rows]))


def test_steps_in_a_row_over_two_intervals_end_the_run() -> None:
    guard = NonFiniteGuard(
        ALONE, 3, samples_of=lambda step: [f"image{step}{letter}" for letter in "abcd"]
    )
    check(guard, records(NAN, NAN, (1.0, False), NAN, NAN))
    with pytest.raises(NonFiniteError) as error:
        check(guard, records(NAN, first_step=6))
    lines = str(error.value).splitlines()
    assert error.value.exit_code == 6 and len(lines) == 3
    assert "in 3 steps in a row, the last one step 6 (loss nan, lr 0.1)" in lines[0]
    assert (
        "the loss on rank 0 of 1, from image6a, image6b, image6c, ... (logs/rank0.log has all)"
        in lines[1]
    )


def test_last_step_finite_follows_the_last_record() -> None:
    guard = NonFiniteGuard(ALONE, 10)
    for rows, expected in ((records(NAN), False), ([], False), (records(NAN, (1.0, False)), True)):
        check(guard, rows)
        assert guard.last_step_finite is expected


def test_fp16_overflow_is_normal_but_nan_is_not() -> None:
    guard = NonFiniteGuard(ALONE, 2, fp16=True)
    overflows = records(*[OVERFLOW] * 20)
    assert guard.count_and_describe(overflows) is None
    check(guard, [*overflows, *records((1.0, False), first_step=21)])
    assert guard.last_step_finite
    with pytest.raises(NonFiniteError, match="in 2 steps in a row"):
        check(guard, records(NAN, NAN, first_step=22))


@pytest.mark.parametrize(
    ("fp16", "steps"), [(True, [OVERFLOW] * 52), (False, [(math.inf, False)] * 2)]
)
def test_endless_overflow_or_infinite_loss_ends_the_run(
    fp16: bool, steps: list[tuple[float, bool]]
) -> None:
    guard = NonFiniteGuard(ALONE, 2, fp16=fp16)
    check(guard, records(*steps[:-1]))
    with pytest.raises(NonFiniteError):
        check(guard, records(steps[-1], first_step=len(steps)))


def test_check_finite_weights_ignores_frozen_ones() -> None:
    model = torch.nn.Linear(2, 2)
    check_finite_weights(model, 1, ALONE)
    with torch.no_grad():
        model.bias[0] = math.inf
    with pytest.raises(NonFiniteError, match="after step 1"):
        check_finite_weights(model, 1, ALONE)
    check_finite_weights(model.requires_grad_(False), 1, ALONE)
