"""Random images. A few batches of them are kept on the device, so that nothing is loaded."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from imagenet_cls.config.schema import COUNT, DataConfig
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.loader import TrainBatch, TrainLoader, WorkerOptions
from imagenet_cls.data.map_style import image_set_of
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.transforms import TrainTransform
from imagenet_cls.errors import Problem
from imagenet_cls.lookup import kwargs_problems, number_problem
from imagenet_cls.seeding import generator, hash_key

# Different micro-batches, or those of one step if these are more. Few, to save GPU memory.
POOL_BATCHES = 2


class SyntheticImages:
    """Map-style: random images of size_px by size_px with random targets. part: `train` or `val`,
    a part of the key.
    """

    def __init__(
        self,
        part: str,
        train_images: int = 1_281_167,
        val_images: int = 50_000,
        num_classes: int = 1000,
        size_px: int = 224,
    ):
        self.part = part
        self.num_images = train_images if part == "train" else val_images
        self.num_classes = num_classes
        self.size_px = size_px

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        draws = generator("synthetic", self.part, number)
        shape = 3, self.size_px, self.size_px
        image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draws)
        return image, hash_key("synthetic target", self.part, number) % self.num_classes


def open_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageSet:
    """A part. classes: not used."""
    part = "val" if part == config.val else "train"
    return image_set_of(SyntheticImages(part, **config.kwargs), config, part)


def problems(config: DataConfig) -> list[Problem]:
    """All problems of the arguments."""
    return kwargs_problems("data.kwargs", SyntheticImages, config.kwargs, passed=("part",)) or [
        Problem(f"data.kwargs.{name}", text)
        for name, value in config.kwargs.items()
        if (text := number_problem(value, COUNT, whole=True))
    ]


class SyntheticLoader(TrainLoader):
    """As `TrainLoader`, but without workers. The first batches of an epoch are kept on `device`,
    and used again and again.
    """

    def __init__(
        self,
        source: ImageSet,
        transform: TrainTransform,
        sampler: EpochSampler,
        seed: int,
        device: torch.device,
    ):
        super().__init__(source, transform, sampler, seed, WorkerOptions())
        self.device = device

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[TrainBatch]:
        """Batches from `start_step` on, images and targets on the device. They share memory: don't
        change them.
        """
        per_step = len(self.sampler.micro_batch_sizes)
        pool_size = max(POOL_BATCHES // per_step, 1) * per_step
        pool = [
            batch._replace(
                images=batch.images.to(self.device), targets=batch.targets.to(self.device)
            )
            for batch in islice(super().epoch(epoch), pool_size)
        ]
        for number in range(start_step * per_step, self.sampler.steps_per_epoch * per_step):
            yield pool[number % len(pool)]


def repeat_first_batch(
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    indices: Sequence[int],
    batch_size: int,
    device: torch.device,
) -> Generator[tuple[Tensor, Tensor, Tensor]]:
    """As `eval_batches`: (images, targets, indices), every index once, but always the images and
    targets of the first of `batches`, on the device.
    """
    for images, targets, _ in islice(batches, 1):
        images, targets = images.to(device), targets.to(device)
        for chunk in torch.tensor(indices).split(batch_size):
            yield images[: len(chunk)], targets[: len(chunk)], chunk
