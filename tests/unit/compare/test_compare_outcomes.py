"""The numbers of the comparison and how they are shown: each difference is the largest, and of what was trained."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, losses, newest, train_here

from imagenet_cls.commands.compare_outcomes import (
    Outcome,
    loss_difference,
    notes,
    read_outcome,
    table,
    weight_difference,
)
from imagenet_cls.commands.compare_ways import Way

WEIGHTS = {"conv.weight": torch.zeros(2, 3), "bn.running_mean": torch.zeros(2), "steps": torch.tensor(3)}
ONE = Outcome([2.0, 1.0], WEIGHTS, 100.0, 50.0)


def way(name: str, missing: str = "") -> Way:
    return Way(name, {}, (), 8, f"good for {name}", missing)


def test_differences_are_the_largest() -> None:
    assert loss_difference([1.0, 2.0, 3.0], [1.5, 2.0, 2.0]) == 1.0
    assert math.isnan(loss_difference([1.0, math.nan], [1.0, 1.0]))
    other = WEIGHTS | {"conv.weight": torch.tensor([[0.0, -0.5, 0.1], [0.0, 0.0, 0.2]])}
    assert weight_difference(other, WEIGHTS) == 0.5
    assert weight_difference(WEIGHTS | {"bn.running_mean": torch.ones(2)}, WEIGHTS) == 0.0


def test_a_row_that_did_not_run_says_so_instead_of_a_number() -> None:
    other = Outcome([2.0, 1.25], WEIGHTS, 90.4, 51.0)
    lines = table([way("one"), way("dp", "needs two"), way("ddp")], [ONE, None, other]).splitlines()
    assert lines[0].split() == ["at", "once", "first", "loss", "losses", "weights", "img/s", "MiB", "good", "for"]
    assert lines[1].split()[:8] == ["one", "8", "-", "-", "-", "100", "50", "good"]
    assert lines[2].split()[:7] == ["dp", *"------"] and lines[2].endswith("not run: needs two")
    assert lines[3].split()[:7] == ["ddp", "8", "0.0e+00", "2.5e-01", "0.0e+00", "90", "51"]


def test_notes_tell_why_only_where_it_is_so() -> None:
    assert "BatchNorm normalises" in notes([ONE]) and "no BatchNorm" not in notes([ONE])
    without = Outcome(ONE.losses, {"conv.weight": WEIGHTS["conv.weight"]}, 100.0, 50.0)
    assert "no BatchNorm" in notes([without]) and "normalises" not in notes([without])


def outcome_of(digits: Path, folder: Path, model: str, **changes: Any) -> Outcome:
    train_here(arguments(digits, folder, model, train__max_steps=4, train__global_batch_size=64, **changes))
    return read_outcome(folder)


@pytest.mark.parametrize(("model", "dropout", "agrees"), [("plain", {}, True), ("noisy", {"dropout": 0.0}, False)])
def test_runs_that_cut_their_batches_otherwise_agree_without_batch_norm_only(
    digits: Path, tmp_path: Path, model: str, dropout: dict[str, Any], agrees: bool
) -> None:
    """Whole batches against four pieces in turn: BatchNorm sees 64 images, then 16."""
    kwargs = {"model__kwargs": dropout}
    one = outcome_of(digits, tmp_path / "one", model, **kwargs)
    assert one.losses == losses(tmp_path / "one")
    assert one.images_per_sec > 0 and one.memory_mib > 10
    assert newest(tmp_path / "one").name == "step-0000004"
    cut = outcome_of(digits, tmp_path / "cut", model, train__micro_batch_size=16, **kwargs)
    first = loss_difference(one.losses[:1], cut.losses[:1])
    every, weights = loss_difference(one.losses, cut.losses), weight_difference(one.weights, cut.weights)
    if agrees:
        assert max(first, every, weights) < 1e-5
    else:
        assert min(first, every, weights) > 1e-4
