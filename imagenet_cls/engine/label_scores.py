"""Results of images with several labels (`data.labels` multi): average precision and F1."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from imagenet_cls.parallel.collectives import all_reduce_sum, gather_shards, run_on_main
from imagenet_cls.parallel.process_group import RankContext

# Thresholds of which the best is found: 0.01, 0.02, ..., 0.99.
_BINS = 100
_MAX_GATHERED = 2**26  # scores that rank 0 holds at a time: 256 MiB


class LabelScores:
    """The outputs of one model for this rank's shard, and sums over it.

    Average precision needs the scores of all images: a rank keeps 5 bytes for each image of its
    shard and each class. Rank 0 gathers them for some classes at a time.

    threshold: `eval.threshold`.
    """

    def __init__(self, num_classes: int, threshold: float, device: torch.device):
        self.threshold = threshold
        self.num_classes = num_classes
        self.logits: list[Tensor] = []
        self.targets: list[Tensor] = []
        # float64 counts exactly up to 2**53; mps has none
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sizes = [1, 1, num_classes, num_classes, num_classes, _BINS, _BINS]
        self.sums = torch.zeros(sum(sizes), dtype=dtype, device=device)
        views = self.sums.split(sizes)
        self.loss, self.images, self.hits, self.predicted, self.positive = views[:5]
        # The numbers of (image, class) pairs by their probability, 0.00 to 0.01 first.
        self.positive_bins, self.negative_bins = views[5:]

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch. logits, targets: float (B, classes); a target counts from 0.5 on."""
        is_positive = targets >= 0.5
        probabilities = logits.sigmoid()
        is_predicted = probabilities >= self.threshold
        self.loss += label_losses(logits, is_positive).sum()
        self.images += len(targets)
        self.hits += (is_predicted & is_positive).sum(0)
        self.predicted += is_predicted.sum(0)
        self.positive += is_positive.sum(0)
        bins = (probabilities * _BINS).long().clamp(0, _BINS - 1)
        self.positive_bins += torch.bincount(bins[is_positive], minlength=_BINS)
        self.negative_bins += torch.bincount(bins[~is_positive], minlength=_BINS)
        self.logits.append(logits.cpu())
        self.targets.append(is_positive.to(torch.uint8).cpu())

    def results(self, context: RankContext) -> dict[str, float]:
        """The results over the shards of all ranks, which are dealt out as by `shard_for_eval`. A
        collective.
        """
        all_reduce_sum(self.sums, context)
        images = int(self.images.item())
        precisions = self.average_precisions(images, context)
        known = precisions[~np.isnan(precisions)]
        hits, predicted, positive = (
            counts.cpu().double() for counts in (self.hits, self.predicted, self.positive)
        )
        occurs = predicted + positive > 0
        f1_of_classes = f1(hits[occurs], predicted[occurs], positive[occurs])
        threshold, best_f1 = self.best_threshold()
        return {
            "map_pct": 100 * float(known.mean()) if len(known) else 0.0,
            "micro_f1_pct": 100 * f1(hits.sum(), predicted.sum(), positive.sum()).item(),
            "macro_f1_pct": 100 * f1_of_classes.mean().item() if occurs.any() else 0.0,
            "best_threshold": threshold,
            "best_micro_f1_pct": 100 * best_f1,
            "loss": self.loss.item() / images,
            "images": images,
        }

    def average_precisions(self, images: int, context: RankContext) -> np.ndarray:
        """The average precision of each class, float64 (classes,); NaN for one that no image has.
        The same on all ranks. A collective.

        images: the number of images of all ranks.
        """
        # A rank without images has an empty batch, from which the number of columns is known.
        empty = torch.empty(0, self.num_classes)
        self.logits.append(empty)
        self.targets.append(empty.to(torch.uint8))
        found: list[float] = []
        step = max(_MAX_GATHERED // images, 1)
        for first in range(0, self.num_classes, step):
            # not all columns at once, which would take the memory of the shard again
            shards = (
                torch.cat([batch[:, first : first + step] for batch in batches])
                for batches in (self.logits, self.targets)
            )
            scores, labels = (gather_shards(shard, images, context).numpy() for shard in shards)
            if context.is_main:
                found += map(average_precision, scores.T, labels.T)
        return np.array(run_on_main(context, lambda: found))

    def best_threshold(self) -> tuple[float, float]:
        """The threshold with the highest micro F1, and this F1 (0 to 1); of equal ones the
        lowest.
        """
        positive, negative = (
            bins.cpu().double().flip(0).cumsum(0).flip(0)[1:]
            for bins in (self.positive_bins, self.negative_bins)
        )
        scores = f1(positive, positive + negative, self.positive.sum().cpu().double())
        best = int(scores.argmax())
        return (best + 1) / _BINS, scores[best].item()


def label_losses(logits: Tensor, is_label: Tensor) -> Tensor:
    """Binary cross-entropy of each image, the mean over the classes: float (B,). logits: float (B,
    classes). is_label: bool (B, classes).
    """
    losses = functional.binary_cross_entropy_with_logits(logits, is_label.float(), reduction="none")
    return losses.mean(1)


def f1(hits: Tensor, predicted: Tensor, positive: Tensor) -> Tensor:
    """2 hits / (predicted + positive), 0 where both are 0."""
    return 2 * hits / (predicted + positive).clamp(min=1)


def average_precision(scores: np.ndarray, targets: np.ndarray) -> float:
    """The sum of (R_n - R_{n-1}) P_n over the distinct scores, R recall and P precision of the
    images with at least this score; NaN without a positive image.

    As scikit-learn's average_precision_score. scores: float (N,). targets: 0 or 1, (N,).
    """
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    hits = np.cumsum(targets[order], dtype=np.int64)
    if len(hits) == 0 or hits[-1] == 0:
        return float("nan")
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    ends = np.flatnonzero(is_last)
    new_hits = np.diff(hits[ends], prepend=0)
    return float((new_hits * (hits[ends] / (ends + 1))).sum() / hits[-1])


def score_outputs(
    outputs: Iterable[tuple[dict[str, Tensor], Tensor, Tensor]],
    names: Sequence[str],
    num_classes: int,
    threshold: float,
    device: torch.device,
) -> dict[str, LabelScores]:
    """The scores of the models `names`. outputs: see `engine.evaluate.EvalOutputs`."""
    scores = {name: LabelScores(num_classes, threshold, device) for name in names}
    for logits, targets, _ in outputs:
        for name in names:
            scores[name].add(logits[name], targets)
    return scores
