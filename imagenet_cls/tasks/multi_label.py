"""Images with any number of labels: `data.labels` multi."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from imagenet_cls.config.metrics import METRICS, TRAIN_METRICS
from imagenet_cls.errors import ConfigError
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.tasks.label_scores import LabelOutputs, label_statistics
from imagenet_cls.tasks.outputs import EvalOutputs, ranked_classes


class MultiLabel:
    """See `SingleLabel`."""

    metrics = METRICS["multi"]
    train_metric = TRAIN_METRICS["multi"]
    is_multilabel = True

    def __init__(self, threshold: float):
        self.threshold = threshold

    def targets_of_classes(self, classes: Tensor, num_classes: int) -> Tensor:
        return functional.one_hot(classes, num_classes).float()

    def num_outputs(self, configured: int | None, in_data: int) -> int:
        if configured not in (None, in_data):
            problem = f"{configured}, but there are {in_data} labels; use null"
            raise ConfigError([f"model.num_classes: {problem}"])
        return in_data

    def step_metric(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over the images of F1, 2 |P & T| / (|P| + |T|), where P are the predicted labels
        and T those of the target; 1 where both are empty. As scikit-learn's f1_score with average
        `samples` and zero_division 1. A mixed target has the labels whose share is at least 0.5.
        """
        predicted = logits.float().sigmoid() >= self.threshold
        present = targets >= 0.5
        hits = (predicted & present).sum(1)
        both = predicted.sum(1) + present.sum(1)
        return torch.where(both == 0, 1.0, 2 * hits / both.clamp(min=1)).mean()

    def results(
        self,
        outputs: Iterable[EvalOutputs],
        names: Sequence[str],
        num_classes: int,
        context: RankContext,
    ) -> dict[str, dict[str, Any]]:
        """See `LabelOutputs`."""
        kept = {name: LabelOutputs(num_classes) for name in names}
        for logits, targets, _ in outputs:
            for name in names:
                kept[name].add(logits[name], targets)
        return {name: kept[name].results(self.threshold, context) for name in names}

    def has_probabilities(self, logits: Tensor) -> Tensor:
        return logits.isfinite().all(dim=1)

    def top_classes(
        self, logits: Tensor, classes: Sequence[str], count: int | None = None
    ) -> list[list[tuple[str, float]]]:
        """The classes whose probability is at least the threshold: perhaps none."""
        most = logits.shape[1] if count is None else count
        return ranked_classes(logits.sigmoid(), classes, most, self.threshold)

    def with_threshold(self, threshold: float) -> "MultiLabel":
        return MultiLabel(threshold)

    def rows(self, logits: Tensor, targets: Tensor, indices: Tensor) -> np.ndarray:
        """Records of `index`, `target` uint8 (classes,), and `logits` float32 (classes,).

        High logits differ where their probabilities are equal in float32, and average precision
        needs their order.
        """
        shape = (logits.shape[1],)
        outputs = [("target", np.uint8, shape), ("logits", np.float32, shape)]
        rows = np.empty(len(targets), [("index", np.int64), *outputs])
        rows["index"] = indices
        rows["target"] = (targets >= 0.5).cpu()
        rows["logits"] = logits.cpu()
        return rows

    def predictions(
        self, rows: np.ndarray, classes: Sequence[str], name_of: Callable[[int], str]
    ) -> Iterator[dict[str, Any]]:
        """top has the classes whose probability is at least the threshold."""
        top = self.top_classes(torch.from_numpy(rows["logits"].copy()), classes)
        for row, predicted in zip(rows, top, strict=True):
            index = int(row["index"])
            yield {
                "index": index,
                "image": name_of(index),
                "target": list(compress(classes, row["target"])),
                "top": predicted,
            }

    def class_table(self, rows: np.ndarray, classes: Sequence[str]) -> list[list[str]]:
        """The images with each label, its average precision, precision and recall."""
        table = [["images", "AP", "precision", "recall"]]
        for row in self.class_statistics(rows, classes):
            shares = [row[key] for key in ("ap_pct", "precision_pct", "recall_pct")]
            cells = ["-" if np.isnan(share) else f"{share:.2f} %" for share in shares]
            table.append([row["name"], str(row["images"]), *cells])
        return table

    def class_statistics(self, rows: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
        """For each class: name, images with the label, images for which it is predicted, average
        precision, and precision, recall and F1 at the threshold; NaN where it is undefined.
        """
        logits, targets = (torch.from_numpy(rows[name].copy()) for name in ("logits", "target"))
        found = label_statistics(logits, targets, self.threshold)
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

    def csv_cells(self, row: Mapping[str, Any], shown: Callable[[str], str]) -> dict[str, Any]:
        """The labels of the target, if it is known, labels and probabilities, with `;` between."""
        cells = {"target": "; ".join(map(shown, row["target"]))} if "target" in row else {}
        cells["labels"] = "; ".join(shown(name) for name, _ in row["top"])
        cells["probabilities"] = "; ".join(str(probability) for _, probability in row["top"])
        return cells

    def describe_sizes(self, sizes: str, targets: np.ndarray) -> str:
        unlabeled = int((targets.sum(1) == 0).sum())
        return f"{sizes} with each label, {unlabeled} without labels"
