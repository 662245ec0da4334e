"""Images with their targets, one at a time: files, map-style datasets, and subsets of another source."""

import os
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from imagenet_cls.data.decode import decode_rgb, rgb_tensor
from imagenet_cls.data.index import ImageIndex
from imagenet_cls.errors import DataError


class ImageSource(Protocol):
    """A part of a data set."""

    classes: tuple[str, ...]

    def __len__(self) -> int: ...

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        """Image `i` as uint8 (3, H, W) on the CPU, and its target. Raises DataError where it cannot be read."""

    def name(self, i: int) -> str:
        """The name of image `i` in messages and predictions: of a file, its path below the root."""

    def digest(self) -> str:
        """A hex digest of names and targets; not of pixels."""


class FolderSource:
    """Image files of an `ImageIndex`. remedy: what to do about one that can't be read, for the error."""

    def __init__(self, index: ImageIndex, remedy: str = "replace the file"):
        self.index = index
        self.remedy = remedy
        self.classes = index.classes
        self._prefix = os.path.join(os.fsencode(index.root), b"")  # noqa: PTH118 (bytes: joined once, not per image)

    def __len__(self) -> int:
        return len(self.index)

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        name = self.index.raw_name(i)
        try:
            with open(name if name[:1] == b"/" else self._prefix + name, "rb", buffering=0) as file:  # noqa: PTH123
                data = file.read()
            return decode_rgb(data), int(self.index.targets[i])
        except OSError as error:
            reason = error.strerror or str(error)
        except DataError as error:
            reason = str(error)
        raise DataError(f"{self.index.path(i)} (image {i}): {reason}; {self.remedy}")

    def name(self, i: int) -> str:
        return self.index.name(i)

    def digest(self) -> str:
        return self.index.digest()


class MapSource:
    """A map-style dataset of (image, target): torchvision's, or a user's own.

    Images are Pillow images of any mode, or uint8 tensors (3, H, W) or (1, H, W). Raises DataError for anything else.
    """

    def __init__(self, dataset: Any, name: str, classes: Sequence[str]):
        self.dataset = dataset
        self.dataset_name = name
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        item = self.dataset[i]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"{self.name(i)}: {_describe(item)}; a data set must return (image, target) pairs")
        image, target = item
        if isinstance(image, Image.Image):
            image = rgb_tensor(image)
        is_image = isinstance(image, torch.Tensor) and image.dtype == torch.uint8 and image.ndim == 3
        if not is_image or image.shape[0] not in (1, 3):
            raise DataError(
                f"{self.name(i)}: its image is {_describe(image)}; return a Pillow image or a uint8 tensor (3, H, W), "
                "without a transform to floats"
            )
        try:
            number = int(target)
        except (TypeError, ValueError):
            number = -1
        if not 0 <= number < len(self.classes):
            raise DataError(
                f"{self.name(i)}: its target is {target!r}; return an integer from 0 to {len(self.classes) - 1}, "
                f"the data set has {len(self.classes)} classes"
            )
        return image.expand(3, -1, -1), number

    def name(self, i: int) -> str:
        return f"{self.dataset_name}[{i}]"

    def digest(self) -> str:
        """Over name, length, classes, and the targets where the data set lists them."""
        digest = sha256("\0".join([self.dataset_name, str(len(self)), *self.classes]).encode())
        targets = known_targets(self.dataset)
        if targets is not None:
            digest.update(targets.astype("<i8").tobytes())
        return digest.hexdigest()


class SubsetSource:
    """Some images of another source, in the order of `rows`, int64 (N,)."""

    def __init__(self, source: ImageSource, rows: np.ndarray):
        self.source = source
        self.rows = rows
        self.classes = source.classes

    def __len__(self) -> int:
        return len(self.rows)

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        return self.source.load(int(self.rows[i]))

    def name(self, i: int) -> str:
        return self.source.name(int(self.rows[i]))

    def digest(self) -> str:
        return sha256(self.source.digest().encode() + self.rows.astype("<i8").tobytes()).hexdigest()


def known_targets(dataset: Any) -> np.ndarray | None:
    """All targets of a map-style dataset, int64 (N,), without reading images; None where it doesn't list them."""
    for attribute in ("targets", "labels", "_labels", "_targets"):
        try:
            targets = np.asarray(getattr(dataset, attribute, None), np.int64)
        except (TypeError, ValueError):
            continue
        if targets.shape == (len(dataset),):
            return targets
    return None


def known_classes(dataset: Any, name: str) -> list[str]:
    """Class names of a map-style dataset, from `classes`, `class_to_idx`, `num_classes` or targets, else DataError."""
    classes = getattr(dataset, "classes", None)
    if classes is not None and len(classes):
        # torchvision's ImageNet and Imagenette give a tuple of synonyms for each class
        return [", ".join(entry) if isinstance(entry, (tuple, list)) else str(entry) for entry in classes]
    by_name = getattr(dataset, "class_to_idx", None)
    if by_name:
        return sorted(by_name, key=by_name.__getitem__)
    count = getattr(dataset, "num_classes", None)
    if count is None:
        targets = known_targets(dataset)
        if targets is None or not len(targets):
            raise DataError(
                f"{name}: the number of classes is unknown\n"
                "give the data set an attribute `classes` (a list of names), `num_classes` or `targets`"
            )
        count = int(targets.max()) + 1
    return [str(number) for number in range(int(count))]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"
