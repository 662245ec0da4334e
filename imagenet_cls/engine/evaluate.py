"""Evaluation: every image counts exactly once, on any number of ranks.

Shards are not padded, and models run without their DDP wrapper.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imagenet_cls.config.schema import Config
from imagenet_cls.data.device import Normalize
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.samplers import shard_for_eval
from imagenet_cls.engine.loaders import EvalBatch, build_val_batches
from imagenet_cls.engine.plan import ceil_div
from imagenet_cls.engine.precision import autocast, choose_precision
from imagenet_cls.engine.user_metrics import UserMetrics, compute_metrics, update_metrics
from imagenet_cls.parallel.devices import Devices
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.parallel.wrap import wrap_data_parallel
from imagenet_cls.tasks import Task, task_of
from imagenet_cls.tasks.outputs import EvalOutputs


class Evaluation:
    """What an evaluation of the images of `source` needs besides the models.

    devices: the devices of this rank. mean, std: the normalization, per channel. is_compiled:
    whether a model is compiled. Then all batches have one size, so that it is compiled once.
    keep_workers: whether data workers live until `close`, for more evaluations of the same images.
    Else they end with the batches.

    present: with `eval.classes` present the classes that the images have, int64 (P,) on the CPU; of
    the other classes the outputs are -inf. None: all. Raises DataError if they are not known.
    """

    def __init__(
        self,
        config: Config,
        source: ImageSet,
        context: RankContext,
        devices: Devices,
        mean: list[float],
        std: list[float],
        is_compiled: bool = False,
        keep_workers: bool = False,
    ):
        self.config = config
        self.source = source
        self.context = context
        self.mean = mean
        self.task = task_of(config)
        self.present = None
        if config.eval.classes == "present":
            self.present = torch.from_numpy(np.unique(source.required_targets("eval.classes")))
        self.normalize = Normalize(mean, std, context.device, config.train.channels_last)
        self.autocast_dtype = choose_precision(config.train, context.device)
        self.devices = devices
        self.pad_to = config.eval.batch_size if is_compiled else None
        # synthetic batches need no workers
        self.keep_workers = keep_workers and config.data.name != "synthetic"
        self.kept: Generator[EvalBatch] | None = None
        # Of the last `results`: recall (or average precision) and images of each class, by model.
        self.by_class: dict[str, dict[str, list[float]]] = {}

    def batches(self) -> Iterator[EvalBatch]:
        """The batches of this rank's shard."""
        context, devices = self.context, len(self.devices.all)
        batches = self.kept or build_val_batches(
            self.config, self.source, context, devices, self.mean, self.keep_workers
        )
        # An evaluation that is not finished would leave its other batches to the next one.
        self.kept = None
        shard = shard_for_eval(len(self.source), context.rank, context.world_size)
        yield from islice(batches, ceil_div(len(shard), self.config.eval.batch_size * devices))
        if self.keep_workers:
            self.kept = batches

    def close(self) -> None:
        """End the workers that `keep_workers` has kept."""
        if self.kept is not None:
            self.kept.close()
            self.kept = None

    def outputs(
        self, models: Mapping[str, nn.Module], batches: Iterable[EvalBatch] | None = None
    ) -> Iterator[EvalOutputs]:
        """`model_outputs` of models on the device. batches: by default the batches of this rank's
        shard.
        """
        wrapped = {name: wrap_data_parallel(model, self.devices) for name, model in models.items()}
        for logits, targets, indices in model_outputs(
            wrapped,
            self.batches() if batches is None else batches,
            self.normalize,
            self.devices.all[0],
            self.autocast_dtype,
            self.config.eval.flip_tta,
            self.pad_to,
        ):
            if self.present is not None:
                logits = {name: only_classes(x, self.present) for name, x in logits.items()}
            yield logits, targets, indices

    def results(
        self,
        outputs: Iterable[EvalOutputs],
        names: Sequence[str],
        num_classes: int,
        metrics: Mapping[str, UserMetrics] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """The `compute_results` of each model. Also:

        * classes, a text such as `200 of 1000`, if `eval.classes` is `present`;
        * left_out, the number of images that `data.exclude` has left out, if any.
        """
        results = compute_results(outputs, names, self.context, num_classes, self.task, metrics)
        for name, result in results.items():
            self.by_class[name] = {key: result.pop(key) for key in ("class_pct", "class_images")}
            if self.present is not None:
                result["classes"] = f"{len(self.present)} of {num_classes}"
            if self.source.left_out:
                result["left_out"] = self.source.left_out
        return results


def only_classes(logits: Tensor, classes: Tensor) -> Tensor:
    """Logits (B, outputs) with -inf for all but these classes."""
    is_other = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
    is_other[classes.to(logits.device)] = False
    return logits.masked_fill(is_other, -torch.inf)


@torch.no_grad()
def model_outputs(
    models: Mapping[str, nn.Module],
    batches: Iterable[EvalBatch],
    normalize: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    flip: bool = False,
    pad_to: int | None = None,
) -> Iterator[EvalOutputs]:
    """Run all models in evaluation mode over each batch, so that every image is decoded once. The
    models stay in this mode.

    dtype: the dtype of autocast, if any. flip: `eval.flip_tta`. pad_to: smaller batches are padded
    to this size, and the additional logits dropped. Logits and targets are on `device`, indices on
    the CPU.
    """
    for model in models.values():
        model.eval()
    for images, targets, indices in batches:
        count = len(images)
        if pad_to is not None and count < pad_to:
            images = torch.cat([images, images.new_zeros(pad_to - count, *images.shape[1:])])
        pixels = normalize(images)
        logits = {}
        for name, model in models.items():
            with autocast(device, dtype):
                outputs = compute_logits(model, pixels, flip)
            logits[name] = outputs[:count].to(device)
        yield logits, targets.to(device, non_blocking=True), indices


def compute_logits(model: nn.Module, pixels: Tensor, flip: bool) -> Tensor:
    """fp32 logits (B, classes) of normalized images (B, C, H, W). flip: the mean with the logits of
    the mirror images.
    """
    logits = model(pixels).float()
    if not flip:
        return logits
    # A copy, since a model compiled with CUDA graphs returns the same memory at each call.
    return (logits.clone() + model(pixels.flip(3)).float()) / 2


def compute_results(
    outputs: Iterable[EvalOutputs],
    names: Sequence[str],
    context: RankContext,
    num_classes: int,
    task: Task,
    metrics: Mapping[str, UserMetrics] | None = None,
) -> dict[str, dict[str, Any]]:
    """The results of each model over the shards of all ranks. A collective: a rank with an empty
    shard calls it, too.

    names: the names of the models. num_classes: the number of outputs of each model. metrics: the
    user-defined metrics of each model.

    Returns a dictionary for each model:
    * the results of `Task.results`;
    * seconds, for all models together;
    * the values of user-defined metrics.
    """
    started = time.perf_counter()
    metrics = metrics or {name: {} for name in names}
    no_classes = torch.zeros(0, dtype=torch.int64, device=context.device)
    no_targets = task.targets_of_classes(no_classes, num_classes)
    watched = update_metrics(outputs, metrics, num_classes, no_targets)
    results = task.results(watched, names, num_classes, context)
    seconds = time.perf_counter() - started  # the device has done its work
    for name, result in results.items():
        result["seconds"] = seconds
        result |= compute_metrics(metrics[name], context)
    return results
