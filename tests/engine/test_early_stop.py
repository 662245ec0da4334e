"""Early stopping, and which evaluation is the best."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, evaluations, newest, state_digest, train_here

from imagenet_cls.config.schema import EarlyStopConfig
from imagenet_cls.engine.evaluate import stops_early


def top1(*values: float) -> list[dict[str, float]]:
    return [{"top1_pct": value, "top5_pct": 100.0, "loss": 100 - value} for value in values]


@pytest.mark.parametrize("metric", ["top1", "loss"])
def test_stops_after_so_many_evaluations_without_a_better_one(metric: Any) -> None:
    config = EarlyStopConfig(patience_evals=2, metric=metric, min_delta=1.0)
    for values in ([50, 60], [50, 60, 61], [50, 60, 61, 61.5]):
        assert not stops_early(top1(*values), config)
    assert stops_early(top1(50, 60, 61, 60.5), config) and stops_early(top1(50, math.nan, 50), config)
    assert not stops_early(top1(50, 50, 50), EarlyStopConfig())


def progress(run: Path) -> dict[str, Any]:
    return json.loads((newest(run) / "state.json").read_text())["progress"]


def test_run_that_was_interrupted_stops_at_the_same_step(digits: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train__epochs": 8, "train__early_stop__patience_evals": 2, "ema__decay": 0.99}
    settings |= {"optimizer__lr": 0.0, "checkpoint__best": "loss"}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train_here(arguments(digits, whole, **settings))
    assert len(evaluations(whole)) == 2 * 3  # raw and EMA; the first one is the best, with two behind it
    assert progress(whole)["step"] == 33 and progress(whole)["stopped_early"]
    assert set(progress(whole)["best"]["raw"]) == {"loss", "step"}
    words = arguments(digits, resumed, **settings)
    train_here([*words, "train.max_steps=15"])
    train_here([*words, "--resume"])
    assert state_digest(resumed) == state_digest(whole)
    train_here([*words, "--resume"])  # nothing is left to do
    assert progress(resumed)["step"] == 33
