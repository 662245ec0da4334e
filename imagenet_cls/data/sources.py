"""One image and its target: image files, map-style datasets, and subsets of another source."""

import os
import shlex
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image

from imagenet_cls.data.archive_files import ArchiveChangedError
from imagenet_cls.data.classes import match_classes, targets_of_dataset
from imagenet_cls.data.decode import (
    ChooseBox,
    decode_region,
    decode_rgb,
    decode_upright,
    exif_orientation,
    rgb_tensor,
)
from imagenet_cls.data.index import ImageIndex
from imagenet_cls.data.targets import map_targets, target_bytes
from imagenet_cls.data.turbojpeg import Box, find_turbojpeg
from imagenet_cls.errors import DataError
from imagenet_cls.files import read_regular
from imagenet_cls.text import first_line

_MAX_SIZES = 1000
_MAX_ORIENTATIONS = 200
_ORIENTATIONS_SEC = 3.0
T = TypeVar("T")
Target = int | torch.Tensor


class ImageSource(Protocol):
    """A part of a dataset."""

    classes: tuple[str, ...]
    left_out: int = 0  # images that `data.exclude` has left out

    def __len__(self) -> int: ...

    def load(self, i: int) -> tuple[torch.Tensor, Target]:
        """Image `i` as uint8 (3, H, W) on the CPU, and its target. Raises DataError if it cannot be
        read.
        """

    def load_region(self, i: int, choose: ChooseBox) -> tuple[torch.Tensor, Box, Target]:
        """As `load`, but only the pixels in the box that `choose` returns need to be defined. Also
        returns the box. Raises DataError for an image whose size `choose` refuses, too.
        """
        image, target = self.load(i)
        with named_errors(self.name(i)):
            return image, choose(*image.shape[1:]), target

    def name(self, i: int) -> str:
        """The name of image `i` in messages and predictions: of a file, its path below the root."""

    def digest(self) -> str:
        """A hex digest of names and targets; not of pixels."""

    def known_targets(self) -> np.ndarray | None:
        """All targets (`data.targets`) without reading images; None where they are not known."""
        return None

    def image_ids(self) -> Sequence[Hashable]:
        """What identifies each image; equal for rows of the same image."""
        return range(len(self))


def target_at(targets: np.ndarray, i: int) -> Target:
    """The target of image `i`."""
    if targets.ndim == 1:
        return int(targets[i])
    return torch.from_numpy(targets[i]).float()


def stack_targets(targets: Sequence[Target]) -> torch.Tensor:
    """The targets of a batch: int64 (B,) or float32 (B, classes)."""
    rows = [target for target in targets if isinstance(target, torch.Tensor)]
    return torch.stack(rows) if rows else torch.tensor(targets)


class EncodedSource(ImageSource):
    """Images that are stored as files, in a folder or elsewhere.

    decode, exif: keys of `data`. targets: see `data.targets`.
    """

    decode: str
    exif: str
    targets: np.ndarray

    def __post_init__(self) -> None:
        self.turbojpeg = find_turbojpeg() if self.decode == "auto" else None

    def read(self, i: int) -> bytes:
        """The content of the file of image `i`. Raises OSError or DataError (`reason_of`)."""
        raise NotImplementedError

    def describe(self, i: int) -> str:
        """Where image `i` is, for a message."""
        raise NotImplementedError

    def remedy(self, i: int) -> str:
        """What to do about image `i`, which can't be read, in at most two lines."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.targets)

    def known_targets(self) -> np.ndarray:
        return self.targets

    def load(self, i: int) -> tuple[torch.Tensor, Target]:
        decode = decode_upright if self.exif == "apply" else decode_rgb
        return self._decode(i, decode), target_at(self.targets, i)

    def load_region(self, i: int, choose: ChooseBox) -> tuple[torch.Tensor, Box, Target]:
        def decode(data: bytes) -> tuple[torch.Tensor, Box]:
            return decode_region(data, choose, self.turbojpeg, self.exif)

        image, box = self._decode(i, decode)
        return image, box, target_at(self.targets, i)

    def _decode(self, i: int, decode: Callable[[bytes], T]) -> T:
        try:
            return decode(self.read(i))
        except ArchiveChangedError:  # about the archive, and not about this image
            raise
        except (OSError, DataError) as error:
            reason = reason_of(error)
        raise DataError(f"{self.describe(i)}: {reason}.", self.remedy(i))


@dataclass(eq=False)
class FolderSource(EncodedSource):
    """Image files of an `ImageIndex`, in folders or in archives.

    exclude_advice: how to leave bad images out, for the error about one.
    """

    index: ImageIndex
    exclude_advice: str | None = None
    decode: str = "auto"
    exif: str = "ignore"
    left_out: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classes = self.index.classes
        self.targets = self.index.targets
        self._root = os.fsencode(self.index.root)

    def describe(self, i: int) -> str:
        return self.index.describe(i)

    def remedy(self, i: int) -> str:
        remedy = "Replace the archive, or make it again without this image."
        if self.index.byte_ranges is None:
            path = shlex.quote(str(self.index.path(i)))
            remedy = (
                f"Replace it (cp GOOD_FILE {path}), or delete it (rm {path}), and its line if the "
                "dataset is a list file."
            )
        if self.exclude_advice is None:
            return remedy
        return f"{remedy}\nOr leave it out: {self.exclude_advice}"

    def read(self, i: int) -> bytes:
        if self.index.byte_ranges is not None:
            return self.index.byte_ranges.read(i)
        return read_regular(os.path.join(self._root, self.index.names[i]))  # noqa: PTH118 (pathlib is slower)

    def name(self, i: int) -> str:
        return self.index.name(i)

    def digest(self) -> str:
        return self.index.digest

    def image_ids(self) -> Sequence[Hashable]:
        return self.index.image_ids()


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


def size_fingerprint(source: ImageSource) -> str | None:
    """The sizes of at most 1,000 evenly spaced files, as number, sum and digest; None if the images
    are not files.

    Sizes reveal that a file was replaced under the same name. Reading the sizes of all files would
    take minutes on a network disk.
    """
    if not isinstance(source, FolderSource):
        return None
    rows = np.linspace(0, len(source) - 1, min(len(source), _MAX_SIZES)).astype(int)
    if source.index.byte_ranges is not None:
        sizes = source.index.byte_ranges.places[rows, 2].tolist()
    else:
        paths = map(source.index.path, rows)
        sizes = [path.stat().st_size if path.is_file() else -1 for path in paths]
    digest = sha256(str(sizes).encode()).hexdigest()[:16]
    return f"{len(sizes)} files of {sum(sizes)} bytes ({digest})"


def exif_warning(source: ImageSource) -> str | None:
    """A warning if 5 % or more of at most 200 evenly spaced files have an EXIF orientation that
    `data.exif` ignores.

    It stops reading files after three seconds. Files that can't be read are ignored: they are
    errors when the run uses them.
    """
    source = without_subsets(source)
    if not isinstance(source, EncodedSource) or source.exif == "apply":
        return None
    rows = np.linspace(0, len(source) - 1, min(len(source), _MAX_ORIENTATIONS)).astype(int)
    end = time.monotonic() + _ORIENTATIONS_SEC
    orientations = []
    for row in rows.tolist():
        if time.monotonic() > end:
            break
        with suppress(OSError, DataError):
            orientations.append(exif_orientation(source.read(row)))
    rotated = sum(orientation != 1 for orientation in orientations)
    if rotated == 0 or rotated < 0.05 * len(orientations):
        return None
    return (
        f"warning: {rotated} of {len(orientations)} training images that were examined have an "
        "EXIF orientation, which is ignored; set data.exif=apply to rotate them"
    )


@dataclass(eq=False)
class MapSource(ImageSource):
    """A map-style dataset of (image, target): torchvision's, or a user's own.

    Targets are integers, with `data.labels` multi tensors (classes,) of numbers from 0 to 1. Images
    are Pillow images of any mode, or uint8 tensors (3, H, W) or (1, H, W). Raises DataError for
    anything else.
    """

    dataset: Any
    dataset_name: str
    classes: tuple[str, ...]
    labels: str = "single"  # data.labels

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, i: int) -> tuple[torch.Tensor, Target]:
        item = self.dataset[i]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(
                f"{self.name(i)} is {_describe(item)}.", "Return (image, target) from the dataset."
            )
        image, target = item
        if isinstance(image, Image.Image):
            with named_errors(self.name(i)):
                image = rgb_tensor(image)
        is_image = (
            isinstance(image, torch.Tensor) and image.dtype == torch.uint8 and image.ndim == 3
        )
        if not is_image or image.shape[0] not in (1, 3):
            raise DataError(
                f"{self.name(i)}: its image is {_describe(image)}.",
                "Return a Pillow image or a uint8 tensor (3, H, W), without a transform to floats.",
            )
        return image.expand(3, -1, -1), self._check_target(i, target)

    def _check_target(self, i: int, target: Any) -> Target:
        count = len(self.classes)
        remedy = f"Return an integer from 0 to {count - 1}."
        if self.labels == "multi":
            remedy = f"Return a tensor of {count} numbers from 0 to 1, one for each class."
            with suppress(TypeError, ValueError, RuntimeError):
                row = torch.as_tensor(target).float()
                if row.shape == (count,) and ((row >= 0) & (row <= 1)).all():
                    return row
        else:
            with suppress(TypeError, ValueError, RuntimeError):
                if 0 <= (number := int(target)) < count and number == target:
                    return number
        raise DataError(
            f"{self.name(i)}: its target is {target!r}, and the dataset has {count} classes.",
            remedy,
        )

    def name(self, i: int) -> str:
        return f"{self.dataset_name}[{i}]"

    def digest(self) -> str:
        """Over name, length, classes, and the targets where the dataset lists them."""
        text = "\0".join([self.dataset_name, str(len(self)), *self.classes])
        digest = sha256(os.fsencode(text))
        targets = self.known_targets()
        if targets is not None:
            digest.update(target_bytes(targets))
        return digest.hexdigest()

    def known_targets(self) -> np.ndarray | None:
        targets = targets_of_dataset(self.dataset, self.labels)
        if targets is not None and targets.ndim == 2 and targets.shape[1] != len(self.classes):
            return None  # `load` raises an error that explains it
        return targets


@dataclass(eq=False)
class ArraySource(MapSource):
    """A dataset of torchvision that holds all images in one array, from which they are read without
    Pillow: the same pixels in less time.

    dataset.data: uint8 (N, H, W), gray, or (N, H, W, 3). Raises DataError for targets out of range.
    """

    def __post_init__(self) -> None:
        images = torch.as_tensor(self.dataset.data)
        is_gray = images.ndim == 3
        channels_last = images[..., None].expand(-1, -1, -1, 3) if is_gray else images
        self.images = channels_last.permute(0, 3, 1, 2)
        self.targets = required_targets(self, "data.name")

    def load(self, i: int) -> tuple[torch.Tensor, Target]:
        return self.images[i], int(self.targets[i])


class SubsetSource(ImageSource):
    """Some images of another source, in the order of `rows`, int64 (N,).

    classes: the names of the new targets; (): the classes of the source. target_map: the new target
    for each target of the source, int64 (classes of the source,); None: the same target.
    """

    def __init__(
        self,
        source: ImageSource,
        rows: np.ndarray,
        classes: tuple[str, ...] = (),
        target_map: np.ndarray | None = None,
    ):
        self.source = source
        self.rows = rows
        self.classes = classes or source.classes
        self.target_map = np.arange(len(source.classes)) if target_map is None else target_map

    def __len__(self) -> int:
        return len(self.rows)

    def load(self, i: int) -> tuple[torch.Tensor, Target]:
        image, target = self.source.load(int(self.rows[i]))
        return image, self._mapped(target)

    def load_region(self, i: int, choose: ChooseBox) -> tuple[torch.Tensor, Box, Target]:
        image, box, target = self.source.load_region(int(self.rows[i]), choose)
        return image, box, self._mapped(target)

    def _mapped(self, target: Target) -> Target:
        if isinstance(target, int):
            return int(self.target_map[target])
        return torch.from_numpy(
            map_targets(target.numpy()[None], self.target_map, len(self.classes))[0]
        )

    def name(self, i: int) -> str:
        return self.source.name(int(self.rows[i]))

    def digest(self) -> str:
        digest = sha256(self.source.digest().encode() + self.rows.astype("<i8").tobytes())
        if self.classes != self.source.classes:
            digest.update(
                os.fsencode("\0".join(self.classes)) + self.target_map.astype("<i8").tobytes()
            )
        return digest.hexdigest()

    def known_targets(self) -> np.ndarray | None:
        targets = self.source.known_targets()
        if targets is None:
            return None
        return map_targets(targets[self.rows], self.target_map, len(self.classes))

    def image_ids(self) -> Sequence[Hashable]:
        ids = self.source.image_ids()
        return [ids[row] for row in self.rows]


def without_subsets(source: ImageSource) -> ImageSource:
    """The source that a `SubsetSource` takes its images from; another source itself."""
    while isinstance(source, SubsetSource):
        source = source.source
    return source


def with_classes(
    source: ImageSource,
    classes: Sequence[str],
    path: Path | str,
    *,
    allow_missing: bool = False,
    allow_extra: bool = False,
) -> ImageSource:
    """The source with targets in the order of `classes`, matched by `match_classes`, without the
    images of extra classes; images with several labels stay.
    """
    if source.classes == tuple(classes):
        return source
    indices = match_classes(
        source.classes, classes, path, allow_missing=allow_missing, allow_extra=allow_extra
    )
    target_map = np.array(indices, np.int64)
    rows = np.arange(len(source))
    if (target_map < 0).any():
        targets = required_targets(source, "data.classes")
        if targets.ndim == 1:
            rows = rows[target_map[targets] >= 0]
    if not isinstance(source, FolderSource):
        return SubsetSource(source, rows, tuple(classes), target_map)
    index = source.index.select(rows)
    targets = map_targets(index.targets, target_map, len(classes))
    return replace(source, index=replace(index, targets=targets, classes=tuple(classes)))


def required_targets(source: ImageSource, key: str) -> np.ndarray:
    """The known targets of a source. Raises DataError without, for the key that needs them, and for
    targets that are out of range.
    """
    targets = source.known_targets()
    if targets is None:
        raise DataError(
            f"{key}: needs the class of each image, which is not known without reading the images "
            f"({source.name(0)}).",
            f"Give the dataset an attribute `targets` (a list of integers), or don't set {key}.",
        )
    if len(targets) == 0 or targets.ndim == 2:
        return targets
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= len(source.classes):
        raise DataError(
            f"{key}: the targets of {source.name(0)} and others are {low} to {high}, and there are "
            f"{len(source.classes)} classes.",
            f"Give integers from 0 to {len(source.classes) - 1}.",
        )
    return targets


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
