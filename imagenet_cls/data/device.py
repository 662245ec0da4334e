"""Batches of uint8 images to what the model takes: transfer, cast, normalise; in training also erase and mix."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from timm.data.mixup import Mixup
from torch import Tensor

from imagenet_cls.config.schema import ErasingConfig, MixConfig
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.errors import Problem
from imagenet_cls.seeding import hash_key, seed_generators


class Preprocess:
    """Callable: uint8 (B, 3, H, W) on any device -> float32 (B, 3, H, W) on `device`, (x / 255 - mean) / std.

    mean, std: per channel, of values scaled to 0..1. Computed as (x - 255 mean) * (1 / (255 std)), in place, which
    differs by rounding only. The transfer is of bytes, and asynchronous from pinned memory.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device, channels_last: bool):
        assert len(mean) == 3 and len(std) == 3, (mean, std)
        self.device = device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.shift = torch.tensor(mean, dtype=torch.float64, device="cpu").mul(255).float().view(1, 3, 1, 1).to(device)
        scale = torch.tensor(std, dtype=torch.float64, device="cpu").mul(255).reciprocal()
        self.scale = scale.float().view(1, 3, 1, 1).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8 and images.ndim == 4, (images.dtype, images.shape)
        images = images.to(self.device, non_blocking=True)
        return images.to(torch.float32, memory_format=self.memory_format).sub_(self.shift).mul_(self.scale)


def erase(images: Tensor, boxes: Tensor, keys: Tensor, mode: Literal["const", "rand", "pixel"]) -> Tensor:
    """Fill the boxes of `images`, in place, and return them.

    images: float (N, 3, H, W) on any device, normalised, so that zero is the mean colour. boxes: int32 (N, n, 4) of
    `draw_boxes`, and keys: int64 (N,) of the samples, both on the CPU, so that nothing waits for a GPU. mode, as in
    timm: zeros (`const`), one normal colour for each box (`rand`) or for each pixel (`pixel`). The same key gives the
    same colours on the same device type.
    """
    assert boxes.device.type == keys.device.type == "cpu" and len(images) == len(boxes) == len(keys)
    draws = torch.Generator(images.device)
    for image, image_boxes, key in zip(images, boxes.tolist(), keys.tolist(), strict=True):
        boxes_to_fill = [box for box in image_boxes if box[2] and box[3]]
        if boxes_to_fill and mode != "const":
            draws.manual_seed(hash_key("erase", key))  # hashed again: the worker drew from the key itself
        for top, left, height, width in boxes_to_fill:
            region = image[:, top : top + height, left : left + width]
            if mode == "const":
                region.zero_()
            else:
                shape = (len(image), 1, 1) if mode == "rand" else region.shape
                region.copy_(torch.empty(shape, dtype=images.dtype, device=images.device).normal_(generator=draws))
    return images


class Mixing:
    """Callable: a micro-batch -> the mixed micro-batch. timm's `Mixup`, which pairs image i with image B - 1 - i.

    Draws from numpy's default generator, on the host: the caller seeds it by (seed, step, micro-batch, rank). With mode
    `batch` nothing waits for a GPU; `pair` and `elem` copy their B ratios to it. Label smoothing is left to the loss
    (`optim.losses`), with the same result.
    """

    def __init__(self, mix: MixConfig, num_classes: int):
        arguments = asdict(mix)
        self._off_epoch: int | None = arguments.pop("off_epoch")
        self._mixup = Mixup(**arguments, label_smoothing=0.0, num_classes=num_classes)

    def __call__(self, images: Tensor, targets: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """images: float (B, 3, H, W), B even; **changed in place**. targets: int64 (B,), on the same device.

        Returns images and float32 targets (B, classes) whose rows sum to 1, also where the draw is not to mix. From
        `mix.off_epoch` on, returns its arguments.
        """
        if self._off_epoch is not None and epoch >= self._off_epoch:
            return images, targets
        mixed: tuple[Tensor, Tensor] = self._mixup(images, targets)
        return mixed


def mixes(mix: MixConfig) -> bool:
    """Whether mixup or cutmix is on."""
    return mix.mixup_alpha > 0 or mix.cutmix_alpha > 0 or mix.cutmix_minmax is not None


def build_mixing(mix: MixConfig, num_classes: int) -> Mixing | None:
    """The mixing of a run, or None where neither mixup nor cutmix is on. num_classes: the model's outputs."""
    return Mixing(mix, num_classes) if mixes(mix) else None


def mixing_problems(mix: MixConfig, loader_batch: int, global_batch: int | None = None) -> list[Problem]:
    """The problem of micro-batches with an odd number of images, which mixing can't pair.

    loader_batch: images in a rank's micro-batch. global_batch: of a whole step, to suggest the nearest that work.
    """
    if not mixes(mix) or loader_batch % 2 == 0:
        return []
    remedy = "set train.micro_batch_size to an even divisor of each rank's share of the batch"
    if global_batch is not None:
        micro_batches = global_batch // loader_batch
        nearest = [size * micro_batches for size in (loader_batch - 1, loader_batch + 1) if size > 0]
        remedy = f"use {' or '.join(map(str, nearest))}, or {remedy}"
    text = f"makes micro-batches of {loader_batch} images, and mixup and cutmix need an even number; {remedy}"
    return [Problem("train.global_batch_size", text)]


@dataclass(frozen=True)
class TrainPreprocess:
    """Callable: a training batch -> (float32 images (B, 3, H, W), targets) on the device: normalised, erased, mixed.

    targets: int64 (B,), or float (B, classes) with mixing. Mixing draws from the key (seed, step, micro-batch, rank),
    erasing from the keys of the samples.
    """

    preprocess: Preprocess
    erasing: ErasingConfig
    mixing: Mixing | None
    seed: int
    rank: int

    def __call__(self, batch: TrainBatch, epoch: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        images = self.preprocess(batch.images)
        targets = batch.targets.to(images.device, non_blocking=True)
        if batch.boxes is not None and batch.keys is not None:
            images = erase(images, batch.boxes, batch.keys, self.erasing.mode)
        if self.mixing is None:
            return images, targets
        seed_generators(hash_key("mix", self.seed, step, micro_batch, self.rank))
        return self.mixing(images, targets, epoch)
