"""The figures of an evaluation: accuracy of the classes, confusion matrix, calibration."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from imagenet_cls.data.classes import with_readable_name
from imagenet_cls.extras.pages.figures import BLUE, GREY, ORANGE, SIZE, Chart, tinted
from imagenet_cls.extras.pages.render import utf8_text
from imagenet_cls.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BARS = 30  # classes
_MOST_NUMBERS = 20  # classes, up to which the cells of the confusion matrix show numbers
_NAME = 24  # characters


def chart_of_classes(title: str, result: Mapping[str, Any], weights: str) -> Chart:
    """Bars of the classes with images, lowest first. result: the content of `classes.json`.
    weights: raw or ema.
    """
    names = map(utf8_text, result["classes"])
    by_class = result[weights]
    rows = zip(by_class["class_pct"], names, by_class["class_images"], strict=False)
    known = sorted((float(pct), name, int(n)) for pct, name, n in rows if pct is not None)
    shown = known[:_MOST_BARS]
    title += f" by class, epoch {result['epoch'] + 1}"
    if len(known) > _MOST_BARS:
        title += f": the lowest {_MOST_BARS} of {len(known)}"
    return Chart(title, partial(_draw_bars, shown), (SIZE[0], max(SIZE[1], 1 + 0.22 * len(shown))))


def _draw_bars(rows: Sequence[tuple[float, str, int]], axes: "Axes") -> None:
    places = range(len(rows))
    axes.barh(places, [pct for pct, _, _ in rows], color=BLUE, height=0.7)
    labels = [
        f"{shorten(with_readable_name(name), _NAME)} ({images:,})" for _, name, images in rows
    ]
    axes.set_yticks(places, labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("% (number of images)")


def confusion_chart(confusion: np.ndarray, names: Sequence[str]) -> Chart:
    """The confusion matrix: rows are true classes. confusion: int64 (K, K)."""
    size = 1.6 * SIZE[0], 1.4 * SIZE[0]
    return Chart("Confusion matrix", partial(_draw_matrix, confusion, names), size)


def _draw_matrix(confusion: np.ndarray, names: Sequence[str], axes: "Axes") -> None:
    """The opacity of a cell is the share of the images of the true class; of mistakes relative to
    the largest share.
    """
    count = len(names)
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    is_correct = np.eye(count, dtype=bool)
    largest = shares[~is_correct].max(initial=0) or 1
    mistakes = tinted(ORANGE, shares / largest * ~is_correct)
    cells = np.where(is_correct[..., None], tinted(BLUE, shares), mistakes)
    axes.imshow(cells, interpolation="none", aspect="auto")
    axes.grid(visible=False)
    size = 12 if count <= _MOST_NUMBERS else 9
    labels = [shorten(name, _NAME) for name in names]
    axes.set_xticks(range(count), labels, rotation="vertical", fontsize=size)
    axes.set_yticks(range(count), labels, fontsize=size)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if count <= _MOST_NUMBERS:
        for (row, column), images in np.ndenumerate(confusion):
            if images:
                axes.text(column, row, f"{images:,}", ha="center", va="center", fontsize=size - 1)


def calibration_chart(bins: Sequence[Mapping[str, Any]]) -> Chart:
    """The reliability diagram. bins: of `calibration_bins`."""
    return Chart("Reliability diagram", partial(_draw_reliability, bins))


def _draw_reliability(bins: Sequence[Mapping[str, Any]], axes: "Axes") -> None:
    """The area of a point grows with the share of the images."""
    confidences, accuracies, images = (
        [row[key] for row in bins] for key in ("confidence", "accuracy_pct", "images")
    )
    axes.plot([0, 1], [0, 100], color=GREY, linestyle="--", label="calibrated")
    areas = 20 + 600 * np.array(images) / sum(images)
    axes.scatter(confidences, accuracies, areas, color=BLUE, clip_on=False, label="bins")
    axes.set(xlim=(0, 1), ylim=(0, 102), xlabel="mean confidence", ylabel="accuracy, %")
    axes.legend(loc="upper left")
