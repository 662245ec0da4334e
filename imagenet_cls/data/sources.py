"""One image and its target: decoding, image files, map-style datasets, and subsets of another source."""

import io
import os
import struct
import warnings
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode

from imagenet_cls.data.index import ImageIndex
from imagenet_cls.errors import DataError, first_line
from imagenet_cls.files import check_regular

# Pillow's own limit (2 * Image.MAX_IMAGE_PIXELS as it is installed). ImageNet's largest image has about a tenth of it.
MAX_PIXELS = 178_956_970

# The operator that torchvision.io.decode_jpeg calls; from 0.29 on, that function warns of its move to torchcodec.
_DECODE_JPEG = torch.ops.image.decode_jpeg

_MOST_SIZES = 1000
_START_OF_FRAME = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive Huffman: what torchvision decodes


def decode_rgb(data: bytes) -> torch.Tensor:
    """Decode an image file into uint8 (3, H, W) on the CPU, the pixels of Pillow's `Image.open(...).convert("RGB")`.

    Gray images get three equal channels; transparency is dropped; an animation gives its first frame. An EXIF
    orientation is not applied, as in torchvision's ImageFolder and timm. The memory may be channels-last. Raises
    DataError with the reason, without the file's name, for broken, truncated and absurdly large images.
    """
    height, width, channels = _jpeg_header(data) or (0, 0, 0)
    if channels in (1, 3) and height * width <= MAX_PIXELS:
        try:
            return _DECODE_JPEG(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB.value)
        except RuntimeError:
            pass  # Pillow decides; it raises for truncated files too
    return _decode_with_pillow(data)


def rgb_tensor(image: Image.Image) -> torch.Tensor:
    """A Pillow image as uint8 (3, H, W), converted to RGB as in torchvision's loader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # palettes with transparency
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _decode_with_pillow(data: bytes) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # EXIF blocks that cannot be parsed, sizes between Pillow's two limits
        try:
            with Image.open(io.BytesIO(data)) as image:
                return rgb_tensor(image)
        except Image.UnidentifiedImageError:
            reason = "not an image of a known format" if data else "an empty file"
        except Image.DecompressionBombError:
            reason = f"more than the {MAX_PIXELS} pixels allowed"
        except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
            # Pillow's decoders and format plug-ins raise all of these for damaged files.
            reason = f"damaged or truncated ({first_line(error)})"
    raise DataError(reason)


def _jpeg_header(data: bytes) -> tuple[int, int, int] | None:
    """Height, width and channels of a JPEG that torchvision can decode; None for other files. About 2 us.

    ITU T.81, annex B: segments are 0xFF, marker, length (2 bytes, included), payload. A thumbnail is within an APP
    segment, which is skipped. Fill bytes, which are rare, are left to Pillow.
    """
    if data[:2] != b"\xff\xd8":
        return None
    position, end = 2, len(data) - 9
    while position < end:
        start, marker, length = struct.unpack_from(">BBH", data, position)
        if start != 0xFF or marker == 0xFF:
            return None
        if marker in _START_OF_FRAME:
            height, width, channels = struct.unpack_from(">HHB", data, position + 5)
            return height, width, channels
        position += 2 + length
    return None


class ImageSource(Protocol):
    """A part of a dataset."""

    classes: tuple[str, ...]

    def __len__(self) -> int: ...

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        """Image `i` as uint8 (3, H, W) on the CPU, and its target. Raises DataError if it cannot be read."""

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
        self._root = os.fsencode(index.root)

    def __len__(self) -> int:
        return len(self.index)

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        path = os.path.join(self._root, self.index.names[i])  # noqa: PTH118 (pathlib is slower)
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                check_regular(file.fileno())
                return decode_rgb(file.read()), int(self.index.targets[i])
        except (OSError, DataError) as error:
            reason = getattr(error, "strerror", None) or error
        raise DataError(f"{self.index.path(i)} (image {i}): {reason}; {self.remedy}")

    def name(self, i: int) -> str:
        return self.index.name(i)

    def digest(self) -> str:
        return self.index.digest()


def describe_sizes(source: ImageSource) -> str | None:
    """The sizes of at most 1,000 evenly spaced files, as number, sum and digest; None if the images are not files.

    Tells other images under the same names. Not of all files, since that takes minutes on a network disk.
    """
    if not isinstance(source, FolderSource):
        return None
    rows = np.linspace(0, len(source) - 1, min(len(source), _MOST_SIZES)).astype(int)
    sizes = [path.stat().st_size if path.is_file() else -1 for path in map(source.index.path, rows)]
    return f"{len(sizes)} files of {sum(sizes)} bytes ({sha256(str(sizes).encode()).hexdigest()[:16]})"


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
            raise DataError(f"{self.name(i)}: {_describe(item)}; a dataset must return (image, target) pairs")
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
                f"the dataset has {len(self.classes)} classes"
            )
        return image.expand(3, -1, -1), number

    def name(self, i: int) -> str:
        return f"{self.dataset_name}[{i}]"

    def digest(self) -> str:
        """Over name, length, classes, and the targets where the dataset lists them."""
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


def targets_of(source: ImageSource) -> np.ndarray | None:
    """All targets of a source, int64 (N,), without reading images; None where they are not known."""
    if isinstance(source, SubsetSource):
        whole = targets_of(source.source)
        return None if whole is None else whole[source.rows]
    if isinstance(source, FolderSource):
        return source.index.targets
    return known_targets(source.dataset) if isinstance(source, MapSource) else None


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
                "give the dataset an attribute `classes` (a list of names), `num_classes` or `targets`"
            )
        count = int(targets.max()) + 1
    return [str(number) for number in range(int(count))]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"
