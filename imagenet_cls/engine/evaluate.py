"""Evaluation: every image counts exactly once, on any number of ranks.

Unpadded shards, the unwrapped model, sums of counts that are reduced once. Called by `engine.train`, and by
`engine.inference` for `tools/test.py`.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from imagenet_cls.engine.step import autocast
from imagenet_cls.parallel.group import Group
from imagenet_cls.parallel.reduce import all_sum

Batch = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def logits_of(
    model: nn.Module,
    batches: Iterable[Batch],
    preprocess: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Run a model over batches of (uint8 images (B, 3, S, S), targets (B,), indices (B,)), in evaluation mode.

    Yields (logits fp32 (B, classes) on the device, targets on the device, indices on the host). The model's mode is
    put back.
    """
    was_training = model.training
    model.eval()
    try:
        for images, targets, indices in batches:
            with autocast(device, dtype):
                logits = model(preprocess(images))
            yield logits.float(), targets.to(device, non_blocking=True), indices
    finally:
        model.train(was_training)


def evaluate(outputs: Iterable[tuple[Tensor, Tensor, Tensor]], group: Group) -> dict[str, Any]:
    """Sum up this rank's shard and reduce once. A collective: every rank calls it, also one with an empty shard.

    Returns top1_pct, top5_pct (top-k with k = number of classes where there are fewer than five), loss (mean
    cross-entropy without smoothing), images (how many were counted) and seconds.
    """
    started = time.perf_counter()
    # Counts are exact in float64 up to 2**53, and one tensor travels once.
    sums = torch.zeros(4, dtype=torch.float64, device=group.device)
    for logits, targets, _ in outputs:
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices.eq(targets[:, None])
        loss = functional.cross_entropy(logits, targets, reduction="sum")
        size = torch.tensor(float(len(targets)), device=group.device)
        sums += torch.stack([top[:, 0].sum().double(), top.sum().double(), loss.double(), size.double()])
    top1, top5, loss_sum, images = all_sum(sums, group).tolist()
    return {
        "top1_pct": 100 * top1 / images,
        "top5_pct": 100 * top5 / images,
        "loss": loss_sum / images,
        "images": int(images),
        "seconds": time.perf_counter() - started,
    }
