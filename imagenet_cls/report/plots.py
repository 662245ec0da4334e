"""PNG files: the curves of a run, of a schedule or of a learning rate range test.

Figures are drawn without pyplot, whose figures and backend are global. matplotlib is imported inside the functions,
since that takes half a second.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.files import write_file
from imagenet_cls.report.jsonl import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LABEL = 24  # characters of a line
_MAX_WINDOWS = 200  # of the running mean: fewer hide changes, more show the noise of single batches


def plot_run(metrics: Sequence[Record], folder: Path) -> None:
    """Draw `loss.png`, `lr.png` and `top1.png` into `folder`. Existing files are replaced. Raises OSError.

    metrics: the records of one run, in order, see `jsonl`. Values that are not finite leave gaps.
    """
    train = [record for record in metrics if record["kind"] == "train"]
    steps, losses = _column(train, "step"), _column(train, "loss")
    with _plot(folder / "loss.png", "loss") as axes:
        window = math.ceil(len(train) / _MAX_WINDOWS)
        if window > 1:
            axes.plot(steps, losses, alpha=0.25, linewidth=0.8, color="C0")
            mean_losses = np.convolve(losses, np.full(window, 1 / window), mode="valid")
            axes.plot(steps[window - 1 :], mean_losses, color="C0", label=f"training, mean of {window} steps")
        else:
            axes.plot(steps, losses, color="C0", label="training")
        _draw_evaluations(axes, metrics, "loss", "validation, {} weights")
    with _plot(folder / "lr.png", "learning rate") as axes:
        axes.plot(steps, _column(train, "lr"))
    with _plot(folder / "top1.png", "top-1 on validation images (%)") as axes:
        _draw_evaluations(axes, metrics, "top1_pct", "{} weights")


def plot_images(path: Path, images: np.ndarray, labels: Sequence[str]) -> None:
    """Draw images in rows of eight, each with its label above. An existing file is replaced. Raises OSError.

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
        axes.set_title("\n".join(line[:_MAX_LABEL] for line in label.split("\n")), fontsize=7, parse_math=False)
    _write(path, figure)


def plot_panels(path: Path, title: str, epochs: Sequence[float], panels: Mapping[str, Sequence[float]]) -> None:
    """Draw quantities over the epochs, each in a panel, one below the other.

    panels: values at `epochs`, by the label of their axis; at least one. An existing file is replaced. Raises OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure((8, 1 + 2.2 * len(panels)), dpi=120, layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, values) in zip(all_axes, panels.items(), strict=True):
        axes.plot(epochs, values)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if min(values) == max(values):  # otherwise matplotlib magnifies rounding errors
            axes.set_ylim(0, 1.25 * max(values) or 1.0)
    all_axes[0].set_title(title, parse_math=False)
    all_axes[-1].set_xlabel("epoch")
    _write(path, figure)


def plot_lr_range(
    path: Path, lrs: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], marked: Mapping[str, float]
) -> None:
    """Draw losses over learning rates on a logarithmic axis. marked: learning rates by label. Raises OSError."""
    with _plot(path, "loss", "learning rate") as axes:
        axes.plot(lrs, losses, alpha=0.25, linewidth=0.8, color="C0")
        axes.plot(lrs, smoothed, color="C0", label="smoothed")
        for number, (label, lr) in enumerate(marked.items(), 1):
            axes.axvline(lr, color=f"C{number}", linestyle="--", label=label)
        axes.set_xscale("log")
        lowest = min(smoothed)
        height = max(smoothed[: smoothed.index(lowest) + 1]) - lowest
        axes.set_ylim(lowest - height / 2, lowest + 2 * height)  # a loss that diverges would hide the rest


@contextmanager
def _plot(path: Path, label: str, x_label: str = "step") -> "Iterator[Axes]":
    """Axes, by default over the steps of a run, which are saved to `path` at the end."""
    from matplotlib.figure import Figure

    figure = Figure((8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.set_xlabel(x_label)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    _write(path, figure)


def _write(path: Path, figure: "Figure") -> None:
    """Write a PNG file whole or not at all. Raises OSError."""
    content = BytesIO()
    figure.savefig(content, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content.getvalue())


def _draw_evaluations(axes: "Axes", metrics: Sequence[Record], key: str, label: str) -> None:
    """One field of the evaluations, raw and EMA weights side by side."""
    for weights in ("raw", "ema"):
        records = [record for record in metrics if record["kind"] == "eval" and record["weights"] == weights]
        if records:
            axes.plot(_column(records, "step"), _column(records, key), marker="o", label=label.format(weights))


def _column(records: Sequence[Record], key: str) -> np.ndarray:
    """One field of all records. matplotlib leaves out values that are not finite."""
    return np.array([record[key] for record in records], dtype=np.float64)
