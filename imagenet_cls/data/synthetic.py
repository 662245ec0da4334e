"""Random images, made on the device.

With `data.name: synthetic`, `SyntheticLoader` and `synthetic_eval_batches` replace `TrainLoader`
and `eval_batches`.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from imagenet_cls.config.schema import COUNT, AugmentConfig, DataConfig, Size, height_width
from imagenet_cls.data.image_set import Images, ImageSet, all_images
from imagenet_cls.data.loader import TrainBatch, TrainLoader
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.transforms import draw_boxes, size_px_at
from imagenet_cls.errors import Problem
from imagenet_cls.lookup import kwargs_problems, number_problem
from imagenet_cls.seeding import generator, hash_key, preserve_rng_state, seed_generators

# Different micro-batches to choose from. Few, to save GPU memory.
POOL_BATCHES = 4


@dataclass(eq=False)
class SyntheticImages(Images):
    """`num_images` random images of size_px by size_px with random targets. part: part of the key,
    as `train`.
    """

    part: str
    num_images: int
    num_classes: int
    size_px: int = 224

    def __len__(self) -> int:
        return self.num_images

    def load(self, number: int) -> tuple[torch.Tensor, int]:
        draws = generator("synthetic", self.part, number)
        image = torch.randint(
            0, 256, (3, self.size_px, self.size_px), dtype=torch.uint8, generator=draws
        )
        return image, hash_key("synthetic target", self.part, number) % self.num_classes

    def name(self, number: int) -> str:
        return f"synthetic/{self.part}[{number}]"

    def digest(self) -> str:
        content = self.part, self.num_images, self.size_px, self.num_classes
        return sha256(repr(content).encode()).hexdigest()


def open_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageSet:
    """A part. classes: not used."""
    images = _images("val" if part == config.val else "train", **config.kwargs)
    return all_images(images, None, tuple(map(str, range(images.num_classes))))


def problems(config: DataConfig) -> list[Problem]:
    """All problems of the arguments."""
    return kwargs_problems("data.kwargs", _images, config.kwargs, passed=("part",)) or [
        Problem(f"data.kwargs.{name}", text)
        for name, value in config.kwargs.items()
        if (text := number_problem(value, COUNT, whole=True))
    ]


def _images(
    part: str,
    train_images: int = 1_281_167,
    val_images: int = 50_000,
    num_classes: int = 1000,
    size_px: int = 224,
) -> SyntheticImages:
    count = train_images if part == "train" else val_images
    return SyntheticImages(part, count, num_classes, size_px)


@dataclass
class SyntheticLoader:
    """As `TrainLoader`, but the batches are made on `device`, a few for each epoch, and used again
    and again.

    The key (seed, epoch, step, micro-batch, rank) chooses the batch, and (seed, rank, number in the
    pool) decides its content. Size, splits and erasing are as in `augment`; the rest of it would
    not change noise.
    """

    num_classes: int
    sampler: EpochSampler
    augment: AugmentConfig
    seed: int
    device: torch.device
    channels: int = 3

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[TrainBatch]:
        """Micro-batches of this rank, images and targets on the device. They share memory: don't
        change them.
        """
        rank = self.sampler.rank
        size_px = size_px_at(self.augment, epoch)
        sizes = self.sampler.micro_batch_sizes
        pools: dict[int, list[TrainBatch]] = {}
        for size in set(sizes):
            keys = [(self.seed, rank, number) for number in range(POOL_BATCHES)]
            pools[size] = [self._batch(key, size, size_px) for key in keys]
        for step in range(start_step, self.sampler.steps_per_epoch):
            for micro_batch, size in enumerate(sizes):
                key = hash_key("synthetic", self.seed, epoch, step, micro_batch, rank)
                yield pools[size][key % POOL_BATCHES]

    def _batch(self, key: tuple[int, int, int], batch_size: int, size_px: Size) -> TrainBatch:
        splits = self.augment.splits
        erasing = self.augment.erasing
        shape = batch_size * splits, self.channels, *height_width(size_px)
        images, targets = _random_batch(key, shape, self.num_classes, self.device)
        targets = targets[:batch_size]
        if erasing.prob == 0:
            return TrainBatch(images, targets)
        keys = [hash_key("synthetic sample", *key, row) for row in range(len(images))]
        boxes = torch.zeros(len(images), erasing.max_count, 4, dtype=torch.int32)
        with preserve_rng_state():
            for row in range(batch_size if splits > 1 else 0, len(images)):
                seed_generators(keys[row])
                drawn = draw_boxes(erasing, size_px)
                if drawn:
                    boxes[row, : len(drawn)] = torch.tensor(drawn)
        return TrainBatch(images, targets, boxes, torch.tensor(keys))

    def close(self) -> None:
        """Has no effect: there are no workers."""


BatchLoader = TrainLoader | SyntheticLoader


def synthetic_eval_batches(
    num_classes: int,
    indices: Sequence[int],
    batch_size: int,
    size_px: Size,
    seed: int,
    device: torch.device,
    channels: int = 3,
) -> Generator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """As `eval_batches`: (images, targets, indices), every index once, always the same images."""
    shape = batch_size, channels, *height_width(size_px)
    images, targets = _random_batch((seed, "eval", 0), shape, num_classes, device)
    for start in range(0, len(indices), batch_size):
        chunk = torch.tensor(list(indices[start : start + batch_size]), dtype=torch.int64)
        yield images[: len(chunk)], targets[: len(chunk)], chunk


def _random_batch(
    key: tuple[int, int | str, int],
    shape: tuple[int, int, int, int],
    num_classes: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator(device).manual_seed(hash_key("synthetic batch", *key))
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=draws)
    return images, torch.randint(0, num_classes, shape[:1], device=device, generator=draws)
