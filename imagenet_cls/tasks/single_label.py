"""Images with one class each: `data.labels` single."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from imagenet_cls.config.metrics import METRICS, TRAIN_METRICS
from imagenet_cls.errors import ConfigError, DataError, UsageError
from imagenet_cls.parallel.collectives import all_reduce_sum
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.tasks.outputs import EvalOutputs, output_names, ranked_classes


class SingleLabel:
    """What `data.labels` decides about training, evaluation and prediction. `MultiLabel` has the
    same attributes, and `class_statistics`.

    metrics: of an evaluation, by their names in configs. train_metric: of each step. threshold: the
    minimum probability of a predicted class, None here. is_multilabel: whether a target is a row of
    zeros and ones.
    """

    metrics = METRICS["single"]
    train_metric = TRAIN_METRICS["single"]
    threshold = None
    is_multilabel = False

    def targets_of_classes(self, classes: Tensor, num_classes: int) -> Tensor:
        """The targets of images with one class each: int64 (B,)."""
        return classes

    def num_outputs(self, configured: int | None, in_data: int) -> int:
        """The number of the model's outputs. configured: `model.num_classes`. Raises ConfigError if
        the number of classes in the data does not go with it, DataError for one output.
        """
        if configured is not None and configured < in_data:
            raise ConfigError(
                [
                    f"model.num_classes: {configured}, but the dataset has {in_data} classes; give "
                    f"{in_data} or more, or null"
                ]
            )
        outputs = configured if configured is not None else in_data
        if outputs == 1:
            raise DataError(
                "All images have the same class: there is nothing to learn.",
                "Give images of two classes or more, in a folder for each class.",
            )
        return outputs

    def step_metric(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The `train_metric` of a batch, from 0 to 1: a float32 scalar on the device.

        A mixed target counts as the class with the largest share, as in torchvision's reference
        scripts.
        """
        classes = targets.argmax(1) if targets.is_floating_point() else targets
        return (logits.argmax(1) == classes).mean(dtype=torch.float32)

    def results(
        self,
        outputs: Iterable[EvalOutputs],
        names: Sequence[str],
        num_classes: int,
        context: RankContext,
    ) -> dict[str, dict[str, Any]]:
        """The results of each model over the shards of all ranks. A collective.

        * top1_pct, top5_pct: with fewer than five classes, top-5 counts all of them;
        * loss: mean cross-entropy without smoothing;
        * balanced_accuracy_pct: mean recall of the classes that have images;
        * class_pct, class_images: recall and images of each class.
        """
        # float64 counts exactly up to 2**53; mps has none, and float32 counts up to 2**24.
        dtype = torch.float32 if context.device.type == "mps" else torch.float64
        # One tensor with a row for each model, so that one collective reduces all sums.
        rows = torch.zeros(len(names), 2 + 2 * num_classes, dtype=dtype, device=context.device)
        for logits, targets, _ in outputs:
            for name, row in zip(names, rows, strict=True):
                add_batch(row, logits[name], targets)
        all_reduce_sum(rows, context)
        rows = rows.cpu().double()
        results: dict[str, dict[str, Any]] = {}
        for name, row in zip(names, rows, strict=True):
            top5, loss, class_hits, class_images = parts_of_sums(row)
            images = class_images.sum().item()
            has_images = class_images > 0
            recalls = class_hits / class_images  # NaN without images
            results[name] = {
                "top1_pct": 100 * class_hits.sum().item() / images,
                "top5_pct": 100 * top5.item() / images,
                "loss": loss.item() / images,
                "balanced_accuracy_pct": 100 * fmean(recalls[has_images].tolist()),
                "images": int(images),
                "class_pct": (100 * recalls).tolist(),
                "class_images": class_images.int().tolist(),
            }
        return results

    def has_probabilities(self, logits: Tensor) -> Tensor:
        """Which images of a batch have finite probabilities: bool (B,)."""
        # An output of -inf, as of an absent class, is a probability of 0.
        return logits.logsumexp(dim=1).isfinite()

    def top_classes(
        self, logits: Tensor, classes: Sequence[str], count: int | None = None
    ) -> list[list[tuple[str, float]]]:
        """For each row of logits (B, C) its likeliest classes with their probabilities, likeliest
        first. count: the number of classes, by default 5.
        """
        return ranked_classes(logits.softmax(dim=1), classes, 5 if count is None else count)

    def with_threshold(self, threshold: float) -> "SingleLabel":
        """The same task with another threshold. Raises UsageError here."""
        raise UsageError(
            "A threshold is for several labels, and data.labels is single.", "Leave it out."
        )

    def rows(self, logits: Tensor, targets: Tensor, indices: Tensor) -> np.ndarray:
        """A record of `image_dtype` for each image of a batch."""
        # as in `results`, also for ties
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
        rows = np.empty(len(targets), image_dtype(top.shape[1]))
        rows["index"] = indices
        rows["target"] = targets.cpu()
        rows["top"] = top.cpu()
        rows["probabilities"] = logits.softmax(dim=1).gather(1, top).cpu()
        rows["loss"] = functional.cross_entropy(logits, targets, reduction="none").cpu()
        return rows

    def predictions(
        self, rows: np.ndarray, classes: Sequence[str], name_of: Callable[[int], str]
    ) -> Iterator[dict[str, Any]]:
        """For each row of `rows`: index, image (its name), target (its class), and top, the
        likeliest classes with their probabilities.
        """
        names = output_names(classes, int(rows["top"].max()) + 1)
        for row in rows:
            index = int(row["index"])
            best = [names[k] for k in row["top"]]
            yield {
                "index": index,
                "image": name_of(index),
                "target": names[row["target"]],
                "top": list(zip(best, row["probabilities"].tolist(), strict=True)),
            }

    def class_table(self, rows: np.ndarray, classes: Sequence[str]) -> list[list[str]]:
        """The header; images, accuracy (recall) and precision of each class that has images."""
        table = [["images", "accuracy", "precision"]]
        for index, name in enumerate(classes):
            is_target = rows["target"] == index
            is_predicted = rows["top"][:, 0] == index
            images = is_target.sum()
            hits = (is_target & is_predicted).sum()
            if images > 0:
                precision = (
                    f"{100 * hits / is_predicted.sum():.2f} %" if is_predicted.any() else "-"
                )
                table.append([name, str(images), f"{100 * hits / images:.2f} %", precision])
        return table

    def csv_cells(self, row: Mapping[str, Any], shown: Callable[[str], str]) -> dict[str, Any]:
        """The columns of a prediction after its image: the target, if it is known, class and
        probability, likeliest first. shown: how the name of a class is written.
        """
        cells = {"target": shown(row["target"])} if "target" in row else {}
        for rank, (name, probability) in enumerate(row["top"], 1):
            cells[f"class_{rank}"] = shown(name)
            cells[f"probability_{rank}"] = probability
        return cells

    def describe_sizes(self, sizes: str, targets: np.ndarray) -> str:
        """What the sizes of the classes, such as `12 to 30`, are the numbers of."""
        return f"{sizes} per class"


def image_dtype(top: int) -> np.dtype:
    """The record of an image: the `top` likeliest classes, likeliest first, and their
    probabilities.
    """
    numbers = [("index", np.int64), ("target", np.int64), ("loss", np.float64)]
    ranked = [("top", np.int64, (top,)), ("probabilities", np.float64, (top,))]
    return np.dtype([*numbers, *ranked])


def parts_of_sums(row: Tensor) -> tuple[Tensor, ...]:
    """Views of the sums over the images for one model, a row of 2 + 2 * classes elements: top-5
    hits and loss, of one element each, and hits and images of each class.
    """
    classes = (len(row) - 2) // 2
    return row.split([1, 1, classes, classes])


def add_batch(row: Tensor, logits: Tensor, targets: Tensor) -> None:
    """Add the counts of a batch to the sums of a model, in place. logits: (B, classes). targets:
    (B,).
    """
    top5, loss, class_hits, class_images = parts_of_sums(row)
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    is_target = best.eq(targets[:, None])
    top5 += is_target.sum()
    loss += functional.cross_entropy(logits, targets, reduction="none").sum(dtype=row.dtype)
    class_hits.index_add_(0, targets, is_target[:, 0].to(row.dtype))
    class_images.index_add_(0, targets, torch.ones_like(targets, dtype=row.dtype))
