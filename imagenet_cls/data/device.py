"""Batches of uint8 images to what the model takes: transfer, cast, normalise; in training also erase and mix."""

from collections.abc import Sequence

import torch

from imagenet_cls.config.schema import ErasingConfig
from imagenet_cls.data.erasing import erase
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.data.mixing import Mixing
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

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        assert images.dtype == torch.uint8 and images.ndim == 4, (images.dtype, images.shape)
        images = images.to(self.device, non_blocking=True)
        return images.to(torch.float32, memory_format=self.memory_format).sub_(self.shift).mul_(self.scale)


class TrainPreprocess:
    """Callable: a training batch -> (float32 images (B, 3, H, W), targets) on the device: normalised, erased, mixed.

    targets: int64 (B,), or float (B, classes) with mixing. Mixing draws from the key (seed, step, micro-batch, rank),
    erasing from the keys of the samples.
    """

    def __init__(self, preprocess: Preprocess, erasing: ErasingConfig, mixing: Mixing | None, seed: int, rank: int):
        self.preprocess = preprocess
        self.erasing = erasing
        self.mixing = mixing
        self.seed = seed
        self.rank = rank

    def __call__(self, batch: TrainBatch, epoch: int, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = self.preprocess(batch.images)
        targets = batch.targets.to(images.device, non_blocking=True)
        if batch.boxes is not None and batch.keys is not None:
            images = erase(images, batch.boxes, batch.keys, self.erasing.mode)
        if self.mixing is None:
            return images, targets
        seed_generators(hash_key("mix", self.seed, step, micro_batch, self.rank))
        return self.mixing(images, targets, epoch)
