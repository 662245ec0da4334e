"""Steps whose loss or gradient is not finite: what is reported, and when they end a run."""

import math
from typing import Any

import pytest
import torch
from helpers import single_rank

from imagenet_cls.errors import NonFiniteError
from imagenet_cls.guards.nonfinite import NonFiniteGuard, check_finite_weights

ALONE = single_rank()
# (loss, skipped) of a step.
FINE, INFINITE, NAN, OVERFLOW = (1.0, False), (math.inf, False), (math.nan, True), (1.0, True)


def records(*steps: tuple[float, bool], first_step: int = 1) -> list[dict[str, Any]]:
    """As `Meter.flush` returns them, of steps given as (loss, skipped)."""
    return [
        {"step": step, "loss": loss, "lr": 0.1} | ({"skipped": True} if skipped else {})
        for step, (loss, skipped) in enumerate(steps, first_step)
    ]


def check(guard: NonFiniteGuard, rows: list[dict[str, Any]]) -> None:
    guard.check(rows, torch.tensor([row["loss"] for row in rows]))


@pytest.mark.parametrize(
    ("fp16", "max_steps", "steps"),
    [
        (False, 3, [NAN, NAN, FINE, NAN, NAN, NAN]),
        (False, 2, [INFINITE] * 2),
        (True, 2, [OVERFLOW] * 20 + [FINE] + [NAN] * 2),
        (True, 2, [OVERFLOW] * 52),
    ],
)
def test_steps_in_a_row_over_two_intervals_end_the_run(
    fp16: bool, max_steps: int, steps: list[tuple[float, bool]]
) -> None:
    guard = NonFiniteGuard(ALONE, max_steps, fp16=fp16)
    check(guard, records(*steps[:-1]))
    with pytest.raises(NonFiniteError):
        check(guard, records(steps[-1], first_step=len(steps)))


def test_last_step_finite_follows_the_last_record() -> None:
    guard = NonFiniteGuard(ALONE, 10)
    for rows, expected in ((records(NAN), False), ([], False), (records(NAN, FINE), True)):
        check(guard, rows)
        assert guard.last_step_finite is expected


def test_fp16_overflow_is_not_reported() -> None:
    guard = NonFiniteGuard(ALONE, 2, fp16=True)
    assert guard.count_and_describe(records(OVERFLOW, OVERFLOW)) is None
    check(guard, records(OVERFLOW))
    assert guard.last_step_finite


def test_check_finite_weights_ignores_frozen_ones() -> None:
    model = torch.nn.Linear(2, 2)
    check_finite_weights(model, 1, ALONE)
    with torch.no_grad():
        model.bias[0] = math.inf
    with pytest.raises(NonFiniteError):
        check_finite_weights(model, 1, ALONE)
    check_finite_weights(model.requires_grad_(False), 1, ALONE)
