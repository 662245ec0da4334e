"""PNG files: the curves of a run.

Figures are drawn without pyplot, whose figures and backend are global. matplotlib is imported
inside the functions, since that takes half a second.
"""

import math
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.config.metrics import BY_NAME, Metric, main_metric
from imagenet_cls.files import OUTPUT_MARK, write_file
from imagenet_cls.report.jsonl import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 300  # of a curve; each is a mean


def main_metrics(records: Iterable[Record]) -> list[Metric]:
    """The main metrics of the evaluations among records; top-1 without any."""
    found = [main_metric(record) for record in records if record["kind"] == "eval"]
    return list(dict.fromkeys(found)) or [BY_NAME["top1"]]


def plot_run(metrics: Sequence[Record], folder: Path) -> None:
    """Draw the figure of `draw_run` into `folder/curves.png`. An existing file is replaced. Raises
    OSError.
    """
    write_figure(folder / "curves.png", draw_run(metrics))


def draw_run(metrics: Sequence[Record]) -> "Figure":
    """Loss, learning rate and top-1 or mAP of a run over its steps, side by side."""
    from matplotlib.figure import Figure

    class RunFigure(Figure):
        def _repr_png_(self) -> bytes:
            """What a notebook shows. It knows other figures only if pyplot is imported."""
            return _png(self)

    figure = RunFigure((15, 4), layout="constrained")
    (metric, *_) = main_metrics(metrics)
    titles = {"loss": "loss", "lr": "learning rate"}
    titles[metric.field] = f"Validation {metric.title} (%)"
    for axes, (key, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        _draw_curve(axes, key, metrics)
        _finish(axes, "step", title)
    return figure


def _draw_curve(axes: "Axes", key: str, metrics: Sequence[Record]) -> None:
    """Draw a field of the records over the steps: means of neighboring training steps, the
    evaluations, and where the run was resumed. Values that are not finite leave gaps.
    """
    training = [record for record in metrics if record["kind"] == "train" and key in record]
    if training and key != "top1_pct":
        steps, values = mean_points(*columns(training, key), _MAX_POINTS)
        axes.plot(steps, values, color="C0", label="training")
    results = [record for record in metrics if record["kind"] == "eval" and key in record]
    for weights, style in (("raw", "o-"), ("ema", "s--")):
        own = [record for record in results if record["weights"] == weights]
        if own:
            steps, values = columns(own, key)
            label = f"{weights} weights"
            axes.plot(steps, values, style, color="C0", markersize=4, linewidth=1, label=label)
    events = [record for record in metrics if record["kind"] == "event"]
    resumed = {event["step"] for event in events if event["message"].startswith("resumed from ")}
    line_label: str | None = "resumed"
    for step in sorted(resumed):
        axes.axvline(step, color="C0", linestyle=":", linewidth=0.8, label=line_label)
        line_label = None  # one entry in the legend


def mean_points(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points of a curve: means of neighboring values, each at the last of their
    steps.
    """
    size = math.ceil(len(steps) / most)
    cuts = range(size, len(steps), size)
    last_steps = [part[-1] for part in np.split(steps, cuts)]
    means = [part.mean() for part in np.split(values, cuts)]
    return np.array(last_steps), np.array(means)


def write_figure(path: Path, figure: "Figure") -> None:
    """Write a PNG file whole or not at all. Raises OSError."""
    content = _png(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)


def _png(figure: "Figure") -> bytes:
    content = BytesIO()
    figure.savefig(content, format="png", metadata={"Software": OUTPUT_MARK})
    return content.getvalue()


def _finish(axes: "Axes", x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def columns(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps and values of records. Values that are not finite are NaN, which leaves a gap."""
    steps = np.array([record["step"] for record in records])
    values = np.array([record[key] for record in records], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return steps, values
