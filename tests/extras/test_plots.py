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

from imagenet_cls.extras.pages.curves import comparison_charts, curves_of, run_charts
from imagenet_cls.extras.pages.figures import GREY, Chart, picture, svg, write_figure


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


def test_epochs_of_a_run_whose_batch_changed() -> None:
    """Two epochs of ten steps, then a part of one of five steps of twice the batch."""
    records = train_records(20)
    records += [records[-1] | {"epoch": 2, "step": step} for step in (21, 22)]
    run = curves_of(records, 5)
    assert np.interp([10, 22], run.steps, run.epochs).tolist() == [1.0, pytest.approx(2.4)]


def test_curves_of_many_runs_are_named_and_the_best_is_on_top() -> None:
    runs = []
    for number in range(12):
        result = {"kind": "eval", "weights": "raw", "step": 20, "top1_pct": 50.0, "loss": 1.0}
        runs.append(curves_of([*train_records(20), result | {"top1_pct": 90.0 - number}]))
    colors = ["#123456", *[GREY] * 11]
    charts = comparison_charts(runs, ["raw"] * 12, colors)
    axes = Figure().subplots()
    charts[1].draw(axes)
    assert [line.get_color() for line in axes.lines] == colors[::-1]
    assert axes.lines[-1].get_xydata().tolist() == [[2.0, 90.0]]
    page = svg(charts[1], [f"<b>{number}" for number in range(12)])
    assert len({*re.findall('class="run-[0-9]+"', page)}) == 12
