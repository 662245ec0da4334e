"""Losses that stay on the device until they are asked for, and the end of a run that has lost its way."""

import math

import pytest
import torch

from imagenet_cls.engine.meter import Meter
from imagenet_cls.errors import NonFiniteError
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group

ALONE = Group(RankInfo(), torch.device("cpu"))


def meter(most: int = 3, overflow_is_normal: bool = False) -> Meter:
    return Meter(ALONE, global_batch=8, max_nonfinite_steps=most, overflow_is_normal=overflow_is_normal)


def add(m: Meter, step: int, loss: float = 1.0, skipped: bool = False) -> None:
    m.add(step, 0, 0.1, torch.tensor(loss), torch.tensor(2.0 * loss), torch.tensor(skipped))


def test_every_step_is_there_once_and_the_last_tells_the_speed() -> None:
    m = meter()
    assert m.flush() == []
    for step in (1, 2, 3):
        add(m, step, loss=step / 4, skipped=step == 2)
    assert list(m.waiting_for(iter([1, 2]))) == [1, 2]
    records = m.flush()
    assert [(r["step"], r["loss"], r["grad_norm"], r.get("skipped")) for r in records] == [
        (1, 0.25, 0.5, None), (2, 0.5, 1.0, True), (3, 0.75, 1.5, None),
    ]  # fmt: skip
    assert [("images_per_sec" in r, r["kind"], r["epoch"], r["lr"]) for r in records] == [
        (False, "train", 0, 0.1), (False, "train", 0, 0.1), (True, "train", 0, 0.1),
    ]  # fmt: skip
    last = records[-1]
    assert last["images_per_sec"] > 0 and 0 <= last["data_wait_pct"] <= 100 and last["memory_mib"] > 10
    assert m.flush() == []


def test_too_many_skipped_steps_in_a_row_end_the_run_also_across_intervals() -> None:
    m = meter(most=3)
    for step, skipped in enumerate([True, True, False, True, True], start=1):
        add(m, step, math.nan if skipped else 1.0, skipped)
    m.check_finite(m.flush())
    add(m, 6, math.nan, True)
    with pytest.raises(NonFiniteError, match=r"in 3 steps in a row, the last one step 6 \(loss nan, lr 0.1\)") as error:
        m.check_finite(m.flush())
    assert error.value.exit_code == 6 and str(error.value).count("\n") == 1


def test_a_run_whose_last_step_was_not_finite_says_so_at_its_end() -> None:
    m, notes = meter(most=10), []
    for step, loss in enumerate([1.0, math.nan, 1.0, math.nan], start=1):
        add(m, step, loss, skipped=not math.isfinite(loss))
        notes.append(m.note_nonfinite(m.flush(), last_step=4))
    assert notes[0] is notes[2] is None
    assert "ends with it" not in (notes[1] or "") and "ends with it" in (notes[3] or "")
    m = meter(overflow_is_normal=True)
    add(m, 1, 1.0, skipped=True)
    assert m.note_nonfinite(m.flush(), last_step=1) is None


def test_an_fp16_run_may_overflow_while_its_loss_scale_finds_its_height() -> None:
    m = meter(most=2, overflow_is_normal=True)
    for step in range(1, 21):
        add(m, step, 1.0, skipped=True)
    m.check_finite(m.flush())
    add(m, 21, 1.0, skipped=False)
    for step in range(22, 24):
        add(m, step, math.nan, skipped=True)
    with pytest.raises(NonFiniteError, match="in 2 steps in a row"):
        m.check_finite(m.flush())


def test_an_endless_row_of_overflows_ends_an_fp16_run() -> None:
    m = meter(most=2, overflow_is_normal=True)
    for step in range(1, 53):
        add(m, step, 1.0, skipped=True)
    with pytest.raises(NonFiniteError, match="in 52 steps in a row"):
        m.check_finite(m.flush())


def test_a_loss_that_is_not_finite_counts_with_a_finite_gradient_too() -> None:
    m = meter(most=2)
    for step in range(1, 3):
        add(m, step, math.inf, skipped=False)
    with pytest.raises(NonFiniteError):
        m.check_finite(m.flush())
