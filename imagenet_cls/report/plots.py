"""PNG files: the curves of a run or of a schedule, and a batch of images with their labels.

Draws on matplotlib's Agg canvas without pyplot, whose figures and backend are global. Imports matplotlib inside the
functions, since that takes half a second.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from imagenet_cls.files import explain_write_errors
from imagenet_cls.report.jsonl import WRITE_REMEDY, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_WINDOWS = 200  # of the running mean: fewer hide changes, more show the noise of single batches


def plot_run(metrics: Sequence[Record], folder: Path) -> list[Path]:
    """Draw `loss.png`, `lr.png` and `top1.png` into `folder`; return the paths of those that have records.

    metrics: the records of one run, in order, see `jsonl`. Values that are not finite leave gaps. Existing files are
    replaced. Raises ResourceError where the file system fails.
    """
    train = [record for record in metrics if record["kind"] == "train"]
    evaluations = {
        weights: [record for record in metrics if record["kind"] == "eval" and record["weights"] == weights]
        for weights in ("raw", "ema")
    }
    drawings: dict[str, tuple[str, Any]] = {}
    if train:
        drawings["loss.png"] = ("loss", lambda axes: _draw_loss(axes, train, evaluations))
        drawings["lr.png"] = ("learning rate", lambda axes: axes.plot(_column(train, "step"), _column(train, "lr")))
    if any(evaluations.values()):
        drawings["top1.png"] = (
            "top-1 on validation images (%)",
            lambda axes: _draw_evaluations(axes, evaluations, "top1_pct", "{} weights"),
        )
    for name, (label, draw) in drawings.items():
        figure = _figure((8, 4.5), dpi=120)
        axes = figure.subplots()
        draw(axes)
        axes.set_xlabel("step (optimizer updates)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        with explain_write_errors(folder / name, WRITE_REMEDY):
            _save(figure, folder / name)
    return [folder / name for name in drawings]


def plot_panels(path: Path, title: str, epochs: Sequence[float], panels: Mapping[str, Sequence[float]]) -> None:
    """Draw quantities over the epochs, each in a panel, one below the other.

    panels: values at `epochs`, by the label of their axis; at least one. An existing file is replaced. Raises OSError.
    """
    figure = _figure((8, 1 + 2.2 * len(panels)), dpi=120)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, values) in zip(all_axes, panels.items(), strict=True):
        axes.plot(epochs, values)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if min(values) == max(values):  # else matplotlib magnifies rounding errors
            axes.set_ylim(0, 1.25 * max(values) or 1.0)
    all_axes[0].set_title(title, parse_math=False)
    all_axes[-1].set_xlabel("epoch")
    _save(figure, path)


def draw_batch(images: np.ndarray, labels: Sequence[str], columns: int = 8) -> np.ndarray:
    """One picture of a batch, row by row, with the label above each image.

    images: uint8 (B, 3, H, W), B >= 1. labels: B texts; long ones are cut with an ellipsis. Returns uint8
    (height, width, 3).
    """
    assert len(images) == len(labels) > 0
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    figure = _figure((1.6 * columns, 1.8 * rows), dpi=100)
    for number, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.set_axis_off()
        if number < len(images):
            axes.imshow(images[number].transpose(1, 2, 0), interpolation="nearest")
            label = labels[number] if len(labels[number]) <= 22 else labels[number][:21] + "…"
            axes.set_title(label, fontsize=8, parse_math=False)
    canvas: Any = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _figure(size_inches: tuple[float, float], dpi: int) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: "Figure", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_loss(axes: "Axes", train: list[Record], evaluations: dict[str, list[Record]]) -> None:
    """The loss of every step in a pale colour, its running mean above it, and the loss of each evaluation."""
    steps, losses = _column(train, "step"), _column(train, "loss")
    window = math.ceil(len(train) / _MOST_WINDOWS)
    if window > 1:
        axes.plot(steps, losses, alpha=0.25, linewidth=0.8, color="C0")
        mean_losses = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(steps[window - 1 :], mean_losses, color="C0", label=f"training, mean of {window} steps")
    else:
        axes.plot(steps, losses, color="C0", label="training")
    _draw_evaluations(axes, evaluations, "loss", "validation, {} weights")


def _draw_evaluations(axes: "Axes", evaluations: dict[str, list[Record]], key: str, label: str) -> None:
    """One field of the evaluations, raw and EMA weights side by side."""
    for weights, records in evaluations.items():
        if records:
            axes.plot(_column(records, "step"), _column(records, key), marker="o", label=label.format(weights))


def _column(records: list[Record], key: str) -> np.ndarray:
    """One field of all records as float64; what is missing or not finite is NaN, which matplotlib leaves out."""
    values = np.array([record.get(key, math.nan) for record in records], dtype=np.float64)
    return np.where(np.isfinite(values), values, math.nan)
