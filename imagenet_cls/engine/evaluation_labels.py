"""Which classes and labels an evaluation counts.

Outputs of absent classes, and ReaL labels of ImageNet.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from imagenet_cls.config.schema import Config
from imagenet_cls.data.classes import IMAGENET_CLASSES, imagenet_order
from imagenet_cls.data.sources import ImageSource, required_targets
from imagenet_cls.errors import DataError
from imagenet_cls.files import check_regular

_GIVE_FILE = "Give real.json of google-research/reassessed-imagenet."
VALIDATION_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")


@dataclass(frozen=True)
class EvaluationLabels:
    """Which classes and labels count.

    present: int64 (P,), the classes that the validation images have; None: all. real: int64
    (images, max_labels), the ReaL labels of each image, and -1 where it has fewer; None without
    them. left_out: the number of images that `data.exclude` has left out. threshold:
    `eval.threshold` if images have several labels (`data.labels`), else None.
    """

    present: Tensor | None = None
    real: Tensor | None = None
    left_out: int = 0
    threshold: float | None = None

    def mask(self, logits: Tensor) -> Tensor:
        """Logits (B, outputs) with -inf for the classes that are not present."""
        if self.present is None:
            return logits
        absent = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        absent[self.present.to(logits.device)] = False
        return logits.masked_fill(absent, -torch.inf)


def evaluation_labels(
    config: Config, source: ImageSource, classes: Sequence[str]
) -> EvaluationLabels:
    """The labels of an evaluation of `source`. Raises DataError."""
    present = real = None
    threshold = config.eval.threshold if config.data.labels == "multi" else None
    if config.eval.classes == "present":
        present = torch.from_numpy(np.unique(required_targets(source, "eval.classes")))
    if config.eval.real_labels is not None:
        real = read_real_labels(Path(config.eval.real_labels).expanduser(), source, classes)
    return EvaluationLabels(present, real, source.left_out, threshold)


def read_real_labels(file: Path, source: ImageSource, classes: Sequence[str]) -> Tensor:
    """The ReaL labels of each image as classes of the dataset: see `EvaluationLabels.real`.

    Beyer et al., "Are we done with ImageNet?", 2020. file: real.json of
    google-research/reassessed-imagenet, a list of lists of outputs. Entry i has the labels of the
    image whose name has the number i + 1; it may be empty. Raises DataError.
    """
    place = f"{file} (eval.real_labels)"
    try:
        check_regular(file)
        lists = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{place}: {error.strerror}", _GIVE_FILE) from None
    except (ValueError, RecursionError):
        lists = None
    try:
        order = imagenet_order(classes)
    except DataError as error:
        raise DataError(
            f"{place}: the labels are classes of ImageNet-1k, and not all of the dataset's are",
            str(error).splitlines()[-1],
        ) from None
    class_of = {output: target for target, output in enumerate(order)}
    problem = f"{place}: not a list of lists of numbers from 0 to {IMAGENET_CLASSES - 1} in JSON"
    if not isinstance(lists, list):
        raise DataError(problem, _GIVE_FILE)
    for entry, labels in enumerate(lists):
        is_list = isinstance(labels, list)
        if not is_list or not all(type(i) is int and i in class_of for i in labels):
            raise DataError(f"{problem} (entry {entry})", _GIVE_FILE)
    rows = []
    for i in range(len(source)):
        match = VALIDATION_NAME.search(source.name(i))
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(lists):
            raise DataError(
                f"{source.name(i)}: eval.real_labels needs names with ILSVRC2012_val_00000001 to "
                f"{len(lists):08d}",
                "Evaluate ImageNet's validation images, or set eval.real_labels to null.",
            )
        rows.append([class_of[label] for label in lists[number - 1]])
    if not any(rows):
        raise DataError(
            f"{place}: none of the {len(rows)} images has a label.", "Check the file and data.val."
        )
    max_labels = max(map(len, rows))
    padded = [row + [-1] * (max_labels - len(row)) for row in rows]
    return torch.tensor(padded)
