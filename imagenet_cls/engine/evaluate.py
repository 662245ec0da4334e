"""Evaluation: every image counts exactly once, on any number of ranks.

Unpadded shards, the unwrapped model, sums of counts that are reduced once. Called by `engine.train`, and by
`engine.inference` for `tools/test.py`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from imagenet_cls.engine.step import autocast
from imagenet_cls.parallel.collectives import all_sum
from imagenet_cls.parallel.process_group import Group

Batch = tuple[Tensor, Tensor, Tensor]
Outputs = tuple[dict[str, Tensor], Tensor, Tensor]


@torch.no_grad()
def outputs_of(
    models: Mapping[str, nn.Module],
    batches: Iterable[Batch],
    preprocess: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    flip: bool = False,
) -> Iterator[Outputs]:
    """Run models, in evaluation mode, over batches of (uint8 images (B, 3, S, S), targets (B,), indices (B,)).

    All models see a batch before the next one is made: reading and decoding are paid for once. flip: `eval.flip_tta`.
    Yields (logits by model, each fp32 (B, classes) on the device; targets on the device; indices on the host). The
    models' modes are put back.
    """
    were_training = {kind: model.training for kind, model in models.items()}
    for model in models.values():
        model.eval()
    try:
        for images, targets, indices in batches:
            pixels = preprocess(images)
            with autocast(device, dtype):
                logits = {kind: logits_of(model, pixels, flip) for kind, model in models.items()}
            yield (
                {kind: out.to(device) for kind, out in logits.items()},
                targets.to(device, non_blocking=True),
                indices,
            )
    finally:
        for kind, model in models.items():
            model.train(were_training[kind])


def logits_of(model: nn.Module, pixels: Tensor, flip: bool) -> Tensor:
    """fp32 logits (B, classes) of normalised images (B, 3, H, W).

    flip: the mean of the logits of each image and of its mirror image, which counts as one image.
    """
    logits = model(pixels).float()
    return (logits + model(pixels.flip(3)).float()) / 2 if flip else logits


def evaluate(outputs: Iterable[Outputs], kinds: Sequence[str], group: Group) -> dict[str, dict[str, Any]]:
    """Sum up this rank's shard and reduce once. A collective: every rank calls it, also one with an empty shard.

    kinds: the models' names. Returns for each: top1_pct, top5_pct (top-k with k = number of classes where there are
    fewer than five), loss (mean cross-entropy without smoothing), images (how many were counted) and seconds (of all
    models together).
    """
    started = time.perf_counter()
    # Counts are exact in float64 up to 2**53, and one tensor travels once: a row for each model.
    sums = torch.zeros(len(kinds), 4, dtype=torch.float64, device=group.device)
    for logits_by_kind, targets, _ in outputs:
        for row, kind in zip(sums, kinds, strict=True):
            logits = logits_by_kind[kind]
            top = logits.topk(min(5, logits.shape[1]), dim=1).indices.eq(targets[:, None])
            loss = functional.cross_entropy(logits, targets, reduction="sum")
            counts = [top[:, 0].sum(), top.sum(), loss, torch.ones_like(targets).sum()]
            row += torch.stack([count.double() for count in counts])
    seconds = time.perf_counter() - started
    return {
        kind: {
            "top1_pct": 100 * top1 / images,
            "top5_pct": 100 * top5 / images,
            "loss": loss_sum / images,
            "images": int(images),
            "seconds": seconds,
        }
        for kind, (top1, top5, loss_sum, images) in zip(kinds, all_sum(sums, group).tolist(), strict=True)
    }
