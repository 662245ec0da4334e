"""Evaluated images with several labels (`data.labels` multi): their outputs, and statistics."""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imagenet_cls.engine.label_scores import label_statistics
from imagenet_cls.inference.predictor import top_classes


def label_rows(logits: Tensor, targets: Tensor, indices: Tensor) -> np.ndarray:
    """A record for each image of a batch: `index`, `target` uint8 (classes,), and `logits` float32
    (classes,).

    High logits differ where their probabilities are equal in float32, and average precision needs
    their order. logits, targets: float (B, classes). indices: (B,).
    """
    shape = (logits.shape[1],)
    outputs = [("target", np.uint8, shape), ("logits", np.float32, shape)]
    rows = np.empty(len(targets), [("index", np.int64), *outputs])
    rows["index"] = indices
    rows["target"] = (targets >= 0.5).cpu()
    rows["logits"] = logits.cpu()
    return rows


def tensors_of(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """The logits, float32 (N, classes), and the targets, uint8 (N, classes)."""
    return torch.from_numpy(rows["logits"].copy()), torch.from_numpy(rows["target"].copy())


def label_predictions(
    rows: np.ndarray, names: Sequence[str], name_of: Callable[[int], str], threshold: float
) -> Iterator[dict[str, Any]]:
    """For each image its index, image (its name), target (its labels), and top: the classes whose
    probability is at least the threshold with their probabilities, likeliest first.
    """
    top = top_classes(tensors_of(rows)[0], names, threshold=threshold)
    for row, predicted in zip(rows, top, strict=True):
        index = int(row["index"])
        yield {
            "index": index,
            "image": name_of(index),
            "target": list(compress(names, row["target"])),
            "top": predicted,
        }


def class_statistics(
    rows: np.ndarray, names: Sequence[str], threshold: float
) -> list[dict[str, Any]]:
    """For each class: name, images with the label, images for which it is predicted, average
    precision, and precision, recall and F1 at the threshold; NaN where it is undefined.
    """
    found = label_statistics(*tensors_of(rows), threshold)
    with np.errstate(invalid="ignore"):  # 0 / 0
        shares = {
            "precision_pct": found.hits / found.predicted,
            "recall_pct": found.hits / found.positive,
            "f1_pct": 2 * found.hits / (found.predicted + found.positive),
        }
    columns = {
        "name": names,
        "images": found.positive.tolist(),
        "predicted": found.predicted.tolist(),
        "ap_pct": (100 * found.precisions).tolist(),
        **{key: (100 * values).tolist() for key, values in shares.items()},
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
