"""Random images made on the device: to measure a model without its input, and to try a config without data.

For a `SyntheticSource`, `SyntheticLoader` and `synthetic_eval_batches` replace `TrainLoader` and `eval_batches`; then
nothing is decoded or copied.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import torch

from imagenet_cls.config.schema import AugmentConfig
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.transforms import draw_boxes, size_px_at
from imagenet_cls.seeding import generator, hash_key, preserve_rng_state, seed_generators

# Different micro-batches to choose from. Few, to save GPU memory.
POOL_BATCHES = 4


class SyntheticSource:
    """`num_images` random images of size_px by size_px with random targets. part: part of the key, as `train`."""

    def __init__(self, part: str, num_images: int, num_classes: int, size_px: int = 224):
        self.part = part
        self.num_images = num_images
        self.size_px = size_px
        self.classes = tuple(str(number) for number in range(num_classes))

    def __len__(self) -> int:
        return self.num_images

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        draws = generator("synthetic", self.part, i)
        image = torch.randint(0, 256, (3, self.size_px, self.size_px), dtype=torch.uint8, generator=draws)
        return image, hash_key("synthetic target", self.part, i) % len(self.classes)

    def name(self, i: int) -> str:
        return f"synthetic/{self.part}[{i}]"

    def digest(self) -> str:
        return sha256(repr((self.part, self.num_images, self.size_px, len(self.classes))).encode()).hexdigest()


class SyntheticLoader:
    """A `TrainLoader` whose batches are made on `device`, a few for each image size, and used again and again.

    The key (seed, epoch, step, micro-batch, rank) chooses the batch, and (seed, rank, number in the pool) decides its
    content. Size, splits and erasing are as in `augment`; the rest of it would not change noise.
    """

    def __init__(
        self,
        source: SyntheticSource,
        sampler: EpochSampler,
        micro_batch_size: int,
        augment: AugmentConfig,
        seed: int,
        device: torch.device,
    ):
        share = sampler.global_batch_size // sampler.world_size
        assert share % micro_batch_size == 0, (share, micro_batch_size)
        self.source = source
        self.sampler = sampler
        self.micro_batch_size = micro_batch_size
        self.augment = augment
        self.seed = seed
        self.device = device
        self.micro_batches = share // micro_batch_size
        self.size_px = 0
        self.pool: list[TrainBatch] = []

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[TrainBatch]:
        """Micro-batches of this rank, images and targets on the device. They share memory: don't change them."""
        size_px = size_px_at(self.augment, epoch)
        if self.size_px != size_px or not self.pool:
            self.pool = []  # free the memory first
            self.pool = [self._batch((self.seed, self.sampler.rank, place), size_px) for place in range(POOL_BATCHES)]
            self.size_px = size_px
        for step in range(start_step, self.sampler.steps_per_epoch):
            for micro_batch in range(self.micro_batches):
                key = hash_key("synthetic", self.seed, epoch, step, micro_batch, self.sampler.rank)
                yield self.pool[key % len(self.pool)]

    def _batch(self, key: tuple[int, int, int], size_px: int) -> TrainBatch:
        splits, erasing = self.augment.splits, self.augment.erasing
        num_classes = len(self.source.classes)
        images, targets = _random_batch(key, self.micro_batch_size * splits, size_px, num_classes, self.device)
        if erasing.prob == 0:
            return TrainBatch(images, targets[: self.micro_batch_size])
        keys = [hash_key("synthetic sample", *key, place) for place in range(len(images))]
        boxes = torch.zeros(len(images), erasing.max_count, 4, dtype=torch.int32)
        with preserve_rng_state():
            for place in range(self.micro_batch_size if splits > 1 else 0, len(images)):
                seed_generators(keys[place])
                boxes[place] = draw_boxes(erasing, size_px)
        return TrainBatch(images, targets[: self.micro_batch_size], boxes, torch.tensor(keys))

    def close(self) -> None:
        """Free the pool."""
        self.pool = []


def synthetic_eval_batches(
    source: SyntheticSource, indices: Sequence[int], batch_size: int, size_px: int, seed: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """As `eval_batches`: (images, targets, indices), every index once, always the same images."""
    images, targets = _random_batch((seed, "eval", 0), batch_size, size_px, len(source.classes), device)
    for start in range(0, len(indices), batch_size):
        chunk = torch.tensor(list(indices[start : start + batch_size]), dtype=torch.int64)
        yield images[: len(chunk)], targets[: len(chunk)], chunk


def _random_batch(
    key: tuple[int, int | str, int], batch_size: int, size_px: int, num_classes: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator(device).manual_seed(hash_key("synthetic batch", *key))
    shape = (batch_size, 3, size_px, size_px)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=draws)
    return images, torch.randint(0, num_classes, (batch_size,), device=device, generator=draws)
