"""Early stopping, and which evaluation is the best."""

import math
from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, assert_resumes, evaluations, state_of, train_here

from imagenet_cls.checkpoint.progress import stops_early
from imagenet_cls.config.schema import EarlyStopConfig


def top1(*values: float) -> list[dict[str, float]]:
    return [
        {"top1_pct": value, "top5_pct": 100.0, "loss": 100 - value, "balanced_accuracy_pct": value}
        for value in values
    ]


@pytest.mark.parametrize("metric", ["top1", "loss", "balanced_accuracy"])
def test_stops_after_so_many_evaluations_without_a_better_one(metric: Any) -> None:
    config = EarlyStopConfig(patience_evals=2, metric=metric, min_delta=1.0)
    for values in ([50, 60], [50, 60, 61], [50, 60, 61, 61.5]):
        assert not stops_early(top1(*values), config)
    for values in ([50, 60, 61, 60.5], [50, math.nan, 50]):
        assert stops_early(top1(*values), config)
    assert not stops_early(top1(50, 50, 50), EarlyStopConfig())


def test_evaluations_without_the_metric_do_not_count() -> None:
    """Those of a run that was begun before it was recorded."""
    config = EarlyStopConfig(patience_evals=2, metric="balanced_accuracy")
    earlier = [{"top1_pct": 50.0, "top5_pct": 90.0, "loss": 1.0}] * 3
    assert not stops_early(earlier + top1(50, 50), config) and stops_early(
        earlier + top1(50, 50, 50), config
    )


def test_run_that_was_interrupted_stops_at_the_same_step(digits: Path, tmp_path: Path) -> None:
    settings = {
        "train__epochs": 8,
        "train__early_stop__patience_evals": 2,
        "train__early_stop__metric": "balanced_accuracy",
        "checkpoint__best": "balanced_accuracy",
        "ema__decay": 0.99,
        "optimizer__lr": 0.0,
    }
    assert_resumes(digits, tmp_path, 15, **settings)
    # raw and EMA; the first one is the best, two follow
    assert len(evaluations(tmp_path / "whole")) == 2 * 3
    progress = state_of(tmp_path / "whole")["progress"]
    assert progress["step"] == 33 and progress["stopped_early"]
    assert set(progress["best"]["raw"]) == {"balanced_accuracy_pct", "step"}
    train_here([*arguments(digits, tmp_path / "parts", **settings), "--resume"])
    assert state_of(tmp_path / "parts")["progress"] == progress  # nothing was left to do
