"""The report of an evaluation.

Statistics of classes, confusion, calibration and image sizes, and a page of them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from imagenet_cls.report.jsonl import user_metrics
from imagenet_cls.report.page import Html, gallery, heading, image, page, plot, table
from imagenet_cls.text import shorten, utf8_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Statistics = dict[str, Any]

_CALIBRATION_BINS = 15  # as in Guo et al., "On calibration of modern neural networks", 2017
_SIZE_BINS = 5
_MAX_PAIRS, _MAX_EXAMPLES = 20, 12
_MAX_CELLS = 50  # of a side of the confusion matrix's picture
_MAX_NUMBERS = 20  # classes, up to which the cells of the confusion matrix show numbers
_PERCENT, _COUNT = ".2f", ",d"
_WEIGHTS = {"raw": "raw", "ema": "EMA"}
_DETAILS = (
    ("images", "images", _COUNT),
    ("correct", "correct", _COUNT),
    ("balanced accuracy (mean recall of the classes), %", "balanced_accuracy_pct", _PERCENT),
    ("mean F1 of the classes, %", "macro_f1_pct", _PERCENT),
    ("negative log-likelihood", "nll", ".4f"),
    ("expected calibration error", "ece", ".4f"),
    ("mean confidence", "mean_confidence", ".4f"),
)
# Columns of tables: title, key, format.
_CONFUSED = (
    ("true", "target", ""),
    ("predicted", "prediction", ""),
    ("images", "images", _COUNT),
    ("share %", "share_pct", _PERCENT),
)
_CALIBRATION = (
    ("above", "low", ".3f"),
    ("up to", "high", ".3f"),
    ("images", "images", _COUNT),
    ("confidence", "confidence", ".4f"),
    ("accuracy %", "accuracy_pct", _PERCENT),
)
_CLASSES = (
    ("class", "name", ""),
    ("precision %", "precision_pct", _PERCENT),
    ("recall %", "recall_pct", _PERCENT),
    ("F1 %", "f1_pct", _PERCENT),
    ("images", "images", _COUNT),
    ("predicted", "predicted", _COUNT),
)


def evaluation_statistics(
    rows: np.ndarray, classes: Sequence[str], name_of: Callable[[int], str]
) -> tuple[Statistics, np.ndarray]:
    """The statistics of an evaluation, and the confusion matrix, int64 (K, K): a row for each true
    class.

    rows: a record for each image, with `index`, `target`, `height` and `width` (0 where unknown),
    `loss`, and `top` and `probabilities` of the likeliest classes, likeliest first. K is the number
    of classes, or higher where a wider head predicts more. name_of: the name of an image by its
    index. The precision of a class that is never predicted, and the recall of one without images,
    are NaN.
    """
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    index = rows["index"]
    target = rows["target"]
    height = rows["height"]
    width = rows["width"]
    prediction = rows["top"][:, 0]
    confidence = rows["probabilities"][:, 0]
    correct = target == prediction
    count = max(len(classes), prediction.max() + 1)
    labels = [
        *map(utf8_text, classes),
        *(f"class {number}" for number in range(len(classes), count)),
    ]
    confusion = confusion_matrix(target, prediction, labels=range(count))
    precision, recall, f1, images = precision_recall_fscore_support(
        target, prediction, labels=range(count), zero_division=np.nan
    )
    predicted = confusion.sum(axis=0)
    calibration = calibration_bins(confidence, correct)

    def examples(order: np.ndarray) -> list[Statistics]:
        return [
            {
                "index": int(index[i]),
                "image": utf8_text(name_of(int(index[i]))),
                "target": labels[target[i]],
                "prediction": labels[prediction[i]],
                "confidence": float(confidence[i]),
            }
            for i in order[:_MAX_EXAMPLES]
        ]

    by_confidence = np.argsort(-confidence, kind="stable")
    statistics = {
        "images": len(rows),
        "num_classes": len(classes),
        "correct": int(correct.sum()),
        "top1_pct": 100 * float(correct.mean()),
        "balanced_accuracy_pct": 100 * float(recall[images > 0].mean()),
        "macro_f1_pct": 100 * float(np.nanmean(f1)),
        "nll": float(rows["loss"].mean()),
        "ece": sum(
            r["images"] * abs(r["accuracy_pct"] / 100 - r["confidence"]) for r in calibration
        )
        / len(rows),
        "mean_confidence": float(confidence.mean()),
        "classes": [
            {
                "name": labels[k],
                "precision_pct": p,
                "recall_pct": r,
                "f1_pct": f,
                "images": int(images[k]),
                "predicted": int(predicted[k]),
            }
            for k, (p, r, f) in enumerate(
                (100 * np.stack([precision, recall, f1], axis=1)).tolist()
            )
        ],
        "confused": confused_pairs(confusion, labels),
        "calibration": calibration,
        "by_short_side_px": quantile_bins(np.minimum(height, width), correct),
        "by_aspect_ratio": quantile_bins(width / np.maximum(height, 1), correct),
        "mistakes": examples(by_confidence[~correct[by_confidence]]),
        "hits": examples(by_confidence[correct[by_confidence]][::-1]),
    }
    return statistics, confusion


def calibration_bins(confidence: np.ndarray, correct: np.ndarray) -> list[Statistics]:
    """The bins of equal width that have images: `low` < confidence <= `high`."""
    edges = np.linspace(0, 1, _CALIBRATION_BINS + 1)
    number = np.searchsorted(edges[1:-1], confidence)
    return [
        {
            "low": float(edges[n]),
            "high": float(edges[n + 1]),
            "images": int((number == n).sum()),
            "confidence": float(confidence[number == n].mean()),
            "accuracy_pct": 100 * float(correct[number == n].mean()),
        }
        for n in np.unique(number)
    ]


def quantile_bins(values: np.ndarray, correct: np.ndarray) -> list[Statistics]:
    """The accuracy in bins with about equal numbers of images; [] without values. Equal values are
    in one bin.
    """
    if not values.any():
        return []
    highest = np.unique(
        np.quantile(values, np.arange(1, _SIZE_BINS) / _SIZE_BINS, method="inverted_cdf")
    )
    number = np.searchsorted(highest, values)
    return [
        {
            "low": float(values[number == n].min()),
            "high": float(values[number == n].max()),
            "images": int((number == n).sum()),
            "top1_pct": 100 * float(correct[number == n].mean()),
        }
        for n in np.unique(number)
    ]


def confused_pairs(confusion: np.ndarray, labels: Sequence[str]) -> list[Statistics]:
    """The most frequent mistakes: true class, predicted class, images, and their share of the true
    class.
    """
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_MAX_PAIRS]
    pairs = [divmod(int(place), len(labels)) for place in order]
    return [
        {
            "target": labels[k],
            "prediction": labels[m],
            "images": int(wrong[k, m]),
            "share_pct": 100 * float(wrong[k, m] / confusion[k].sum()),
        }
        for k, m in pairs
        if wrong[k, m]
    ]


def evaluation_page(
    statistics: Mapping[str, Any], confusion: np.ndarray, thumbnails: Mapping[int, bytes]
) -> bytes:
    """The page of an evaluation. statistics: also `model`, `weights`, `messages`, `settings`, and
    `metrics` by weights.

    thumbnails: JPEG files of `mistakes` and `hits`, by index.
    """
    classes = statistics["classes"]
    by_f1 = sorted(
        classes, key=lambda row: math.inf if math.isnan(row["f1_pct"]) else row["f1_pct"]
    )
    block = -(-len(classes) // _MAX_CELLS)
    starts = np.arange(0, len(classes), block)
    sums = np.add.reduceat(np.add.reduceat(confusion, starts, axis=0), starts, axis=1)
    reduced = f"A cell sums up {block} by {block} neighboring classes. " if block > 1 else ""
    results = statistics["metrics"]
    result = results.get(statistics["weights"], {})
    columns = [
        ("top-1 %", "top1_pct", ".3f"),
        ("top-5 %", "top5_pct", ".3f"),
        ("loss", "loss", ".4f"),
        ("images", "images", _COUNT),
    ]
    if "real_pct" in result:
        columns += [
            ("ReaL %", "real_pct", ".3f"),
            ("images with ReaL labels", "real_images", _COUNT),
        ]
    own = dict.fromkeys(name for row in results.values() for name in user_metrics(row))
    columns += [(name, name, ".4f") for name in own]
    messages = [*statistics["messages"]]
    if "classes" in result:
        messages.append(
            f"Masked: the outputs of all but {result['classes']} classes are ignored "
            "(eval.classes=present)."
        )

    def examples(rows: Sequence[Statistics]) -> Html:
        return gallery(
            (
                image(thumbnails[row["index"]]),
                [
                    f"{row['prediction']} ({row['confidence']:.4f})",
                    f"true: {row['target']}",
                    row["image"],
                ],
            )
            for row in rows
        )

    parts = [
        heading("Result", *messages),
        table(
            [("weights", ""), *((title, number_format) for title, _, number_format in columns)],
            [[name, *(row.get(key) for _, key, _ in columns)] for name, row in results.items()],
        ),
        heading(
            "Details", f"The sections below show the {_WEIGHTS[statistics['weights']]} weights."
        ),
        table(
            [("", ""), ("value", "s")],
            [[title, format(statistics[key], style)] for title, key, style in _DETAILS],
        ),
        heading(
            "Confusion",
            f"{reduced}Rows: true classes. Color: share of the true class. Counts: confusion.csv.",
        ),
        plot(7, 6, partial(_draw_confusion, sums, [row["name"] for row in classes])),
        heading(
            "Most confused",
            "The most frequent mistakes, and their share of the images of the true class.",
        ),
        _table(_CONFUSED, statistics["confused"]),
        heading(
            "Calibration",
            f"{_CALIBRATION_BINS} bins of equal width by confidence, the probability of the "
            "predicted class. A calibrated model is on the diagonal.",
        ),
        plot(5, 3.6, partial(_draw_calibration, statistics["calibration"])),
        _table(_CALIBRATION, statistics["calibration"]),
    ]
    for key, title, style in (
        ("by_short_side_px", "short side, px", ",.0f"),
        ("by_aspect_ratio", "width / height", ".3f"),
    ):
        if statistics[key]:
            bins = [
                (f"{title}: from", "low", style),
                ("to", "high", style),
                ("images", "images", _COUNT),
                ("top-1 %", "top1_pct", _PERCENT),
            ]
            parts += [heading(f"Accuracy by {title}"), _table(bins, statistics[key])]
    for key, title in (
        ("mistakes", "Most confident mistakes"),
        ("hits", "Least confident correct predictions"),
    ):
        if statistics[key]:
            parts += [
                heading(title, "Predicted class and confidence, true class, image."),
                examples(statistics[key]),
            ]
    parts += [
        heading("Classes", "Lowest F1 first."),
        _table(_CLASSES, by_f1),
        heading("Settings"),
        table([("key", ""), ("value", "")], statistics["settings"].items()),
    ]
    return page(f"Evaluation of {statistics['model']}", parts)


def _table(columns: Sequence[tuple[str, str, str]], rows: Iterable[Statistics]) -> Html:
    """A table of dictionaries. columns: title, key, format."""
    return table(
        [(title, number_format) for title, _, number_format in columns],
        [[row[key] for _, key, _ in columns] for row in rows],
    )


def _draw_confusion(counts: np.ndarray, labels: Sequence[str], figure: "Figure") -> None:
    from matplotlib.colors import LinearSegmentedColormap

    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    blues = LinearSegmentedColormap.from_list("", ["#2f7fd000", "#2f7fd0ff"])  # transparent to blue
    axes.imshow(shares, cmap=blues, vmin=0, vmax=1, interpolation="none")
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    short = [shorten(label, 20) for label in labels] if len(counts) == len(labels) else []
    axes.set_xticks(
        range(len(short)), short, rotation=90 if max(map(len, short), default=0) > 2 else 0
    )
    axes.set_yticks(range(len(short)), short)
    for k, m in np.argwhere(counts) if len(counts) <= _MAX_NUMBERS else ():
        axes.text(m, k, str(counts[k, m]), ha="center", va="center")


def _draw_calibration(rows: Sequence[Statistics], figure: "Figure") -> None:
    axes = figure.subplots()
    axes.plot([0, 1], [0, 100], color="gray", linestyle="--", linewidth=0.8)
    middles = [(row["low"] + row["high"]) / 2 for row in rows]
    accuracy = [row["accuracy_pct"] for row in rows]
    axes.bar(middles, accuracy, 0.9 / _CALIBRATION_BINS, color="#2f7fd0", alpha=0.6)
    axes.plot([row["confidence"] for row in rows], accuracy, "o", color="#d9822b", clip_on=False)
    axes.set(xlim=(0, 1), ylim=(0, 100), xlabel="confidence", ylabel="accuracy (%)")
