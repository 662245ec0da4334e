"""The images of a part of a dataset, with their targets and classes, and what reads them."""

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from imagenet_cls.data.archive_files import ArchiveChangedError
from imagenet_cls.data.classes import match_classes
from imagenet_cls.data.decode import ChooseBox, decode_region, whole_image
from imagenet_cls.data.index import ImageIndex
from imagenet_cls.data.targets import map_targets
from imagenet_cls.data.turbojpeg import Box
from imagenet_cls.errors import DataError
from imagenet_cls.files import read_regular
from imagenet_cls.text import command_line, first_line

_MAX_SIZES = 1000
T = TypeVar("T")
Target = int | torch.Tensor


class Images(ABC):
    """Images that are read by their numbers. classes: the names of their targets."""

    classes: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, number: int) -> tuple[torch.Tensor, Target | None]:
        """An image as uint8 (3, H, W) on the CPU, and its target, None if the `ImageSet` has it.
        Raises DataError if it cannot be read.
        """

    def load_region(
        self, number: int, choose: ChooseBox
    ) -> tuple[torch.Tensor, Box, Target | None]:
        """As `load`, but only the pixels in the box that `choose` returns need to be defined. Also
        returns the box. Raises DataError for an image whose size `choose` refuses, too.
        """
        image, target = self.load(number)
        with named_errors(self.name(number)):
            return image, choose(*image.shape[1:]), target

    @abstractmethod
    def name(self, number: int) -> str:
        """The name of an image in messages and predictions: of a file, its path below the root."""

    def split_keys(self, numbers: np.ndarray) -> Sequence[bytes] | np.ndarray:
        """For each image the bytes whose hash decides whether it is held out."""
        return [str(number).encode() for number in numbers.tolist()]

    def ids(self) -> Sequence[Hashable]:
        """What identifies each image; equal for numbers of the same image, also of another part."""
        return [self.name(number) for number in range(len(self))]

    def sizes(self, numbers: np.ndarray) -> list[int] | None:
        """The sizes of files in bytes, -1 for a missing one; None if the images are not files."""
        return None

    @abstractmethod
    def digest(self) -> str:
        """A hex digest of the names, targets and classes of all images; not of pixels."""

    def subset_digest(self, subset: "ImageSet") -> str:
        """A hex digest of names, targets and classes of a set of these images."""
        is_all = np.array_equal(subset.numbers, np.arange(len(self)))
        if is_all and subset.classes == self.classes:
            return self.digest()
        digest = sha256(self.digest().encode() + subset.numbers.astype("<i8").tobytes())
        if subset.classes != self.classes:
            digest.update(os.fsencode("\0".join(subset.classes)))
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A part of a dataset: some of the `images`, in the order of `numbers`, int64 (N,).

    targets: see `data.targets`; None if they are known only by reading the images. classes: the
    names of the targets. left_out: the number of images that `data.exclude` has left out. note: for
    the user.
    """

    images: Images
    numbers: np.ndarray
    targets: np.ndarray | None
    classes: tuple[str, ...]
    left_out: int = 0
    note: str | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def files(self) -> "FileImages":
        """`images` of a dataset of files."""
        assert isinstance(self.images, FileImages)
        return self.images

    def load(self, i: int) -> tuple[torch.Tensor, Target]:
        """Image `i` as uint8 (3, H, W) on the CPU, and its target. Raises as `Images.load`."""
        image, target = self.images.load(int(self.numbers[i]))
        return image, self._target(i, target)

    def load_region(self, i: int, choose: ChooseBox) -> tuple[torch.Tensor, Box, Target]:
        """As `load`, with the pixels in a box, and the box: see `Images.load_region`."""
        image, box, target = self.images.load_region(int(self.numbers[i]), choose)
        return image, box, self._target(i, target)

    def _target(self, i: int, target: Target | None) -> Target:
        """The target of image `i`. target: as it was read."""
        if self.targets is not None:
            return target_at(self.targets, i)
        assert target is not None
        return target

    def name(self, i: int) -> str:
        return self.images.name(int(self.numbers[i]))

    def split_keys(self) -> Sequence[bytes] | np.ndarray:
        return self.images.split_keys(self.numbers)

    def strata(self) -> np.ndarray:
        """The class by which each image is held out, int64 (N,): 0 for all images with several
        labels, and where the targets are known only by reading the images.
        """
        if self.targets is not None and self.targets.ndim == 1:
            return self.targets
        return np.zeros(len(self), np.int64)

    def ids(self) -> Sequence[Hashable]:
        ids = self.images.ids()
        return [ids[number] for number in self.numbers]

    @cached_property
    def digest(self) -> str:
        """A hex digest of names, targets and classes; not of pixels."""
        return self.images.subset_digest(self)

    def size_fingerprint(self) -> str | None:
        """The sizes of at most 1,000 evenly spaced files, as number, sum and digest; None if the
        images are not files.

        Sizes reveal that a file was replaced under the same name. Reading the sizes of all files
        would take minutes on a network disk.
        """
        spaced = np.linspace(0, len(self) - 1, min(len(self), _MAX_SIZES)).astype(int)
        sizes = self.images.sizes(self.numbers[spaced])
        if sizes is None:
            return None
        digest = sha256(str(sizes).encode()).hexdigest()[:16]
        return f"{len(sizes)} files of {sum(sizes)} bytes ({digest})"

    def select(self, rows: np.ndarray) -> "ImageSet":
        """The images at these positions, in this order."""
        targets = None if self.targets is None else self.targets[rows]
        return replace(self, numbers=self.numbers[rows], targets=targets)

    def with_classes(
        self,
        classes: Sequence[str],
        path: Path | str,
        *,
        allow_missing: bool = False,
        allow_extra: bool = False,
    ) -> "ImageSet":
        """The same images with targets in the order of `classes`, matched by `match_classes`,
        without the images of extra classes; images with several labels stay. Raises DataError if
        the targets are not known.
        """
        if self.classes == tuple(classes):
            return self
        indices = match_classes(
            self.classes, classes, path, allow_missing=allow_missing, allow_extra=allow_extra
        )
        new = np.array(indices, np.int64)
        targets = self.required_targets("data.classes")
        kept = np.arange(len(targets))
        if targets.ndim == 1:
            kept = np.flatnonzero(new[targets] >= 0)
        mapped = map_targets(targets[kept], new, len(classes))
        return replace(self.select(kept), targets=mapped, classes=tuple(classes))

    def required_targets(self, key: str) -> np.ndarray:
        """The targets. Raises DataError without, for the key that needs them, and for targets that
        are out of range.
        """
        targets = self.targets
        if targets is None:
            raise DataError(
                f"{key}: needs the class of each image, which is not known without reading the "
                f"images ({self.name(0)}).",
                f"Give the dataset an attribute `targets` (docs/extending.md; of several labels, 0 "
                f"and 1), or don't set {key}.",
            )
        if len(targets) == 0 or targets.ndim == 2:
            return targets
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= len(self.classes):
            raise DataError(
                f"{key}: the targets of {self.name(0)} and others are {low} to {high}, and there "
                f"are {len(self.classes)} classes.",
                f"Give integers from 0 to {len(self.classes) - 1}.",
            )
        return targets


def all_images(images: Images, targets: np.ndarray | None) -> ImageSet:
    """The set of all `images`. targets: see `ImageSet`."""
    return ImageSet(images, np.arange(len(images)), targets, images.classes)


def indexed_images(index: ImageIndex, decode: str = "auto", exif: str = "ignore") -> ImageSet:
    """The set of all images of an index. For the other arguments see `EncodedImages`."""
    return all_images(FileImages(index, decode, exif), index.targets)


def target_at(targets: np.ndarray, i: int) -> Target:
    """The target of image `i`."""
    if targets.ndim == 1:
        return int(targets[i])
    return torch.from_numpy(targets[i]).float()


def stack_targets(targets: Sequence[Target]) -> torch.Tensor:
    """The targets of a batch: int64 (B,) or float32 (B, classes)."""
    rows = [target for target in targets if isinstance(target, torch.Tensor)]
    return torch.stack(rows) if rows else torch.tensor(targets)


class EncodedImages(Images):
    """Images that are stored as files, in a folder or elsewhere. decode, exif: keys of `data`."""

    decode: str
    exif: str

    @abstractmethod
    def read(self, number: int) -> bytes:
        """The content of the file of an image. Raises OSError or DataError (`reason_of`)."""

    @abstractmethod
    def describe(self, number: int) -> str:
        """Where an image is, for a message."""

    @abstractmethod
    def remedy(self, number: int) -> str:
        """What to do about an image that can't be read, in at most two lines."""

    def file_name(self, number: int) -> str:
        """The path of an image in shards, perhaps without a suffix."""
        return self.name(number)

    def load(self, number: int) -> tuple[torch.Tensor, None]:
        image, _, _ = self.load_region(number, whole_image)
        return image, None

    def load_region(self, number: int, choose: ChooseBox) -> tuple[torch.Tensor, Box, None]:
        def decode(data: bytes) -> tuple[torch.Tensor, Box]:
            return decode_region(data, choose, self.decode, self.exif)

        image, box = self.decoded(number, decode)
        return image, box, None

    def decoded(self, number: int, decode: Callable[[bytes], T]) -> T:
        """What `decode` makes of the file of an image. Raises DataError with its name."""
        try:
            return decode(self.read(number))
        except ArchiveChangedError:  # about the archive, and not about this image
            raise
        except (OSError, DataError) as error:
            reason = reason_of(error)
        raise DataError(f"{self.describe(number)}: {reason}.", self.remedy(number))


@dataclass(eq=False)
class FileImages(EncodedImages):
    """Image files of an `ImageIndex`, in folders or in archives."""

    index: ImageIndex
    decode: str = "auto"
    exif: str = "ignore"

    def __post_init__(self) -> None:
        self.classes = self.index.classes
        self._root = os.fsencode(self.index.root)

    def __len__(self) -> int:
        return len(self.index)

    def describe(self, number: int) -> str:
        return self.index.describe(number)

    def remedy(self, number: int) -> str:
        remedy = "Replace the archive, or make it again without this image."
        if self.index.byte_ranges is None:
            path = shlex.quote(str(self.index.path(number)))
            remedy = (
                f"Replace it (cp GOOD_FILE {path}), or delete it (rm {path}), and its line if the "
                "dataset is a list file."
            )
        return (
            f"{remedy}\nA training can leave it out: {command_line('verify-data')} lists such "
            "images for data.exclude. If it has begun, it also needs --resume."
        )

    def read(self, number: int) -> bytes:
        if self.index.byte_ranges is not None:
            return self.index.byte_ranges.read(number)
        return read_regular(os.path.join(self._root, self.index.names[number]))  # noqa: PTH118 (pathlib is slower)

    def name(self, number: int) -> str:
        return self.index.name(number)

    def split_keys(self, numbers: np.ndarray) -> np.ndarray:
        names: np.ndarray = self.index.names[numbers]
        return names

    def ids(self) -> Sequence[Hashable]:
        return self.index.image_ids()

    def sizes(self, numbers: np.ndarray) -> list[int]:
        if self.index.byte_ranges is not None:
            sizes: list[int] = self.index.byte_ranges.places[numbers, 2].tolist()
            return sizes
        paths = map(self.index.path, numbers)
        return [path.stat().st_size if path.is_file() else -1 for path in paths]

    def digest(self) -> str:
        return self.index.digest

    def subset_digest(self, subset: ImageSet) -> str:
        index = self.index.select(subset.numbers)
        assert subset.targets is not None
        return replace(index, targets=subset.targets, classes=subset.classes).digest


@contextmanager
def named_errors(name: object) -> Iterator[None]:
    """Raise a DataError about the image `name` for an OSError or DataError that only has the
    reason.
    """
    try:
        yield
    except (OSError, DataError) as error:
        remedy = "Leave it out, or use another one."
        raise DataError(f"{name}: {reason_of(error)}.", remedy) from error


def reason_of(error: OSError | DataError) -> str:
    """Why an image can't be read, without its name."""
    return error.problem if isinstance(error, DataError) else error.strerror or first_line(error)
