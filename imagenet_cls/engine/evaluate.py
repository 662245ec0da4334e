"""Evaluation: every image counts exactly once, on any number of ranks. Shards are not padded."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from imagenet_cls.checkpoint.format import METRICS, score
from imagenet_cls.config.schema import Config, EarlyStopConfig
from imagenet_cls.data.device import Preprocess
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.engine.labels import EvaluationLabels
from imagenet_cls.engine.loaders import Batch, build_val_batches
from imagenet_cls.engine.metrics import Metrics, compute_metrics
from imagenet_cls.engine.step import autocast, choose_precision
from imagenet_cls.parallel.collectives import all_reduce_sum
from imagenet_cls.parallel.devices import Devices
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.wrap import wrap_data_parallel

Outputs = tuple[dict[str, Tensor], Tensor, Tensor]
"""fp32 logits (B, classes) of each model, targets (B,), indices (B,)."""


class Evaluation:
    """What an evaluation of the images of `source` needs besides the models. devices: of this rank."""

    def __init__(
        self,
        config: Config,
        source: ImageSource,
        group: Group,
        devices: Devices,
        mean: list[float],
        std: list[float],
        labels: EvaluationLabels = EvaluationLabels(),  # noqa: B008 (immutable)
    ):
        self.mean, self.std, self.labels, self.num_images = mean, std, labels, len(source)
        self.preprocess = Preprocess(mean, std, group.device, config.train.channels_last)
        self.autocast_dtype = choose_precision(config.train, group.device)
        self.batches = partial(build_val_batches, config, source, group, len(devices.all), mean)
        self.devices, self.flip = devices, config.eval.flip_tta

    def outputs(
        self,
        models: Mapping[str, nn.Module],
        batches: Iterable[Batch] | None = None,
        pad_to: int | None = None,
    ) -> Iterator[Outputs]:
        """`model_outputs` of models on the device. batches: by default those of this rank's shard."""
        wrapped = {name: wrap_data_parallel(model, self.devices) for name, model in models.items()}
        batches, device = self.batches() if batches is None else batches, self.devices.all[0]
        return model_outputs(
            wrapped,
            batches,
            self.preprocess,
            device,
            self.autocast_dtype,
            self.flip,
            pad_to,
            self.labels,
        )


@torch.no_grad()
def model_outputs(
    models: Mapping[str, nn.Module],
    batches: Iterable[Batch],
    preprocess: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    flip: bool = False,
    pad_to: int | None = None,
    labels: EvaluationLabels = EvaluationLabels(),  # noqa: B008 (immutable)
) -> Iterator[Outputs]:
    """Run all models in evaluation mode over each batch. They stay in this mode.

    dtype: of autocast. flip: `eval.flip_tta`. pad_to: smaller batches are padded to this size, and the additional
    logits dropped, so that a compiled model gets a single shape. labels: the outputs of classes that are not present
    are -inf. Logits and targets are on `device`, indices on the CPU.
    """
    for model in models.values():
        model.eval()
    for images, targets, indices in batches:
        count = len(images)
        if pad_to is not None and count < pad_to:
            images = torch.cat([images, images.new_zeros(pad_to - count, *images.shape[1:])])
        pixels = preprocess(images)
        with autocast(device, dtype):
            logits = {
                name: compute_logits(model, pixels, flip)[:count].to(device)
                for name, model in models.items()
            }
        logits = {name: labels.mask(of_model) for name, of_model in logits.items()}
        yield logits, targets.to(device, non_blocking=True), indices


def compute_logits(model: nn.Module, pixels: Tensor, flip: bool) -> Tensor:
    """fp32 logits (B, classes) of normalized images (B, 3, H, W). flip: the mean with those of the mirror images."""
    logits = model(pixels).float()
    # A model compiled with CUDA graphs returns the same memory at each call.
    return (logits.clone() + model(pixels.flip(3)).float()) / 2 if flip else logits


def evaluate(
    outputs: Iterable[Outputs],
    names: Sequence[str],
    group: Group,
    num_classes: int,
    labels: EvaluationLabels = EvaluationLabels(),  # noqa: B008 (immutable)
    metrics: Mapping[str, Metrics] | None = None,
) -> dict[str, dict[str, Any]]:
    """Metrics of each model over the shards of all ranks. A collective: a rank with an empty shard calls it, too.

    names: of the models. num_classes: their outputs. metrics: user-defined ones, for each model.

    Returns for each: top1_pct; top5_pct (top-k with k = number of classes where there are fewer than five); loss (mean
    cross-entropy without smoothing); balanced_accuracy_pct (mean recall of the classes that have images); images;
    seconds (for all models together); with ReaL labels real_images, the number of images that have such labels, and
    real_pct, the share of these whose prediction is one of them; the values of user-defined metrics; `200 of 1000`
    classes, where others are ignored; left_out, the number of images that `data.exclude` has left
    out, if any.
    """
    started = time.perf_counter()
    metrics = metrics or {name: {} for name in names}
    all_metrics = [metric for of_model in metrics.values() for metric in of_model.values()]
    for metric in all_metrics:
        metric.reset()
    targets = None
    # float64 counts exactly up to 2**53; mps has none, and float32 counts up to 2**24.
    dtype = torch.float32 if group.device.type == "mps" else torch.float64
    sizes = dict.fromkeys(("top1", "top5", "loss", "images", "real_hits", "real_images"), 1)
    sizes |= {"class_hits": num_classes, "class_images": num_classes}
    # One tensor, which one collective reduces, and for each model the views of its sums by name.
    all_sums = torch.zeros(len(names), sum(sizes.values()), dtype=dtype, device=group.device)
    rows = [dict(zip(sizes, row.split([*sizes.values()]), strict=True)) for row in all_sums]
    sums_by_name = dict(zip(names, rows, strict=True))
    for logits_by_name, targets, indices in outputs:
        for name, sums in sums_by_name.items():
            logits = logits_by_name[name]
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices
            top = best.eq(targets[:, None])
            sums["top1"] += top[:, 0].sum()
            sums["top5"] += top.sum()
            sums["loss"] += functional.cross_entropy(logits, targets, reduction="sum")
            sums["images"] += len(targets)
            if labels.real is not None:
                real = labels.real[indices].to(logits.device)
                sums["real_hits"] += real.eq(best[:, :1]).any(1).sum()
                sums["real_images"] += real.ge(0).any(1).sum()
            sums["class_hits"].index_add_(0, targets, top[:, 0].to(dtype))
            sums["class_images"].index_add_(0, targets, torch.ones_like(targets, dtype=dtype))
            for metric in metrics[name].values():
                metric.update(logits.clone(), targets.clone())  # it may change them
    if (
        targets is None
    ):  # an empty shard: metrics that gather lists need the dtype and dimensions of outputs
        no_logits = torch.zeros(0, num_classes, device=group.device)
        for metric in all_metrics:
            with suppress(Exception):  # others of torchmetrics, which count, can't take it
                metric.update(no_logits, no_logits.new_zeros(0, dtype=torch.int64))
    all_reduce_sum(all_sums, group)
    totals = {
        name: {key: sums[key].tolist() for key in sizes} for name, sums in sums_by_name.items()
    }
    seconds = time.perf_counter() - started  # the device has done its work
    results = {}
    for name, total in totals.items():
        (images,) = total["images"]
        of_classes = zip(total["class_hits"], total["class_images"], strict=True)
        results[name] = {
            "top1_pct": 100 * total["top1"][0] / images,
            "top5_pct": 100 * total["top5"][0] / images,
            "loss": total["loss"][0] / images,
            "balanced_accuracy_pct": 100
            * fmean(hits / count for hits, count in of_classes if count),
            "images": int(images),
            "seconds": seconds,
        }
        if labels.real is not None:
            (hits,), (real_images,) = total["real_hits"], total["real_images"]
            results[name] |= {"real_pct": 100 * hits / real_images, "real_images": int(real_images)}
        results[name] |= compute_metrics(metrics[name], group)
        if labels.present is not None:
            results[name]["classes"] = f"{len(labels.present)} of {num_classes}"
        if labels.left_out:
            results[name]["left_out"] = labels.left_out
    return results


def stops_early(history: Sequence[Mapping[str, float]], config: EarlyStopConfig) -> bool:
    """Whether the last `patience_evals` evaluations, or more, were not better by `min_delta` than the best before them.

    history: the metrics of all evaluations, in order; those without the metric are left out. NaN is never better.
    """
    if config.patience_evals is None:
        return False
    best, waited, metric = -math.inf, 0, METRICS[config.metric]
    for value in (score(results, metric) for results in history if metric in results):
        is_better = value > best + config.min_delta
        best, waited = (value, 0) if is_better else (best, waited + 1)
    return waited >= config.patience_evals
