"""The report of an evaluation, for `test.py --report`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from imagenet_cls.extras.pages.evaluation_page import evaluation_page, evaluation_statistics
from imagenet_cls.extras.pages.render import check_page, to_jpeg, write_html
from imagenet_cls.inference.evaluate_weights import WeightsEvaluation, prediction_rows
from imagenet_cls.tasks.multi_label import MultiLabel

_THUMBNAIL_PX = 160
_MAX_EXAMPLES = 12  # with several labels


class EvaluationReport:
    """The page of an evaluation. An earlier page is replaced. Raises UsageError for another
    file.
    """

    def __init__(self, page: Path):
        self.page = page
        check_page(page)

    def write(self, evaluation: WeightsEvaluation) -> None:
        """Write the page. evaluation: with recorded rows. Raises ResourceError."""
        images = evaluation.images
        statistics = report_statistics(evaluation)
        thumbnails = {}
        for example in statistics["mistakes"]:
            pixels, _ = images.load(example["index"])
            picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            thumbnails[example["index"]] = to_jpeg(picture, _THUMBNAIL_PX)
        write_html(self.page, evaluation_page(statistics, thumbnails))


def report_statistics(evaluation: WeightsEvaluation) -> dict[str, Any]:
    """What the page shows: see `evaluation_page`."""
    images = evaluation.images
    rows = evaluation.rows
    assert rows is not None
    classes = images.classes
    if evaluation.present is not None:  # the report has only the classes that have images
        present = evaluation.present.numpy()
        classes = tuple(classes[i] for i in present)
        rows = rows.copy()
        # Only the likeliest class is used below. It is present; less likely ones may be absent,
        # and get wrong numbers.
        for name in ("target", "top"):
            rows[name] = np.searchsorted(present, rows[name])
    if isinstance(evaluation.task, MultiLabel):
        statistics = multilabel_statistics(evaluation, evaluation.task)
    else:
        statistics = evaluation_statistics(rows, classes, images.name)
    return {
        "model": evaluation.model_name,
        "origin": evaluation.origin,
        "weights": evaluation.kind,
        "messages": evaluation.messages,
        "metrics": evaluation.results,
        "settings": evaluation.settings,
        **statistics,
    }


def multilabel_statistics(evaluation: WeightsEvaluation, task: MultiLabel) -> dict[str, Any]:
    """The statistics of an evaluation with several labels: those of the classes, and the images
    with the highest loss as `mistakes`.
    """
    rows = evaluation.rows
    assert rows is not None
    logits, targets = (torch.from_numpy(rows[name].astype("f4")) for name in ("logits", "target"))
    losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    worst = losses.mean(1).argsort(descending=True, stable=True)[:_MAX_EXAMPLES]
    return {
        "num_classes": len(evaluation.images.classes),
        "threshold": task.threshold,
        "classes": task.class_statistics(rows, evaluation.images.classes),
        "mistakes": list(prediction_rows(replace(evaluation, rows=rows[worst.numpy()]))),
    }
