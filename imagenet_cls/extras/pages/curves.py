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

AXES = ("epoch", "step", "images", "minutes")
_MOST_POINTS = 200  # of a curve; each is a mean
_ALL_POINTS = 12_000  # of a figure
_WINDOW = 15  # points of a curve over which it is smoothed
_NOISY = ("loss", "grad_norm", "top1_pct")
_MOST_MARKERS = 30  # points of a curve, up to which they are marked
FEW = 11  # runs, up to which each has a color, and its training curve
Points = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Curves:
    """The records of a run, and its axis.

    axis: of `AXES`. steps, places: where steps are on the axis, for interpolation.
    """

    records: Sequence[Record]
    axis: str
    steps: np.ndarray
    places: np.ndarray

    def points(self, key: str, kind: str, most: int = _MOST_POINTS) -> Points:
        """Places and values of a field, at most `most` of them: means of neighboring values, each
        at the last of their places. Values that are not finite are NaN, which leaves a gap.

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
        return np.interp(last_steps, self.steps, self.places), np.array(means)


def curves_of(
    records: Sequence[Record],
    axis: str = "epoch",
    steps_per_epoch: int | None = None,
    batch: int | None = None,
) -> Curves:
    """The curves of a run. steps_per_epoch: None if the records are all that is known. batch: the
    global batch size, for the axes `images` and `minutes`; without it there is nothing to draw.

    Images are counted by epochs, since the batch may change where a run is resumed. Minutes are of
    training steps and evaluations, from the speed of each logging interval.
    """
    train = [record for record in records if record["kind"] == "train"]
    if not train or axis == "step":
        steps = np.array([0, max((record["step"] for record in records), default=1)])
        return Curves(records, axis, steps, steps if axis == "step" else steps * np.nan)
    last_steps = {record["epoch"]: record["step"] for record in train}
    steps = np.array([train[0]["step"] - 1, *last_steps.values()])
    places = np.array([train[0]["epoch"], *(epoch + 1.0 for epoch in last_steps)])
    length = steps_per_epoch or steps[1] - steps[0]
    # the last epoch may be unfinished
    places[-1] = min(places[-1], places[-2] + (steps[-1] - steps[-2]) / length)
    if axis == "epoch":
        return Curves(records, axis, steps, places)
    places = (places - places[0]) * length * (batch or np.nan)
    if axis == "images":
        return Curves(records, axis, steps, places)
    intervals = [record for record in train if record.get("images_per_sec")]
    ends = np.array([steps[0], *(record["step"] for record in intervals)])
    speeds = np.array([record["images_per_sec"] for record in intervals])
    seconds = np.diff(np.interp(ends, steps, places)) / speeds
    of_evaluations = {r["step"]: r["seconds"] for r in records if r["kind"] == "eval"}
    spent = [sum(s for step, s in of_evaluations.items() if step <= end) for end in ends]
    return Curves(records, axis, ends, (np.append(0, seconds.cumsum()) + spent) / 60)


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
    for place in np.interp(sorted(set(resumed)), run.steps, run.places) if resumed else []:
        axes.axvline(place, color=GREY, linestyle=":", label=label)
        label = "_"  # one entry in the legend
    axes.set_xlabel(run.axis)
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


@dataclass(frozen=True)
class Group:
    """Runs of one setting. runs: their numbers. color: None for gray."""

    label: str
    runs: Sequence[int]
    color: str | None


def comparison_charts(
    runs: Sequence[Curves], weights: Sequence[str], groups: Sequence[Group]
) -> list[Chart]:
    """Loss, top-1 or mAP, and learning rate of runs. weights: of the evaluations to draw, for each
    run.

    Each of up to `FEW` runs has a color, and its training loss a thin line. Of more, groups have
    the mean and the standard deviation of their runs.
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
        Chart(title, partial(_draw_runs, runs, weights, groups, key, unit))
        for key, (title, unit) in titles.items()
    ]


def _draw_runs(
    runs: Sequence[Curves],
    weights: Sequence[str],
    groups: Sequence[Group],
    key: str,
    unit: str,
    axes: "Axes",
) -> None:
    most = min(_MOST_POINTS, _ALL_POINTS // len(runs))
    is_few = len(runs) <= FEW
    late = []
    for group in sorted(groups, key=lambda group: group.color is not None):  # colors on top
        lines = []
        for number in group.runs:
            run = runs[number]
            style: dict[str, Any] = {"color": group.color or GREY, "gid": f"run-{number}"}
            if is_few and key == "loss":
                x, values = run.points(key, "train", most)
                if len(x):
                    axes.plot(x, smooth(values), linewidth=1, alpha=0.6, **style)
                    late.append(smooth(values)[len(x) // 5 :])
            kind = "train" if key == "lr" else weights[number]
            x, values = run.points(key, kind, most)
            if len(x) <= _MOST_MARKERS and key != "lr":
                style |= {"marker": "o", "markersize": 3}
            if not is_few:
                style |= {"linewidth": 0.8, "alpha": 0.5}
            axes.plot(x, values, **style)
            lines.append((x, values))
            late.append(values[len(x) // 5 :])
        lines = [line for line in lines if len(line[0])]
        if lines and group.color and not is_few:
            _draw_band(axes, lines, group.color)
    shown = np.concatenate(late)
    shown = shown[np.isfinite(shown)]
    if len(shown) and key != "lr":  # else the first steps of the curves decide the scale
        margin = 0.05 * np.ptp(shown) or 1
        axes.set_ylim(shown.min() - margin, shown.max() + margin)
    axes.set_xlabel(runs[0].axis)
    axes.set_ylabel(unit)


def _draw_band(axes: "Axes", lines: Sequence[Points], color: str) -> None:
    """Draw the mean of curves, and of several a band of one standard deviation to each side."""
    x = np.unique(np.concatenate([line[0] for line in lines]))
    x = x[(x >= max(line[0][0] for line in lines)) & (x <= min(line[0][-1] for line in lines))]
    values = np.stack([np.interp(x, *line) for line in lines])
    mean = values.mean(axis=0)
    axes.plot(x, mean, color=color, linewidth=1.8)
    if len(lines) > 1:
        std = values.std(axis=0, ddof=1)
        axes.fill_between(x, mean - std, mean + std, color=color, alpha=0.2, linewidth=0)
