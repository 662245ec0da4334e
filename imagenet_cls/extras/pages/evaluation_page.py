"""The report of an evaluation.

Statistics of classes, confusion and calibration, and a page of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from imagenet_cls.config.metrics import BY_NAME, MIN_CLASSES_FOR_TOP5
from imagenet_cls.data.classes import with_readable_name
from imagenet_cls.extras.pages.evaluation_charts import calibration_chart, confusion_chart
from imagenet_cls.extras.pages.figures import svg
from imagenet_cls.extras.pages.render import render, utf8_text
from imagenet_cls.report.jsonl import describe_result
from imagenet_cls.tasks.outputs import output_names

Statistics = dict[str, Any]

_CALIBRATION_BINS = 15  # as in Guo et al., "On calibration of modern neural networks", 2017
_MAX_PAIRS, _MAX_EXAMPLES = 20, 24
_MAX_MATRIX_CLASSES = 50  # up to which the confusion matrix is drawn


def evaluation_statistics(
    rows: np.ndarray, classes: Sequence[str], name_of: Callable[[int], str]
) -> Statistics:
    """The statistics of an evaluation with one label for each image.

    rows: a record for each image, with `index`, `target`, and `top` and `probabilities` of the
    likeliest classes, likeliest first. name_of: the name of an image by its index. `confusion` is
    int64 (K, K), with a row for each true class; K is the number of classes, or higher where a
    wider head predicts more. The precision of a class that is never predicted, and the recall of
    one without images, are NaN.
    """
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    target = rows["target"]
    prediction = rows["top"][:, 0]
    confidence = rows["probabilities"][:, 0]
    correct = target == prediction
    count = max(len(classes), prediction.max() + 1)
    labels = [utf8_text(name) for name in output_names(classes, count)]
    confusion = confusion_matrix(target, prediction, labels=range(count))
    precision, recall, f1, images = precision_recall_fscore_support(
        target, prediction, labels=range(count), zero_division=np.nan
    )
    columns = {
        "name": labels,
        "precision_pct": 100 * precision,
        "recall_pct": 100 * recall,
        "f1_pct": 100 * f1,
        "images": images,
        "predicted": confusion.sum(axis=0),
    }
    bins = calibration_bins(confidence, correct)
    gaps = [row["images"] * abs(row["accuracy_pct"] - 100 * row["confidence"]) for row in bins]
    by_confidence = np.argsort(-confidence, kind="stable")
    return {
        "num_classes": len(classes),
        "macro_f1_pct": 100 * np.nanmean(f1),
        "ece_pct": sum(gaps) / len(rows),
        "classes": [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ],
        "confusion": confusion,
        "confused": confused_pairs(confusion, labels),
        "calibration": bins,
        "mistakes": [
            {
                "index": int(rows["index"][i]),
                "image": name_of(int(rows["index"][i])),
                "target": labels[target[i]],
                "prediction": labels[prediction[i]],
                "confidence": confidence[i],
            }
            for i in by_confidence[~correct[by_confidence]][:_MAX_EXAMPLES]
        ],
    }


def calibration_bins(confidence: np.ndarray, correct: np.ndarray) -> list[Statistics]:
    """The bins that have images, of equal width with the upper edge."""
    edges = np.linspace(0, 1, _CALIBRATION_BINS + 1)
    number = np.searchsorted(edges[1:-1], confidence)
    return [
        {
            "images": int((number == n).sum()),
            "confidence": confidence[number == n].mean(),
            "accuracy_pct": 100 * correct[number == n].mean(),
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
            "images": wrong[k, m],
            "share_pct": 100 * wrong[k, m] / confusion[k].sum(),
        }
        for k, m in pairs
        if wrong[k, m]
    ]


def evaluation_page(statistics: Mapping[str, Any], thumbnails: Mapping[int, bytes]) -> bytes:
    """The page of an evaluation. statistics: also `model`, `origin`, `weights`, `messages`,
    `settings`, and `metrics` by weights; `confusion` is missing with several labels for an image.

    thumbnails: JPEG files of `mistakes`, by index.
    """
    classes = statistics["classes"]
    by_f1 = sorted(
        classes, key=lambda row: math.inf if math.isnan(row["f1_pct"]) else row["f1_pct"]
    )
    results = statistics["metrics"]
    result = results[statistics["weights"]]
    charts = []
    has_one_label = "confusion" in statistics
    if has_one_label:
        if len(classes) <= _MAX_MATRIX_CLASSES:
            names = [with_readable_name(row["name"]) for row in classes]
            charts.append(confusion_chart(statistics["confusion"], names))
        charts.append(calibration_chart(statistics["calibration"]))
    return render(
        "evaluation.html",
        top1_text=BY_NAME["top1"].format(result.get("top1_pct", 0.0), 2, result["images"]),
        has_one_label=has_one_label,
        charts=[(chart, svg(chart)) for chart in charts],
        title=f"Evaluation of {statistics['model']} ({statistics['origin']})",
        has_top5=statistics["num_classes"] >= MIN_CLASSES_FOR_TOP5,
        result=result,
        results={
            kind: ", ".join(describe_result(row, 3, statistics["num_classes"]))
            for kind, row in results.items()
        },
        num_bins=_CALIBRATION_BINS,
        classes=by_f1,
        statistics=statistics,
        thumbnails=thumbnails,
    )
