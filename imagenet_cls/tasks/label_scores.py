"""Multi-label results (`data.labels` multi): average precision, F1 and loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from imagenet_cls.parallel.collectives import all_reduce_sum, gather_shards, run_on_main
from imagenet_cls.parallel.process_group import RankContext

# Candidates for the best threshold.
_THRESHOLDS = torch.arange(1, 100, device="cpu") / 100
_MAX_GATHERED = 2**23  # logits that rank 0 gathers at a time: 32 MiB, and 300 MiB for statistics


@dataclass(frozen=True)
class LabelStatistics:
    """Statistics of labels over all images.

    precisions: the average precision of each label, float64; NaN where no image has it. hits,
    predicted, positive: the images with the label that are predicted, all that are predicted, and
    all that have it: int64 (labels,). loss: the sum of the binary cross-entropies. positive_bins,
    negative_bins: pairs of image and label by the number of `_THRESHOLDS` that their probability
    reaches, int64 (100,).
    """

    precisions: np.ndarray
    hits: np.ndarray
    predicted: np.ndarray
    positive: np.ndarray
    loss: float
    positive_bins: np.ndarray
    negative_bins: np.ndarray


def label_statistics(logits: Tensor, targets: Tensor, threshold: float) -> LabelStatistics:
    """logits: float32 (N, labels). targets: 0 or 1, uint8 (N, labels). Both are on the CPU.
    threshold: the minimum probability of a predicted label.
    """
    is_positive = targets == 1
    probabilities = logits.sigmoid()
    is_predicted = probabilities >= threshold
    losses = functional.binary_cross_entropy_with_logits(
        logits, targets.to(logits.dtype), reduction="none"
    )
    reached = torch.bucketize(probabilities, _THRESHOLDS, right=True, out_int32=True)
    pairs = zip(logits.numpy().T, targets.numpy().T, strict=True)
    return LabelStatistics(
        precisions=np.array([average_precision(*pair) for pair in pairs]),
        hits=(is_predicted & is_positive).sum(0).numpy(),
        predicted=is_predicted.sum(0).numpy(),
        positive=is_positive.sum(0).numpy(),
        loss=losses.sum(dtype=torch.float64).item(),
        positive_bins=torch.bincount(reached[is_positive], minlength=100).numpy(),
        negative_bins=torch.bincount(reached[~is_positive], minlength=100).numpy(),
    )


def average_precision(scores: np.ndarray, targets: np.ndarray) -> float:
    """scikit-learn's average precision; NaN without a positive image. scores: float (N,). targets:
    0 or 1, (N,).
    """
    from sklearn.metrics import average_precision_score  # takes a second to import

    if not targets.any():
        return float("nan")
    # of a model that has diverged, scores may be NaN or infinite
    return float(average_precision_score(targets, np.nan_to_num(scores)))


class LabelOutputs:
    """The outputs of one model for this rank's shard.

    Average precision needs the outputs for all images: 5 bytes for each image and label.
    """

    def __init__(self, num_labels: int):
        # With an empty batch, also a rank without images has the number of columns.
        self.logits = [torch.empty(0, num_labels, device="cpu")]
        self.targets = [torch.empty(0, num_labels, dtype=torch.uint8, device="cpu")]

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: float (B, labels). A target counts as 1 if it is at least 0.5."""
        self.logits.append(logits.cpu())
        self.targets.append((targets >= 0.5).to(torch.uint8).cpu())

    def results(self, threshold: float, context: RankContext) -> dict[str, float]:
        """The metrics of `MultiLabel` and the threshold with the highest micro F1, over the shards
        of all ranks (`shard_for_eval`); the same on every rank. A collective.

        threshold: `eval.threshold`.
        """
        count = torch.tensor(sum(map(len, self.logits)), device=context.device)
        images = int(all_reduce_sum(count, context).item())
        step = max(_MAX_GATHERED // images, 1)
        blocks = []
        for first in range(0, self.logits[0].shape[1], step):
            # Not all columns at once, which would take the memory of the shard again.
            logits, targets = (
                gather_shards(
                    torch.cat([batch[:, first : first + step] for batch in batches]),
                    images,
                    context,
                )
                for batches in (self.logits, self.targets)
            )
            if context.is_main:
                blocks.append(label_statistics(logits, targets, threshold))
        return run_on_main(context, lambda: summarize(blocks, images, threshold))


def summarize(blocks: Sequence[LabelStatistics], images: int, threshold: float) -> dict[str, float]:
    """The results from the statistics of all labels."""
    precisions, hits, predicted, positive = (
        np.concatenate([getattr(block, name) for block in blocks])
        for name in ("precisions", "hits", "predicted", "positive")
    )
    known = precisions[~np.isnan(precisions)]
    is_counted = predicted + positive > 0
    positive_bins = np.sum([block.positive_bins for block in blocks], axis=0)
    negative_bins = np.sum([block.negative_bins for block in blocks], axis=0)
    best, best_f1 = best_threshold(positive_bins, negative_bins, threshold)
    return {
        "map_pct": 100 * float(known.mean()) if len(known) else 0.0,
        "micro_f1_pct": 100 * float(f1(hits.sum(), predicted.sum(), positive.sum())),
        "macro_f1_pct": 100 * float(f1(hits, predicted, positive)[is_counted].mean())
        if is_counted.any()
        else 0.0,
        "best_threshold": best,
        "best_micro_f1_pct": 100 * best_f1,
        "loss": sum(block.loss for block in blocks) / (images * len(precisions)),
        "images": images,
        "class_pct": (100 * precisions).tolist(),
        "class_images": positive.tolist(),
    }


def best_threshold(
    positive_bins: np.ndarray, negative_bins: np.ndarray, default: float
) -> tuple[float, float]:
    """The threshold with the highest micro F1, and this F1 (0 to 1); of several the middle one.
    default: the threshold if F1 is 0 at each.
    """
    hits, others = (bins[::-1].cumsum()[::-1][1:] for bins in (positive_bins, negative_bins))
    scores = f1(hits, hits + others, positive_bins.sum())
    if scores.max() == 0:
        return default, 0.0
    highest = np.flatnonzero(scores == scores.max())
    middle = int(highest[len(highest) // 2])
    return (middle + 1) / 100, float(scores[middle])


def f1(hits: np.ndarray, predicted: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """2 hits / (predicted + positive), 0 where both are 0."""
    return 2 * hits / np.maximum(predicted + positive, 1)
