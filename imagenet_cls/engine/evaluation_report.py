"""`tools/test.py --report`: record every prediction of an evaluation, and write the report of it."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from imagenet_cls.data.decode import ChooseBox
from imagenet_cls.data.sources import ImageSource, SubsetSource
from imagenet_cls.data.turbojpeg import Box
from imagenet_cls.engine.evaluate import Outputs
from imagenet_cls.files import explain_write_errors, write_file
from imagenet_cls.report.evaluation import ROW, evaluation_page, evaluation_statistics
from imagenet_cls.report.page import to_jpeg

_THUMBNAIL_PX = 160


class MeasuredSource(SubsetSource):
    """All images of another source, of which it records the size of each that is read for a batch.

    sizes: int32 (N, 2), height and width, in memory that the workers share; 0 for images that were not read.
    """

    def __init__(self, source: ImageSource):
        super().__init__(source, np.arange(len(source)))
        self.sizes = torch.zeros(len(source), 2, dtype=torch.int32).share_memory_()

    def load_region(self, i: int, choose: ChooseBox) -> tuple[torch.Tensor, Box, int]:
        def choose_and_record(height: int, width: int) -> Box:
            self.sizes[i] = torch.tensor((height, width))
            return choose(height, width)

        return super().load_region(i, choose_and_record)


def record_rows(
    outputs: Iterable[Outputs], name: str, sizes: torch.Tensor, parts: list[np.ndarray]
) -> Iterator[Outputs]:
    """Yield outputs unchanged, and append an array of `ROW` for each batch. name: of the weights."""
    for logits, targets, indices in outputs:
        own = logits[name]
        best = own.topk(min(5, own.shape[1]), dim=1).indices[:, 0]  # as `evaluate`, also for ties
        rows = np.empty(len(targets), ROW)
        rows["index"], rows["target"], rows["prediction"] = indices.cpu(), targets.cpu(), best.cpu()
        rows["height"], rows["width"] = sizes[indices.cpu()].T
        rows["confidence"] = own.softmax(dim=1).gather(1, best[:, None])[:, 0].cpu()
        rows["loss"] = functional.cross_entropy(own, targets, reduction="none").cpu()
        parts.append(rows)
        yield logits, targets, indices


def write_report(
    folder: Path, rows: np.ndarray, source: ImageSource, present: torch.Tensor | None, about: Mapping[str, Any]
) -> None:
    """Write report.json, report.html and confusion.csv. Raises ResourceError.

    rows: of all images, in any order. present: the report has only these classes, see `EvaluationLabels`.
    """
    rows = np.sort(rows, order="index")
    assert np.array_equal(rows["index"], np.arange(len(source)))  # each image exactly once
    classes = source.classes
    if present is not None:
        classes = tuple(classes[i] for i in present.tolist())
        for name in ("target", "prediction"):
            rows[name] = np.searchsorted(present.numpy(), rows[name])
    statistics, confusion = evaluation_statistics(rows, classes, source.name)
    statistics = {**about, **statistics}
    shown = {row["index"] for row in [*statistics["mistakes"], *statistics["hits"]]}
    pictures = {i: Image.fromarray(source.load(i)[0].permute(1, 2, 0).numpy()) for i in shown}
    thumbnails = {i: to_jpeg(picture, _THUMBNAIL_PX) for i, picture in pictures.items()}
    page = evaluation_page(statistics, confusion, thumbnails)
    table = io.StringIO(newline="")
    names = [row["name"] for row in statistics["classes"]]
    csv.writer(table, lineterminator="\n").writerows(
        [["true \\ predicted", *names], *([name, *row] for name, row in zip(names, confusion.tolist(), strict=True))]
    )
    with explain_write_errors(folder, "Name another folder with --report."):
        write_file(folder / "confusion.csv", table.getvalue())
        write_file(folder / "report.json", json.dumps(_nonfinite_to_none(statistics), indent=1) + "\n")
        write_file(folder / "report.html", page)


def _nonfinite_to_none(value: Any) -> Any:
    """JSON has no NaN and infinity."""
    if isinstance(value, dict):
        return {key: _nonfinite_to_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nonfinite_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
