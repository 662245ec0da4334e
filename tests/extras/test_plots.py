"""Figures: which curves, points and labels they have, drawn without pyplot."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from imagenet_cls.extras.pages.curves import (
    Curves,
    Group,
    comparison_charts,
    curves_of,
    run_charts,
)
from imagenet_cls.extras.pages.figures import GREY, Chart, picture, svg, write_figure

NAMES = [f"<b>{number}" for number in range(12)]


def drawn(chart: Chart) -> dict[Any, np.ndarray]:
    """The points of the lines of a chart, by their labels."""
    axes = Figure().subplots()
    chart.draw(axes)
    return {line.get_label(): np.asarray(line.get_xydata()) for line in axes.lines}


def train_records(steps: int, **changes: Any) -> list[dict[str, Any]]:
    """Ten steps an epoch."""
    common = {"kind": "train", "lr": 0.1, "top1_pct": 40.0} | changes
    return [
        common | {"step": step, "epoch": (step - 1) // 10, "loss": 2.0 / step}
        for step in range(1, steps + 1)
    ]


def test_curves_of_a_run_are_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # its import is an error
    records = train_records(500)
    records[250]["loss"] = math.nan
    result = {"kind": "eval", "step": 495, "top1_pct": 50.0, "loss": 1.0}
    records += [{**result, "weights": weights} for weights in ("raw", "ema")]
    records.append({"kind": "event", "step": 30, "message": "resumed from x"})
    charts = run_charts(curves_of(records))
    assert [chart.title for chart in charts] == ["Loss", "top-1, %", "Learning rate"]
    loss = drawn(charts[0])
    pale = next(points for label, points in loss.items() if label.startswith("_child"))
    assert pale[0] == pytest.approx([0.3, (2 + 1 + 2 / 3) / 3])  # of three steps
    assert len(pale) == 167 and np.isnan(pale[:, 1]).sum() == 1
    assert loss["validation, EMA weights"].tolist() == [[49.5, 1.0]]
    assert loss["resumed"][0, 0] == 3.0
    assert {"training, smoothed", "validation, raw weights"} <= {*drawn(charts[1])}
    page = svg(charts[0])
    assert "var(--ink)" in page and "training, smoothed" in page
    write_figure(tmp_path / "curves.png", picture(charts))
    assert Image.open(tmp_path / "curves.png").width > 1000


def test_axes_of_a_run_whose_batch_changed() -> None:
    """Two epochs of ten steps, then a half of five steps of twice the batch."""
    records = train_records(20)
    later = {"epoch": 2, "images_per_sec": 64.0}
    records += [records[-1] | later | {"step": step} for step in (21, 22)]
    records.append({"kind": "eval", "step": 20, "weights": "raw", "seconds": 60.0})
    places = {axis: curves_of(records, axis, 5, 64) for axis in ("epoch", "images", "minutes")}
    at = {axis: np.interp([10, 22], run.steps, run.places) for axis, run in places.items()}
    assert at["epoch"].tolist() == [1.0, pytest.approx(2.4)]
    assert at["images"].tolist() == [320, pytest.approx(768)]
    assert at["minutes"][1] == pytest.approx((768 / 64 + 60) / 60)


def test_band_of_a_group_is_mean_and_deviation() -> None:
    def run(number: int) -> Curves:
        results = [
            {"kind": "eval", "weights": "raw", "step": step, "top1_pct": 50.0 + number, "loss": 1.0}
            for step in (10, 20)
        ]
        return curves_of(train_records(20) + results)

    runs = [run(number) for number in range(12)]
    groups = [Group("lr=0.1", range(4), "#123456"), Group("lr=0.2", range(4, 12), None)]
    axes = Figure().subplots()
    comparison_charts(runs, ["raw"] * 12, groups)[1].draw(axes)
    (band,) = axes.collections
    points = band.get_paths()[0].vertices
    assert points[:, 1].min() == pytest.approx(51.5 - np.std(range(4), ddof=1))
    colors = [line.get_color() for line in axes.lines]
    assert colors == [GREY] * 8 + ["#123456"] * 5  # the mean is the last one
    assert (
        len(
            set(
                re.findall(
                    'class="run-[0-9]+"',
                    svg(comparison_charts(runs, ["raw"] * 12, groups)[1], NAMES),
                )
            )
        )
        == 12
    )
