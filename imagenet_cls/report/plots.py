"""Pictures: the curves of a run, past or to come, as PNG files, and a batch of images with their labels.

Owns how they look. Draws with matplotlib's objects and its Agg canvas, never with pyplot, whose figures and back end
are global and may want a display. Imports matplotlib inside the functions, since it takes half a second. Called by
`reporter` at the end of a run, by `tensorboard`, and by `schedule_plot`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from imagenet_cls.report.jsonl import Record, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_WINDOWS = 200  # of the running mean: fewer hide what happened, more show the noise of single batches


def plot_run(metrics: Sequence[Record], folder: Path) -> list[Path]:
    """Draw `loss.png`, `lr.png` and `top1.png` into `folder` and return the paths of those that there are records for.

    metrics: records as `jsonl` describes them, of one run, in order. Values that are not finite leave gaps. Existing
    files are replaced. Raises ResourceError where the file system refuses.
    """
    train = [record for record in metrics if record["kind"] == "train"]
    evaluations = {
        weights: [record for record in metrics if record["kind"] == "eval" and record["weights"] == weights]
        for weights in ("raw", "ema")
    }
    paths = []
    if train:
        paths.append(_plot(folder / "loss.png", "loss", lambda axes: _draw_loss(axes, train, evaluations)))
        paths.append(
            _plot(
                folder / "lr.png", "learning rate", lambda axes: axes.plot(_column(train, "step"), _column(train, "lr"))
            )
        )
    if any(evaluations.values()):
        paths.append(
            _plot(folder / "top1.png", "top-1 on validation images (%)", lambda axes: _draw_top1(axes, evaluations))
        )
    return paths


def plot_course(path: Path, title: str, epochs: Sequence[float], panels: Mapping[str, Sequence[float]]) -> None:
    """Draw what a run will go through: a panel for each quantity, one above the other, over the epochs.

    panels: values at `epochs`, by the label of their axis; at least one. An existing file is replaced. Raises OSError
    where the file system refuses.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 2.2 * len(panels)), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes_of_panels = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, values) in zip(axes_of_panels, panels.items(), strict=True):
        axes.plot(epochs, values)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if min(values) == max(values):  # else matplotlib zooms in on nothing
            axes.set_ylim(0, 1.25 * max(values) or 1.0)
    axes_of_panels[0].set_title(title, parse_math=False)
    axes_of_panels[-1].set_xlabel("epoch")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))


def draw_batch(images: np.ndarray, labels: Sequence[str], columns: int = 8) -> np.ndarray:
    """One picture of a batch, row by row, with the label above each image.

    images: uint8 (B, 3, H, W), B >= 1. labels: B texts; what is longer than an image is wide is cut with an ellipsis.
    Returns uint8 (height, width, 3).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    assert len(images) == len(labels) > 0
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(1.6 * columns, 1.8 * rows), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        axes.set_axis_off()
        if number < len(images):
            axes.imshow(images[number].transpose(1, 2, 0), interpolation="nearest")
            label = labels[number] if len(labels[number]) <= 22 else labels[number][:21] + "…"
            axes.set_title(label, fontsize=8, parse_math=False)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _plot(path: Path, label: str, draw: Any) -> Path:
    """Save one figure with steps on its x axis. draw: called with the axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw(axes)
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.print_png(str(path))
    return path


def _draw_loss(axes: "Axes", train: list[Record], evaluations: dict[str, list[Record]]) -> None:
    """The loss of every step in a pale colour, its running mean above it, and the loss of each evaluation."""
    steps, losses = _column(train, "step"), _column(train, "loss")
    window = math.ceil(len(train) / _MOST_WINDOWS)
    if window > 1:
        axes.plot(steps, losses, alpha=0.25, linewidth=0.8, color="C0")
        mean_steps, mean_losses = steps[window - 1 :], np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(mean_steps, mean_losses, color="C0", label=f"training, mean of {window} steps")
    else:
        axes.plot(steps, losses, color="C0", label="training")
    for weights, records in evaluations.items():
        if records:
            axes.plot(
                _column(records, "step"), _column(records, "loss"), marker="o", label=f"validation, {weights} weights"
            )


def _draw_top1(axes: "Axes", evaluations: dict[str, list[Record]]) -> None:
    """Top-1 of each evaluation, raw and EMA weights side by side."""
    for weights, records in evaluations.items():
        if records:
            axes.plot(_column(records, "step"), _column(records, "top1_pct"), marker="o", label=f"{weights} weights")


def _column(records: list[Record], key: str) -> np.ndarray:
    """One field of all records as float64; what is missing or not finite is NaN, which matplotlib leaves out."""
    values = np.array([record.get(key, math.nan) for record in records], dtype=np.float64)
    return np.where(np.isfinite(values), values, math.nan)
