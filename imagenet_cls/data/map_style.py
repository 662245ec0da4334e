"""Map-style datasets of (image, target): a user's own, and those of libraries."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.decode import rgb_tensor
from imagenet_cls.data.image_set import Images, ImageSet, Target, all_images, named_errors
from imagenet_cls.data.targets import target_bytes
from imagenet_cls.errors import DataError, Problem, UserError
from imagenet_cls.lookup import (
    NameNotFoundError,
    import_factory,
    kwargs_problems,
)
from imagenet_cls.private_names import TARGETS
from imagenet_cls.text import describe_type

# Classes whose objects must not be used after a fork: of Python, h5py, PyTables and lmdb.
_OPEN_FILES = ("BufferedReader", "TextIOWrapper", "ZipFile", "Connection", "File", "Environment")


@dataclass(eq=False)
class MapImages(Images):
    """The images of a map-style dataset, read with their targets.

    Targets are integers, with `data.labels` multi tensors (classes,) of numbers from 0 to 1. Images
    are Pillow images of any mode, or uint8 tensors (3, H, W) or (1, H, W). Raises DataError for
    anything else. targets: all, if the dataset lists them.
    """

    dataset: Any
    dataset_name: str
    classes: tuple[str, ...]
    targets: np.ndarray | None
    labels: str  # data.labels

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, number: int) -> tuple[torch.Tensor, Target | None]:
        item = self.dataset[number]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(
                f"{self.name(number)} is {describe_type(item)}.",
                "Return (image, target) from the dataset.",
            )
        image, target = item
        if isinstance(image, Image.Image):
            with named_errors(self.name(number)):
                image = rgb_tensor(image)
        is_image = (
            isinstance(image, torch.Tensor) and image.dtype == torch.uint8 and image.ndim == 3
        )
        if not is_image or image.shape[0] not in (1, 3):
            raise DataError(
                f"{self.name(number)}: its image is {describe_type(image)}.",
                "Return a Pillow image or a uint8 tensor (3, H, W), without a transform to floats.",
            )
        target = self._check_target(number, target)
        if self.targets is not None and not np.array_equal(target, self.targets[number]):
            raise DataError(
                f"{self.name(number)}: its target is {target}, and the dataset's list of targets "
                f"has {self.targets[number]}.",
                "Give the dataset an attribute `targets` with the targets of its items.",
            )
        return image.expand(3, -1, -1), target

    def _check_target(self, number: int, target: Any) -> Target:
        count = len(self.classes)
        remedy = f"Return an integer from 0 to {count - 1}."
        if self.labels == "multi":
            remedy = f"Return a tensor of {count} numbers from 0 to 1, one for each class."
            with suppress(TypeError, ValueError, RuntimeError, OverflowError):
                row = torch.as_tensor(target).float()
                if row.shape == (count,) and ((row >= 0) & (row <= 1)).all():
                    return row
        else:
            with suppress(TypeError, ValueError, RuntimeError, OverflowError):
                if 0 <= (index := int(target)) < count and index == target:
                    return index
        raise DataError(
            f"{self.name(number)}: its target is {target!r}, and the dataset has {count} classes.",
            remedy,
        )

    def name(self, number: int) -> str:
        return f"{self.dataset_name}[{number}]"

    def digest(self) -> str:
        """Over name, length, classes, and the targets where the dataset lists them."""
        text = "\0".join([self.dataset_name, str(len(self)), *self.classes])
        digest = sha256(os.fsencode(text))
        if self.targets is not None:
            digest.update(target_bytes(self.targets))
        return digest.hexdigest()


@dataclass(eq=False)
class ArrayImages(MapImages):
    """A dataset of torchvision that holds all images in one array, from which they are read without
    Pillow: the same pixels in less time.

    dataset.data: uint8 (N, H, W), gray, or (N, H, W, 3).
    """

    def __post_init__(self) -> None:
        images = torch.as_tensor(self.dataset.data)
        is_gray = images.ndim == 3
        channels_last = images[..., None].expand(-1, -1, -1, 3) if is_gray else images
        self.pixels = channels_last.permute(0, 3, 1, 2)

    def load(self, number: int) -> tuple[torch.Tensor, None]:
        return self.pixels[number], None


def open_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageSet:
    """A part of `my_module:my_factory`. classes: not used. Raises UserError."""
    root = Path(config.root).expanduser()
    dataset = import_factory(config.name)(root=str(root), part=part, **config.kwargs)
    return image_set_of(dataset, config, part)


def image_set_of(
    dataset: Any, config: DataConfig, part: str, kind: type[MapImages] = MapImages
) -> ImageSet:
    """The images of a map-style dataset. Raises UserError if it is none."""
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has_items or isinstance(dataset, str | Mapping):
        raise UserError(
            f"data.name: {config.name!r} returned {type(dataset).__name__}, which is no dataset.",
            "Return a map-style dataset: len(dataset), and dataset[i] -> (image, target).",
        )
    name = f"{config.name}/{part}"
    targets = targets_of_dataset(dataset, config.labels)
    classes = classes_of_dataset(dataset, name, targets)
    if targets is not None and targets.ndim == 2 and targets.shape[1] != len(classes):
        targets = None  # `MapImages.load` raises an error that explains it
    images = kind(dataset, name, classes, targets, config.labels)
    note = open_file_warning(dataset) if config.num_workers else None
    return replace(all_images(images, targets), note=note)


def open_file_warning(dataset: Any) -> str | None:
    """A warning if an attribute of a map-style dataset, or of the dataset that it wraps, is an open
    file.
    """
    for holder in (dataset, getattr(dataset, "dataset", None)):
        for name, value in getattr(holder, "__dict__", {}).items():
            if type(value).__name__ in _OPEN_FILES:
                return (
                    f"warning: attribute {name!r} of the dataset is an open file, which data "
                    "workers share, so they may read wrong images: open it in __getitem__, or set "
                    "data.num_workers=0"
                )
    return None


def problems(config: DataConfig) -> list[Problem]:
    """All problems of the name and the arguments. Imports the factory, and reads no data."""
    try:
        factory = import_factory(config.name)
    except NameNotFoundError as error:
        return [Problem("data.name", str(error))]
    return kwargs_problems("data.kwargs", factory, config.kwargs, passed=("root", "part"))


def classes_of_dataset(dataset: Any, name: str, targets: np.ndarray | None) -> tuple[str, ...]:
    """Class names of a map-style dataset, from `classes`, `num_classes` or its targets, else
    DataError.
    """
    classes = getattr(dataset, "classes", None)
    if classes is not None and len(classes):
        # torchvision's ImageNet and Imagenette give a tuple of synonyms for each class
        names = [
            ", ".join(entry) if isinstance(entry, (tuple, list)) else str(entry)
            for entry in classes
        ]
        # ImageNet has two cranes. `imagenet_order` ignores what follows a comma.
        counts = Counter(names)
        return tuple(f"{name}, {i}" if counts[name] > 1 else name for i, name in enumerate(names))
    count = getattr(dataset, "num_classes", None)
    if count is None:
        if targets is None or not len(targets):
            raise DataError(
                f"{name}: the number of classes is unknown.",
                "Give the dataset an attribute `classes` (a list of names), `num_classes` or "
                "`targets`.",
            )
        count = targets.shape[1] if targets.ndim == 2 else targets.max() + 1
    return tuple(map(str, range(int(count))))


def targets_of_dataset(dataset: Any, labels: str) -> np.ndarray | None:
    """All targets of a map-style dataset (`data.targets`) without reading images; None where it
    doesn't list them, and with several labels where they are other than 0 and 1. labels:
    `data.labels`.
    """
    for attribute in ("targets", "labels", TARGETS):
        with suppress(TypeError, ValueError, OverflowError):
            targets = np.asarray(getattr(dataset, attribute, None))
            if targets.shape[:1] != (len(dataset),):
                continue
            if labels == "multi":
                if targets.ndim == 2 and ((targets == 0) | (targets == 1)).all():
                    return targets.astype(np.uint8)
            elif targets.ndim == 1:
                with np.errstate(invalid="ignore"):  # NaN
                    integers = targets.astype(np.int64)
                if (integers == targets).all():
                    return integers
    return None
