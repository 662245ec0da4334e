"""The pictures of these commands: their file, and how they are drawn.

matplotlib is imported inside the functions, since that takes half a second.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.commands import cli
from imagenet_cls.config.load import LoadedConfig
from imagenet_cls.errors import UsageError
from imagenet_cls.extras.pages.figures import write_figure
from imagenet_cls.files import check_replaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_LABEL = 24  # characters of a line


def add_picture_option(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add --out of a command that draws a picture, for `picture_path`."""
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE.png",
        help=f"default: reports/<config name>_{kind}.png",
    )


def picture_path(arguments: argparse.Namespace, loaded: LoadedConfig, kind: str) -> Path:
    """The file to draw. Raises UsageError for one that is no PNG file, or that is the user's."""
    out = arguments.out or Path(f"reports/{loaded.name}_{kind}.png")
    if out.suffix.lower() != ".png" or out.is_dir():
        raise UsageError(f"--out {out}: the picture is a PNG file.", "Name it *.png.")
    check_replaced(out)
    return out


def images_figure(images: np.ndarray, labels: Sequence[str]) -> "Figure":
    """Images in rows of eight, each with its label above it.

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
    return figure


def plot_lr_range(
    path: Path,
    lrs: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggestion: float,
) -> None:
    """Draw losses over learning rates on logarithmic axes, and mark one of them. Raises
    OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure((8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(lrs, losses, color="C0", alpha=0.35, linewidth=1, label="loss of each step")
    axes.plot(lrs, smoothed, color="C0", linewidth=2, label="smoothed")
    axes.axvline(suggestion, color="C1", linestyle="--", label=f"suggestion: {suggestion:.2g}")
    axes.set(xlabel="learning rate", ylabel="loss", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    write_figure(path, figure)
