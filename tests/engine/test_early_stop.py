"""Early stopping, and which evaluation is the best."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, evaluations, newest, state_digest, train_here

from imagenet_cls.checkpoint.format import write_manifest
from imagenet_cls.checkpoint.progress import METRICS, stops_early
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
    assert stops_early(top1(50, 60, 61, 60.5), config) and stops_early(
        top1(50, math.nan, 50), config
    )
    assert not stops_early(top1(50, 50, 50), EarlyStopConfig())


def test_evaluations_without_the_metric_do_not_count() -> None:
    """Those of a run that was begun before it was recorded."""
    config = EarlyStopConfig(patience_evals=2, metric="balanced_accuracy")
    earlier = [{"top1_pct": 50.0, "top5_pct": 90.0, "loss": 1.0}] * 3
    assert not stops_early(earlier + top1(50, 50), config) and stops_early(
        earlier + top1(50, 50, 50), config
    )


def progress(run: Path) -> dict[str, Any]:
    return json.loads((newest(run) / "state.json").read_text())["progress"]


def test_run_without_balanced_accuracy_resumes_and_then_stops_by_it(
    digits: Path, tmp_path: Path
) -> None:
    """As a run that was begun before the field was recorded. Its earlier evaluations don't
    count.
    """
    words = arguments(digits, tmp_path, train__epochs=8, optimizer__lr=0.0)
    train_here([*words, "train.max_steps=22"])
    state = json.loads((newest(tmp_path) / "state.json").read_text())
    for results in [*state["progress"]["history"], *state["progress"]["latest"].values()]:
        del results["balanced_accuracy_pct"]
    (newest(tmp_path) / "state.json").write_text(json.dumps(state))
    write_manifest(newest(tmp_path))
    by_balance = ["checkpoint.best=balanced_accuracy", "train.early_stop.metric=balanced_accuracy"]
    train_here([*words, *by_balance, "train.early_stop.patience_evals=1", "--resume"])
    assert progress(tmp_path)["step"] == 44 and progress(tmp_path)["stopped_early"]
    assert set(progress(tmp_path)["best"]["raw"]) == {"balanced_accuracy_pct", "step"}
    assert progress(tmp_path)["best"]["raw"]["step"] == 33


@pytest.mark.parametrize("metric", ["loss", "balanced_accuracy"])
def test_run_that_was_interrupted_stops_at_the_same_step(
    digits: Path, tmp_path: Path, metric: str
) -> None:
    settings: dict[str, Any] = {
        "train__epochs": 8,
        "train__early_stop__patience_evals": 2,
        "ema__decay": 0.99,
    }
    settings |= {"optimizer__lr": 0.0, "checkpoint__best": metric}
    settings |= {"train__early_stop__metric": metric}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train_here(arguments(digits, whole, **settings))
    assert len(evaluations(whole)) == 2 * 3  # raw and EMA; the first one is the best, two follow
    assert progress(whole)["step"] == 33 and progress(whole)["stopped_early"]
    assert set(progress(whole)["best"]["raw"]) == {METRICS[metric], "step"}
    words = arguments(digits, resumed, **settings)
    train_here([*words, "train.max_steps=15"])
    train_here([*words, "--resume"])
    assert state_digest(resumed) == state_digest(whole)
    train_here([*words, "--resume"])  # nothing is left to do
    assert progress(resumed)["step"] == 33
