"""The report of an evaluation, for `test.py --report`: a page, its numbers, confusions."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from imagenet_cls.errors import UsageError
from imagenet_cls.extras.pages.evaluation_page import evaluation_page, evaluation_statistics
from imagenet_cls.extras.pages.render import to_jpeg, utf8_text
from imagenet_cls.files import (
    check_output_path,
    check_replaced,
    explain_write_errors,
    write_file,
)
from imagenet_cls.inference.evaluate_weights import WeightsEvaluation, prediction_rows
from imagenet_cls.report.jsonl import finite_json
from imagenet_cls.tasks.multi_label import MultiLabel

_THUMBNAIL_PX = 160
_MAX_EXAMPLES = 12  # with several labels
_REMEDY = "Name another folder with --report."


class EvaluationReport:
    """A folder with report.html, report.json and, with one label for an image, confusion.csv.

    An earlier report in it will be replaced. Raises UsageError for a folder with another page,
    ResourceError if it can't be written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.page = folder / "report.html"
        if folder.is_file():
            raise UsageError(f"{folder} is a file.", _REMEDY)
        is_new = not folder.exists()
        with explain_write_errors(folder, _REMEDY):
            folder.mkdir(parents=True, exist_ok=True)
            check_replaced(self.page, "--report")
            if not self.page.exists():
                for name in ("report.json", "confusion.csv"):
                    check_output_path(folder / name, "--report")
            if is_new:  # a later check may fail
                folder.rmdir()

    def write(self, evaluation: WeightsEvaluation) -> None:
        """Write the files. evaluation: with recorded rows. Raises ResourceError."""
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
        confusion = None
        if isinstance(evaluation.task, MultiLabel):
            statistics = multilabel_statistics(evaluation, evaluation.task)
        else:
            statistics, confusion = evaluation_statistics(rows, classes, images.name)
        statistics = {
            "model": evaluation.model_name,
            "origin": evaluation.origin,
            "weights": evaluation.kind,
            "messages": evaluation.messages,
            "metrics": evaluation.results,
            "settings": evaluation.settings,
            **statistics,
        }
        thumbnails = {}
        for example in [*statistics["mistakes"], *statistics.get("hits", [])]:
            pixels, _ = images.load(example["index"])
            picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            thumbnails[example["index"]] = to_jpeg(picture, _THUMBNAIL_PX)
        page = evaluation_page(statistics, confusion, thumbnails)
        folder = self.folder
        with explain_write_errors(folder, _REMEDY):
            folder.mkdir(exist_ok=True)
            (folder / "confusion.csv").unlink(missing_ok=True)  # of an earlier report
            if confusion is not None:
                names = [row["name"] for row in statistics["classes"]]
                write_file(folder / "confusion.csv", confusion_table(confusion, names))
            write_file(folder / "report.json", finite_json(statistics))
            write_file(self.page, page)


def multilabel_statistics(evaluation: WeightsEvaluation, task: MultiLabel) -> dict[str, Any]:
    """The statistics of an evaluation with several labels: those of the classes, and the images
    with the highest loss as `mistakes`.
    """
    rows = evaluation.rows
    assert rows is not None
    names = list(map(utf8_text, evaluation.images.classes))
    logits, targets = (torch.from_numpy(rows[name].astype("f4")) for name in ("logits", "target"))
    losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    worst = losses.mean(1).argsort(descending=True, stable=True)[:_MAX_EXAMPLES]
    mistakes = []
    for row in prediction_rows(replace(evaluation, rows=rows[worst.numpy()])):
        texts = {
            "image": utf8_text(row["image"]),
            "target": list(map(utf8_text, row["target"])),
            "top": [(utf8_text(name), probability) for name, probability in row["top"]],
        }
        mistakes.append(row | texts)
    return {
        "images": len(rows),
        "num_classes": len(names),
        "threshold": task.threshold,
        "classes": task.class_statistics(rows, names),
        "mistakes": mistakes,
    }


def confusion_table(confusion: np.ndarray, names: Sequence[str]) -> str:
    """The confusion matrix as CSV. names: of the classes."""
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["true \\ predicted", *names])
    for name, counts in zip(names, confusion.tolist(), strict=True):
        writer.writerow([name, *counts])
    return table.getvalue()
