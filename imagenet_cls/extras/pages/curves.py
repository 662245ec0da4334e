"""The curves of one run, or of several together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from imagenet_cls.config.metrics import BY_NAME, Metric, main_metric
from imagenet_cls.extras.pages.figures import BLUE, GREEN, GREY, ORANGE, Chart
from imagenet_cls.report.jsonl import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS = 200  # of a curve; each is a mean
_ALL_POINTS = 12_000  # of a figure
_WINDOW = 15  # points of a curve over which it is smoothed
_NOISY = ("loss", "grad_norm", "top1_pct")
_MOST_MARKERS = 30  # points of a curve, up to which they are marked
FEW = 11  # runs, up to which each has a color, and its training curve
Points = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Curves:
    """The records of a run over its epochs.

    steps, epochs: where steps are on the axis, for interpolation.
    """

    records: Sequence[Record]
    steps_per_epoch: int
    steps: np.ndarray
    epochs: np.ndarray

    def points(self, key: str, kind: str, most: int = _MOST_POINTS) -> Points:
        """Epochs and values of a field, at most `most` of them: means of neighboring values, each
        at the last of their epochs. Values that are not finite are NaN, which leaves a gap.

        kind: `train`, or the weights of an evaluation.
        """
        found = [r for r in self.records if key in r and kind in (r["kind"], r.get("weights"))]
        steps = np.array([record["step"] for record in found])
        values = np.array([record[key] for record in found], dtype=np.float64)
        values[~np.isfinite(values)] = np.nan
        size = -(-len(found) // most) or 1
        cuts = range(size, len(found), size)
        means = [part.mean() for part in np.split(values, cuts) if len(part)]
        last_steps = [part[-1] for part in np.split(steps, cuts) if len(part)]
        return np.interp(last_steps, self.steps, self.epochs), np.array(means)


def curves_of(records: Sequence[Record], steps_per_epoch: int | None = None) -> Curves:
    """The curves of a run. steps_per_epoch: None if the records are all that is known. Without a
    training step there is nothing to draw.
    """
    train = [record for record in records if record["kind"] == "train"]
    if not train:
        return Curves(records, 0, np.zeros(1), np.full(1, np.nan))
    last_steps = {record["epoch"]: record["step"] for record in train}
    steps = np.array([train[0]["step"] - 1, *last_steps.values()])
    epochs = np.array([train[0]["epoch"], *(epoch + 1.0 for epoch in last_steps)])
    length = steps_per_epoch or steps[1] - steps[0]
    # the last epoch may be unfinished
    epochs[-1] = min(epochs[-1], epochs[-2] + (steps[-1] - steps[-2]) / length)
    return Curves(records, length, steps, epochs)


def main_metrics(records: Iterable[Record]) -> list[Metric]:
    """The main metrics of the evaluations among records; top-1 without any."""
    found = [main_metric(record) for record in records if record["kind"] == "eval"]
    return list(dict.fromkeys(found)) or [BY_NAME["top1"]]


def run_charts(run: Curves) -> list[Chart]:
    """Training beside validation, learning rate, gradients, waiting and memory of a run."""
    metric, *_ = main_metrics(run.records)
    titles = {
        "loss": ("Loss", "loss"),
        metric.field: (f"{metric.title}, %", "%"),
        "lr": ("Learning rate", "learning rate"),
        "grad_norm": ("Norm of the gradient", "norm"),
        "data_wait_pct": ("Waiting for data", "% of the time"),
        "memory_mib": ("Peak memory", "MiB"),
    }
    present = set(chain.from_iterable(run.records))
    return [
        Chart(title, partial(_draw_run, run, key, unit))
        for key, (title, unit) in titles.items()
        if key in present
    ]


def _draw_run(run: Curves, key: str, unit: str, axes: "Axes") -> None:
    """Draw a field: training and its smoothed curve, the evaluations of each kind of weights, and
    where the run was resumed.
    """
    x, values = run.points(key, "train")
    if len(x):
        is_noisy = key in _NOISY and len(x) > _WINDOW
        pale = {"alpha": 0.3, "linewidth": 1} if is_noisy else {"label": "training"}
        axes.plot(x, values, color=BLUE, **pale)
        if is_noisy:
            axes.plot(x, smooth(values), color=BLUE, label="training, smoothed")
    for kind, color, style in (("raw", ORANGE, "o-"), ("ema", GREEN, "s--")):
        x, values = run.points(key, kind)
        if len(x):
            label = f"validation, {kind if kind == 'raw' else 'EMA'} weights"
            axes.plot(x, values, style, color=color, markersize=4, label=label)
    resumed = [
        record["step"]
        for record in run.records
        if record["kind"] == "event" and record["message"].startswith("resumed from ")
    ]
    label = "resumed"
    for place in np.interp(sorted(set(resumed)), run.steps, run.epochs) if resumed else []:
        axes.axvline(place, color=GREY, linestyle=":", label=label)
        label = "_"  # one entry in the legend
    axes.set_xlabel("epoch")
    axes.set_ylabel(unit)
    if key not in _NOISY:
        axes.set_ylim(bottom=0)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend()


def smooth(values: np.ndarray) -> np.ndarray:
    """Means over the points around each point. NaN is left out, and stays."""
    window = np.ones(min(_WINDOW, len(values)) or 1)
    is_known = ~np.isnan(values)
    sums = np.convolve(np.where(is_known, values, 0), window, "same")
    counts = np.convolve(is_known, window, "same")
    return np.where(is_known, sums / np.maximum(counts, 1), np.nan)


def comparison_charts(
    runs: Sequence[Curves], weights: Sequence[str], colors: Sequence[str]
) -> list[Chart]:
    """Loss, top-1 or mAP, and learning rate of runs, the best first. weights: of the evaluations to
    draw, for each run. Of up to `FEW` runs the training loss is a thin line.
    """
    titles = {
        "loss": ("Loss", "loss"),
        **{
            metric.field: (f"validation {metric.title}, %", "%")
            for metric in main_metrics(chain(*(run.records for run in runs)))
        },
        "lr": ("Learning rate", "learning rate"),
    }
    return [
        Chart(title, partial(_draw_runs, runs, weights, colors, key, unit))
        for key, (title, unit) in titles.items()
    ]


def _draw_runs(
    runs: Sequence[Curves],
    weights: Sequence[str],
    colors: Sequence[str],
    key: str,
    unit: str,
    axes: "Axes",
) -> None:
    most = min(_MOST_POINTS, _ALL_POINTS // len(runs))
    late = []
    for number in reversed(range(len(runs))):  # the best on top
        run = runs[number]
        style: dict[str, Any] = {"color": colors[number], "gid": f"run-{number}"}
        if len(runs) <= FEW and key == "loss":
            x, values = run.points(key, "train", most)
            if len(x):
                axes.plot(x, smooth(values), linewidth=1, alpha=0.6, **style)
                late.append(smooth(values)[len(x) // 5 :])
        kind = "train" if key == "lr" else weights[number]
        x, values = run.points(key, kind, most)
        if len(x) <= _MOST_MARKERS and key != "lr":
            style |= {"marker": "o", "markersize": 3}
        axes.plot(x, values, **style)
        late.append(values[len(x) // 5 :])
    shown = np.concatenate(late)
    shown = shown[np.isfinite(shown)]
    if len(shown) and key != "lr":  # else the first steps of the curves decide the scale
        margin = 0.05 * np.ptp(shown) or 1
        axes.set_ylim(shown.min() - margin, shown.max() + margin)
    axes.set_xlabel("epoch")
    axes.set_ylabel(unit)
