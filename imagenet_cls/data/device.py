"""Transfers uint8 batches to the device and normalizes them; in training also erases and mixes."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from timm.data.mixup import Mixup
from torch import Tensor

from imagenet_cls.config.schema import ErasingConfig, MixConfig
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.seeding import hash_key, seed_generators


class Normalize:
    """Callable: uint8 (B, C, H, W) on any device -> float32 (B, C, H, W) on `device`, (x / 255 -
    mean) / std.

    mean, std: per channel, of values scaled to 0..1. Computed as (x - 255 mean) * (1 / (255 std)),
    in place.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device, channels_last: bool
    ):
        self.device = device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.shift = (
            torch.tensor(mean, dtype=torch.float64, device="cpu")
            .mul(255)
            .float()
            .view(1, -1, 1, 1)
            .to(device)
        )
        scale = torch.tensor(std, dtype=torch.float64, device="cpu").mul(255).reciprocal()
        self.scale = scale.float().view(1, -1, 1, 1).to(device)

    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        return (
            images.to(torch.float32, memory_format=self.memory_format)
            .sub_(self.shift)
            .mul_(self.scale)
        )


class DevicePrefetch:
    """Callable: batches -> the batches. On a GPU, images and targets are copied to it while the
    previous batch is used; for other devices nothing is copied.

    The copies run asynchronously from pinned memory, on one CUDA stream for all calls: the memory
    that a stream has allocated is only reused by this stream.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Iterator[TrainBatch]) -> Iterator[TrainBatch]:
        return batches if self.stream is None else self._copy_ahead(batches, self.stream)

    def _copy_ahead(
        self, batches: Iterator[TrainBatch], stream: torch.cuda.Stream
    ) -> Iterator[TrainBatch]:
        device = self.device

        def start_copy(batch: TrainBatch) -> tuple[TrainBatch, torch.cuda.Event]:
            with torch.cuda.stream(stream):
                images = batch.images.to(device, non_blocking=True)
                targets = batch.targets.to(device, non_blocking=True)
                return batch._replace(images=images, targets=targets), stream.record_event()

        def wait_for_copy(batch: TrainBatch, copied: torch.cuda.Event) -> TrainBatch:
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            for tensor in (batch.images, batch.targets):
                # its memory is not reused before the work queued on `current` is done
                tensor.record_stream(current)
            return batch

        started = None
        for batch in batches:
            previous, started = started, start_copy(batch)
            if previous is not None:
                yield wait_for_copy(*previous)
        if started is not None:
            yield wait_for_copy(*started)


def erase(
    images: Tensor, boxes: Tensor, keys: Tensor, mode: Literal["const", "rand", "pixel"]
) -> Tensor:
    """Fill the boxes of `images`, in place, and return them.

    images: float (N, C, H, W) on any device, normalized, so that zero is the mean color. boxes:
    int32 (N, n, 4), of `draw_boxes`. keys: int64 (N,), of the samples. Both are on the CPU, so that
    nothing waits for a GPU. mode, as in timm: zeros (`const`), one normal color for each box
    (`rand`) or for each pixel (`pixel`).
    """
    assert boxes.device.type == keys.device.type == "cpu" and len(images) == len(boxes) == len(keys)
    if mode == "const":
        return images.masked_fill_(_box_mask(boxes, images), 0)
    generator = torch.Generator(images.device)
    for row in boxes.any(2).any(1).nonzero().flatten().tolist():
        # hashed again: the worker drew from the key itself
        generator.manual_seed(hash_key("erase", int(keys[row])))
        for top, left, height, width in boxes[row].tolist():
            region = images[row, :, top : top + height, left : left + width]
            if region.numel():
                shape = region.shape if mode == "pixel" else (len(region), 1, 1)
                noise = torch.empty(shape, dtype=images.dtype, device=images.device)
                region.copy_(noise.normal_(generator=generator))
    return images


def _box_mask(boxes: Tensor, images: Tensor) -> Tensor:
    """bool (N, 1, H, W): whether a pixel is in a box. The operators do not depend on the boxes."""
    height, width = images.shape[2:]
    # of rows and of columns: (N, n, 2, 1)
    starts, sizes = boxes.to(images.device, non_blocking=True)[..., None].split(2, dim=2)
    positions = torch.arange(max(height, width), dtype=boxes.dtype, device=images.device)
    rows, columns = ((positions >= starts) & (positions < starts + sizes)).unbind(2)
    return (rows[:, :, :height, None] & columns[:, :, None, :width]).any(1, keepdim=True)


def build_mixing(config: MixConfig, num_classes: int, is_multilabel: bool = False) -> Mixup | None:
    """timm's mixup and cutmix, which pairs image i with image B - 1 - i; None where neither is on.

    It takes images, float (B, C, H, W) with an even B, which are **changed in place**, and targets,
    int64 (B,), or with several labels (is_multilabel) float (B, num_classes); it returns images and
    float32 targets (B, num_classes). It draws from numpy's default generator, on the host. With
    mode `batch` nothing waits for a GPU. Label smoothing is left to the loss (`optim.losses`), with
    the same result.
    """
    if not config.is_on:
        return None
    options = asdict(config)
    del options["off_epoch"]
    return Mixup(**options, label_smoothing=0.0, num_classes=num_classes, multi_label=is_multilabel)


def mix_batch(mixing: Mixup, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mix a batch of any size; timm's Mixup requires an even one. An image in the middle is paired
    with itself.
    """
    middle, is_odd = divmod(len(images), 2)
    if is_odd:
        images, targets = (
            torch.cat([batch[: middle + 1], batch[middle:]]) for batch in (images, targets)
        )
    images, targets = mixing(images, targets)
    if is_odd:
        images, targets = (
            torch.cat([batch[: middle + 1], batch[middle + 2 :]]) for batch in (images, targets)
        )
    return images, targets


@dataclass(frozen=True)
class TrainPreprocess:
    """Callable: a training batch -> (float32 images (B, C, H, W), targets) on the device:
    normalized, erased, mixed.

    targets: int64 (B,), or float (B, classes) with several labels or with mixing, which ends before
    `off_epoch`. Mixing draws from the key (seed, step, micro-batch, rank), erasing from the keys of
    the samples.
    """

    normalize: Normalize
    erasing: ErasingConfig
    mixing: Mixup | None
    seed: int
    rank: int
    off_epoch: int | None = None

    def __call__(
        self, batch: TrainBatch, epoch: int, step: int, micro_step: int
    ) -> tuple[Tensor, Tensor]:
        images = self.normalize(batch.images)
        targets = batch.targets.to(images.device, non_blocking=True)
        if batch.boxes is not None and batch.keys is not None:
            images = erase(images, batch.boxes, batch.keys, self.erasing.mode)
        if self.mixing is None or (self.off_epoch is not None and epoch >= self.off_epoch):
            return images, targets
        seed_generators(hash_key("mix", self.seed, step, micro_step, self.rank))
        return mix_batch(self.mixing, images, targets)
