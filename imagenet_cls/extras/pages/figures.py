"""The data of the figures of a page. templates/figures.js makes traces of Plotly of them."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from imagenet_cls.config.metrics import BY_FIELD
from imagenet_cls.extras.pages.plots import columns, main_metrics, mean_points
from imagenet_cls.report.jsonl import Record

_ALL_POINTS = 12_000  # of the training curves of a figure
_MOST_POINTS = 1_000  # of a training curve
Figure = dict[str, Any]


def curve_figures(runs: Sequence[Sequence[Record]]) -> list[Figure]:
    """Loss, top-1 or mAP, learning rate and speed over the steps. runs: the records of each."""
    most = min(_MOST_POINTS, _ALL_POINTS // len(runs))
    steps = [record["step"] for metrics in runs for record in metrics]
    resumed = []
    for run, metrics in enumerate(runs):
        events = [record for record in metrics if record["kind"] == "event"]
        resumed += [
            [run, event["step"]] for event in events if event["message"].startswith("resumed from ")
        ]
    figures = []
    # Of a field of the records: title of its figure, and format of d3 for an exact value.
    shown = {
        "loss": ("Loss", ".5f"),
        **{
            metric.field: (f"Validation {metric.title}, %", ".3f")
            for metric in sorted(main_metrics(chain(*runs)), key=list(BY_FIELD.values()).index)
        },
        "lr": ("Learning rate", ".6g"),
        "images_per_sec": ("Images per second", ",.1f"),
    }
    for key, (title, number_format) in shown.items():
        curves = []
        for run, metrics in enumerate(runs):
            curves += [{"run": run, **curve} for curve in _curves(metrics, key, most)]
        figures.append(
            {
                "title": title,
                "format": number_format,
                "steps": [min(steps, default=0), max(steps, default=1)],
                "resumed": resumed,
                "curves": curves,
            }
        )
    return figures


def _curves(metrics: Sequence[Record], key: str, most: int) -> Iterator[Figure]:
    """Of the training steps, with at most `most` points, and of the evaluations of each weights.

    size: the number of values of which a point is the mean.
    """
    training = [record for record in metrics if record["kind"] == "train" and key in record]
    # The top-1 of training is of augmented, often mixed images.
    if training and key != "top1_pct":
        size = math.ceil(len(training) / most)
        steps, values = mean_points(*columns(training, key), most)
        curve = {"weights": "", "x": steps.tolist(), "y": _numbers(values), "size": size}
        if key == "images_per_sec":
            _, waits = mean_points(*columns(training, "data_wait_pct"), most)
            curve["waiting"] = _numbers(waits)
        yield curve
    for weights in ("raw", "ema"):
        results = [record for record in metrics if record.get("weights") == weights]
        results = [record for record in results if key in record]
        if results:
            steps, values = columns(results, key)
            epochs = [record.get("epoch") for record in results]
            yield {
                "weights": weights,
                "x": steps.tolist(),
                "y": _numbers(values),
                "epochs": epochs,
            }


def _numbers(values: np.ndarray) -> list[float | None]:
    """For JSON: six digits are exact enough. NaN is a gap."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
