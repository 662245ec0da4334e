"""The report of an evaluation.

Statistics of classes, confusion and calibration, and a page of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from imagenet_cls.config.metrics import BY_NAME, MIN_CLASSES_FOR_TOP5, metrics_of
from imagenet_cls.data.classes import with_readable_name
from imagenet_cls.extras.pages.evaluation_charts import calibration_charts, confusion_chart
from imagenet_cls.extras.pages.figures import svg
from imagenet_cls.extras.pages.render import render, utf8_text
from imagenet_cls.report.jsonl import user_metrics
from imagenet_cls.tasks.outputs import output_names

Statistics = dict[str, Any]

_CALIBRATION_BINS = 15  # as in Guo et al., "On calibration of modern neural networks", 2017
_MAX_PAIRS, _MAX_EXAMPLES = 20, 12
_MAX_MATRIX_CLASSES = 50  # up to which the confusion matrix is drawn
_WEIGHTS = {"raw": "raw", "ema": "EMA"}


def evaluation_statistics(
    rows: np.ndarray, classes: Sequence[str], name_of: Callable[[int], str]
) -> tuple[Statistics, np.ndarray]:
    """The statistics of an evaluation, and the confusion matrix, int64 (K, K): a row for each true
    class.

    rows: a record for each image, with `index`, `target`, `loss`, and `top` and `probabilities` of
    the likeliest classes, likeliest first. K is the number of classes, or higher where a wider head
    predicts more. name_of: the name of an image by its index. The precision of a class that is
    never predicted, and the recall of one without images, are NaN.
    """
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    index = rows["index"]
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
    predicted = confusion.sum(axis=0)
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    mistaken = wrong.argmax(axis=1)
    calibration = calibration_bins(confidence, correct)

    def examples(order: np.ndarray) -> list[Statistics]:
        return [
            {
                "index": int(index[i]),
                "image": utf8_text(name_of(int(index[i]))),
                "target": labels[target[i]],
                "prediction": labels[prediction[i]],
                "confidence": confidence[i],
            }
            for i in order[:_MAX_EXAMPLES]
        ]

    by_confidence = np.argsort(-confidence, kind="stable")
    statistics = {
        "images": len(rows),
        "num_classes": len(classes),
        "correct": int(correct.sum()),
        "top1_pct": 100 * correct.mean(),
        "balanced_accuracy_pct": 100 * recall[images > 0].mean(),
        "macro_f1_pct": 100 * np.nanmean(f1),
        "nll": rows["loss"].mean(),
        "ece": sum(
            r["images"] * abs(r["accuracy_pct"] / 100 - r["confidence"]) for r in calibration
        )
        / len(rows),
        "mean_confidence": confidence.mean(),
        "classes": [
            {
                "name": labels[k],
                "precision_pct": p,
                "recall_pct": r,
                "f1_pct": f,
                "images": int(images[k]),
                "predicted": int(predicted[k]),
                "mistaken_for": labels[mistaken[k]] if wrong[k].any() else None,
                "mistaken_images": int(wrong[k, mistaken[k]]),
            }
            for k, (p, r, f) in enumerate(
                (100 * np.stack([precision, recall, f1], axis=1)).tolist()
            )
        ],
        "confused": confused_pairs(confusion, labels),
        "calibration": calibration,
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
            "low": edges[n],
            "high": edges[n + 1],
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
            "images": int(wrong[k, m]),
            "share_pct": 100 * wrong[k, m] / confusion[k].sum(),
        }
        for k, m in pairs
        if wrong[k, m]
    ]


def evaluation_page(
    statistics: Mapping[str, Any],
    confusion: np.ndarray | None,
    thumbnails: Mapping[int, bytes],
) -> bytes:
    """The page of an evaluation. statistics: also `model`, `origin`, `weights`, `messages`,
    `settings`, and `metrics` by weights.

    confusion: None with several labels for an image. thumbnails: JPEG files of `mistakes` and
    `hits`, by index.
    """
    classes = statistics["classes"]
    by_f1 = sorted(
        classes, key=lambda row: math.inf if math.isnan(row["f1_pct"]) else row["f1_pct"]
    )
    results = statistics["metrics"]
    result = results.get(statistics["weights"], {})
    messages = [*statistics["messages"]]
    if "classes" in result:
        messages.append(
            f"Masked: the outputs of all but {result['classes']} classes are ignored "
            "(eval.classes=present)."
        )
    has_top5 = len(classes) >= MIN_CLASSES_FOR_TOP5
    columns = _result_columns(results, len(classes))
    matrix = None
    calibration = []
    if confusion is not None:
        charts = calibration_charts(statistics["calibration"])
        calibration = [(chart, svg(chart)) for chart in charts]
        if len(classes) <= _MAX_MATRIX_CLASSES:
            chart = confusion_chart(confusion, [with_readable_name(row["name"]) for row in classes])
            matrix = chart, svg(chart)
    return render(
        "evaluation.html",
        top1_text=BY_NAME["top1"].format(result.get("top1_pct", 0.0), 2, statistics["images"]),
        has_one_label=confusion is not None,
        matrix=matrix,
        calibration=calibration,
        title=f"Evaluation of {statistics['model']} ({statistics['origin']})",
        has_top5=has_top5,
        result=result,
        messages=messages,
        columns=[("weights", ""), *((title, style) for title, _, style in columns)],
        results=[[name, *(row.get(key) for _, key, _ in columns)] for name, row in results.items()],
        weights=_WEIGHTS[statistics["weights"]],
        num_bins=_CALIBRATION_BINS,
        classes=by_f1,
        statistics=statistics,
        thumbnails=thumbnails,
    )


def _result_columns(
    results: Mapping[str, Mapping[str, Any]], num_classes: int
) -> list[tuple[str, str, str]]:
    """The columns of the results of weights: title, key, format."""
    first = next(iter(results.values()))
    columns = []
    for metric in metrics_of(first):
        if metric.is_shown(first, num_classes):
            unit, style = (" %", ".3f") if metric.is_percent else ("", ".4f")
            columns.append((metric.title + unit, metric.field, style))
    columns.append(("images", "images", ",d"))
    own = dict.fromkeys(name for row in results.values() for name in user_metrics(row))
    return [*columns, *((name, name, ".4f") for name in own)]
