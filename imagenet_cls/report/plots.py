"""PNG files: the curves of a run, of a schedule or of a learning rate range test.

Figures are drawn without pyplot, whose figures and backend are global. matplotlib is imported
inside the functions, since that takes half a second.
"""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.files import OUTPUT_MARK, write_file
from imagenet_cls.report.jsonl import MAIN_TITLES, Record, main_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LABEL = 24  # characters of a line
_MAX_POINTS = 300  # of a curve; each is a mean
_POINTS = "offset points"  # the unit of a distance from the annotated place
_FAR = 2.5  # times the highest loss before the lowest one
# Fields of the records that are drawn over the steps of a run, with the labels of their axes.
_CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    **{key: f"{title} on validation images (%)" for key, title in MAIN_TITLES.items()},
}


def plot_run(metrics: Sequence[Record], folder: Path) -> None:
    """Draw the figure of `draw_run` into `folder/curves.png`. An existing file is replaced. Raises
    OSError.
    """
    _write(folder / "curves.png", draw_run(metrics))


def draw_run(metrics: Sequence[Record]) -> "Figure":
    """Loss, learning rate and top-1 or mAP of a run over its steps, side by side."""
    from matplotlib.figure import Figure

    class RunFigure(Figure):
        def _repr_png_(self) -> bytes:
            """What a notebook shows. It knows other figures only if pyplot is imported."""
            return _png(self)

    figure = RunFigure((15, 4), layout="constrained")
    keys = ("loss", "lr", main_metrics(metrics)[0])
    for axes, key in zip(figure.subplots(1, 3), keys, strict=True):
        _draw_curve(axes, key, metrics)
        _finish(axes, "step", _CURVES[key])
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


def plot_images(path: Path, images: np.ndarray, labels: Sequence[str]) -> None:
    """Draw images in rows of eight, each with its label above it. An existing file is replaced.
    Raises OSError.

    images: float (N, H, W, C) from 0 to 1, with one or three channels.
    """
    from matplotlib.figure import Figure

    columns = min(8, len(images))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(1.7 * columns, 2.0 * rows), layout="constrained", dpi=120)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, image, label in zip(grid.flat, images, labels, strict=False):
        axes.imshow(image, cmap="gray", vmin=0, vmax=1)
        lines = [line[:_MAX_LABEL] for line in label.split("\n")]
        axes.set_title("\n".join(lines), fontsize=7, parse_math=False)
    _write(path, figure)


def plot_panels(
    path: Path, title: str, epochs: Sequence[float], panels: Mapping[str, Sequence[float]]
) -> None:
    """Draw quantities over the epochs, each in a panel, one below the other.

    panels: values at `epochs`, by the label of their axis; at least one. An existing file is
    replaced. Raises OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure((8, 1 + 2.2 * len(panels)), dpi=120, layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, values) in zip(all_axes, panels.items(), strict=True):
        axes.plot(epochs, values, color="C0", linewidth=1.8)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.margins(x=0, y=0.2)
        highest = max(values)
        if min(values) == highest:  # otherwise matplotlib magnifies rounding errors
            axes.set_ylim(0, 1.25 * highest or 1.0)
        else:
            epoch = epochs[list(values).index(highest)]
            axes.plot(epoch, highest, "o", color="C0")
            label = f"{highest:.4g} at epoch {epoch:.3g}"
            axes.annotate(label, (epoch, highest), (8, 6), textcoords=_POINTS, color="C0")
    all_axes[0].set_title(title, parse_math=False)
    all_axes[-1].set_xlabel("epoch")
    _write(path, figure)


def plot_lr_range(
    path: Path,
    lrs: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    marked: Mapping[str, float],
) -> None:
    """Draw losses over learning rates on a logarithmic axis. marked: learning rates by label.
    Raises OSError.

    All losses are inside the frame. The axis of the loss is logarithmic if it ends far above its
    start.
    """
    from matplotlib.figure import Figure

    figure = Figure((8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(lrs, losses, color="C0", alpha=0.35, linewidth=1, label="loss of each step")
    axes.plot(lrs, smoothed, color="C0", linewidth=2, label="smoothed")
    axes.set_xscale("log")
    axes.margins(x=0, y=0.08)
    before = losses[: smoothed.index(min(smoothed)) + 1]
    if min(losses) > 0 and max(losses) > _FAR * max(before):
        axes.set_yscale("log")
    for number, (label, lr) in enumerate(marked.items(), 1):
        color = f"C{number}"
        axes.axvline(lr, color=color, linestyle="--", linewidth=1.2)
        axes.plot(lr, np.interp(lr, lrs, smoothed), "o", color=color, zorder=3)
        place = axes.get_xaxis_transform()  # y is a share of the axis
        axes.annotate(label, (lr, 0.02), (8, 6), place, _POINTS, color=color)
    _finish(axes, "learning rate", "loss")
    _write(path, figure)


def _write(path: Path, figure: "Figure") -> None:
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
