"""Datasets that need no files.

scikit-learn's digits, written once as JPEGs, and random images made on the device.

With `data.name: synthetic`, `SyntheticLoader` and `synthetic_eval_batches` replace `TrainLoader`
and `eval_batches`.
"""

import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from imagenet_cls.config.schema import AugmentConfig, Size, height_width
from imagenet_cls.data.loader import TrainBatch, TrainLoader
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.transforms import draw_boxes, size_px_at
from imagenet_cls.errors import DataError, ResourceError
from imagenet_cls.seeding import generator, hash_key, preserve_rng_state, seed_generators

DIGIT_PX = 32
NUM_DIGITS = 1797
_COMPOSED_IMAGES = {"train": 2_400, "val": 600}
_COMPOSED_PX = 24  # side of a digit
# Different micro-batches to choose from. Few, to save GPU memory.
POOL_BATCHES = 4


def write_digits(root: Path, part: str) -> None:
    """Write the 1,797 digits to `root/part/<digit>/<number>.jpg` unless they are there, enlarged
    from 8 to 32 pixels.

    Several processes may do so at once. Raises DataError for a folder with other contents.
    """
    folder = root / part
    if folder.exists():
        found = sum(1 for _ in folder.glob("[0-9]/*.jpg"))
        if found != NUM_DIGITS:
            raise DataError(
                f"{folder}: holds {found} images of digits, not {NUM_DIGITS}.",
                "Delete the folder, or set data.root elsewhere; the next start writes it again.",
            )
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=root) as temporary:
            _write(Path(temporary, part))
            Path(temporary, part).rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process was faster
            raise ResourceError(
                f"{folder}: the digits can't be written: {error.strerror}.",
                "Make room, or set data.root elsewhere.",
            ) from None


def _write(folder: Path) -> None:
    from sklearn.datasets import load_digits  # takes a second to import, and only the demo needs it

    digits = load_digits()
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))
        image = image.resize((DIGIT_PX, DIGIT_PX), Image.Resampling.BICUBIC)
        image.save(folder / str(digit) / f"{number:04d}.jpg", quality=95)


class ComposedDigits:
    """One to three of scikit-learn's digits side by side on 24 x 72 pixels, for `data.labels`
    multi.

    Map-style: (uint8 (3, 24, 72), float32 (10,) with 1 for each digit that is there). part: `train`
    has 2,400 images of the first four fifths of the digits, `val` 600 of the others. root: not
    used.
    """

    def __init__(self, root: str, part: str):
        from sklearn.datasets import load_digits

        digits = load_digits()
        first_of_val = 4 * NUM_DIGITS // 5
        chosen = slice(first_of_val) if part == "train" else slice(first_of_val, None)
        self.pixels = torch.from_numpy(digits.images[chosen])  # float64, 0 to 16
        self.digits = torch.from_numpy(digits.target[chosen])
        self.classes = [str(digit) for digit in range(10)]
        # the digit in each of three places, -1 for none
        self.places = torch.full((_COMPOSED_IMAGES[part], 3), -1)
        random = generator("composed digits", part)
        for row in self.places:
            count = int(torch.randint(1, 4, (), generator=random))
            places = torch.randperm(3, generator=random)[:count]
            row[places] = torch.randint(len(self.digits), (count,), generator=random)
        self.targets = torch.stack([self._target(row) for row in self.places])

    def _target(self, row: Tensor) -> Tensor:
        return torch.zeros(10).index_fill(0, self.digits[row[row >= 0]], 1.0)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = torch.zeros(_COMPOSED_PX, 3, _COMPOSED_PX)
        for place, number in enumerate(self.places[i].tolist()):
            if number >= 0:
                enlarged = self.pixels[number].repeat_interleave(3, 0).repeat_interleave(3, 1)
                image[:, place] = enlarged
        rgb = (image * (255 / 16)).round().to(torch.uint8).flatten(1).expand(3, -1, -1)
        return rgb.contiguous(), self.targets[i]


@dataclass(eq=False)
class SyntheticSource(ImageSource):
    """`num_images` random images of size_px by size_px with random targets. part: part of the key,
    as `train`.
    """

    part: str
    num_images: int
    num_classes: int
    size_px: int = 224

    def __post_init__(self) -> None:
        self.classes = tuple(map(str, range(self.num_classes)))

    def __len__(self) -> int:
        return self.num_images

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        draws = generator("synthetic", self.part, i)
        image = torch.randint(
            0, 256, (3, self.size_px, self.size_px), dtype=torch.uint8, generator=draws
        )
        return image, hash_key("synthetic target", self.part, i) % len(self.classes)

    def name(self, i: int) -> str:
        return f"synthetic/{self.part}[{i}]"

    def digest(self) -> str:
        content = self.part, self.num_images, self.size_px, len(self.classes)
        return sha256(repr(content).encode()).hexdigest()


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
