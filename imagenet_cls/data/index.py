"""Class folders: which files are images, their index in memory that workers share, and the usual mistakes in a layout.

Paths are one block of bytes plus offsets: a list of 1.28 million strings would be copied into every worker, page by
page, since reference counts are written to.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np

from imagenet_cls.errors import DataError, shorten

# torchvision's ImageFolder takes these, except .gif. Compared in lower case.
IMAGE_SUFFIXES = frozenset(
    {b".jpg", b".jpeg", b".png", b".bmp", b".gif", b".webp", b".ppm", b".pgm", b".tif", b".tiff"}
)
PART_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})
PREPARE = "python tools/prepare_imagenet.py"


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """Images on disk and their classes.

    root: the folder that paths are relative to. blob: all paths, concatenated, in the file system's bytes. offsets:
    int64 (N + 1,), where each path starts. targets: int64 (N,). classes: name of each target.
    """

    root: Path
    blob: bytes
    offsets: np.ndarray
    targets: np.ndarray
    classes: tuple[str, ...]

    @classmethod
    def pack(
        cls, root: Path, names: Sequence[bytes], targets: Sequence[int] | np.ndarray, classes: Sequence[str]
    ) -> "ImageIndex":
        """The index of the paths `names`, in the file system's bytes, one for each target."""
        assert len(names) == len(targets), (len(names), len(targets))
        return cls(root, b"".join(names), _offsets(_lengths(names)), np.asarray(targets, np.int64), tuple(classes))

    def __len__(self) -> int:
        return len(self.targets)

    def raw_name(self, i: int) -> bytes:
        """Path of image `i` relative to `root`, as bytes."""
        return self.blob[self.offsets[i] : self.offsets[i + 1]]

    def name(self, i: int) -> str:
        """Path of image `i` relative to `root`, with `/` between folders."""
        return os.fsdecode(self.raw_name(i))

    def path(self, i: int) -> Path:
        """Path of image `i`. A list may name absolute paths, which stay absolute."""
        return self.root / self.name(i)

    def select(self, rows: np.ndarray) -> "ImageIndex":
        """The same index with these rows only, in this order."""
        return ImageIndex.pack(self.root, [self.raw_name(i) for i in rows.tolist()], self.targets[rows], self.classes)

    def digest(self) -> str:
        """SHA-256 over names, targets and classes, in hex. Not over `root`, so that a data set can be moved."""
        digest = sha256(self.blob)
        digest.update(self.offsets.astype("<i8").tobytes())
        digest.update(self.targets.astype("<i8").tobytes())
        digest.update("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def index_folder(folder: Path | str, classes: Sequence[str] | None = None) -> ImageIndex:
    """Index class folders: every image at any depth below `folder/CLASS/` is of that class.

    Classes and images are in the order of torchvision's ImageFolder. Unlike there, hidden files and folders are
    skipped, and .gif is an image. classes: the training classes, which a validation folder's classes are matched to by
    name. Raises DataError.
    """
    root = Path(folder)
    found = class_folders(root)
    if not found:
        raise no_classes_error(root)
    blobs: list[bytes] = []  # joined class by class: all names as objects at once would take 240 MB for ImageNet
    lengths: list[np.ndarray] = []
    base = os.fsencode(root)
    for class_name in found:
        names = scan_images(base, os.fsencode(class_name))
        blobs.append(b"".join(names))
        lengths.append(_lengths(names))
    counts = [len(of_class) for of_class in lengths]
    check_classes(root, found, counts)
    if classes is None:
        classes, labels = found, np.arange(len(found))
    else:
        labels = np.array(match_classes(found, classes, root), np.int64)
    offsets = _offsets(np.concatenate(lengths))
    return ImageIndex(root, b"".join(blobs), offsets, np.repeat(labels, counts), tuple(classes))


def _lengths(names: Sequence[bytes]) -> np.ndarray:
    return np.fromiter(map(len, names), np.int64, len(names))


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def match_classes(found: Sequence[str], classes: Sequence[str], root: Path) -> list[int]:
    """Position of each class folder in the training `classes`, by name. DataError unless both are the same set."""
    position = {name: i for i, name in enumerate(classes)}
    unknown = [name for name in found if name not in position]
    if unknown:
        raise DataError(
            f"{root}: {len(unknown)} of {len(found)} class folders are not among the {len(classes)} training classes: "
            f"{listed(unknown)}\nuse the same folder names in both parts, or correct data.val"
        )
    missing = sorted(set(classes).difference(found))
    if missing:
        raise DataError(
            f"{root}: {len(missing)} of {len(classes)} training classes have no folder here: {listed(missing)}\n"
            "add them, or take the validation images from the training part: data.val=null data.val_fraction=0.1"
        )
    return [position[name] for name in found]


def held_out(names: Iterable[bytes], targets: np.ndarray, fraction: float) -> np.ndarray:
    """Which images are held out for validation: bool (N,). A pure function of names, targets and `fraction`.

    Of each class with n images, those round(n * fraction) (half to even) with the smallest BLAKE2b hash of their name;
    at least one, and not all, where the class has two or more images. A single image stays in training.
    """
    hashes = np.fromiter(
        (int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names), np.uint64, len(targets)
    )
    mask = np.zeros(len(targets), bool)
    by_class_then_hash = np.lexsort((hashes, targets))
    bounds = np.flatnonzero(np.diff(targets[by_class_then_hash])) + 1
    for rows in np.split(by_class_then_hash, bounds):
        if len(rows) >= 2:
            count = min(max(round(len(rows) * fraction), 1), len(rows) - 1)
            mask[rows[:count]] = True
    return mask


def split(index: ImageIndex, fraction: float) -> tuple[ImageIndex, ImageIndex]:
    """Hold out a share of each class for validation: (train, val). See `held_out`."""
    mask = held_out((index.raw_name(i) for i in range(len(index))), index.targets, fraction)
    return index.select(np.flatnonzero(~mask)), index.select(np.flatnonzero(mask))


def is_image(name: bytes) -> bool:
    """Whether a file of this name counts as an image."""
    return name[name.rfind(b".") :].lower() in IMAGE_SUFFIXES and not name.startswith(b".")


def listed(names: Sequence[str], count: int = 3) -> str:
    """The first `count` names, each cut to 100 characters, and an ellipsis if there are more."""
    return ", ".join(shorten(name, 100) for name in names[:count]) + (", ..." if len(names) > count else "")


def scan_images(base: bytes, folder: bytes) -> list[bytes]:
    """The images at any depth below `base/folder`, as paths relative to `base` with `/` between folders.

    Order: folders by their whole path, files by name within each, as torchvision's ImageFolder. Links are followed;
    hidden files and folders are skipped. Raises DataError.
    """
    folders, pending = [], [folder]
    while pending:
        current = pending.pop()
        files = []
        path = os.path.join(base, current)  # noqa: PTH118 (pathlib would cost a second)
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    name = entry.name
                    if name[:1] == b".":
                        continue
                    if entry.is_dir():
                        pending.append(current + b"/" + name)
                    elif name[name.rfind(b".") :].lower() in IMAGE_SUFFIXES:
                        files.append(name)
        except OSError as error:
            raise DataError(
                f"{os.path.normpath(os.fsdecode(path))}: {error.strerror}\nname a folder of images that is readable"
            ) from None
        files.sort()
        folders.append((current, files))
    return [current + b"/" + name for current, files in sorted(folders) for name in files]


def class_folders(root: Path) -> list[str]:
    """Names of the folders directly in `root`, sorted, without hidden ones. Raises DataError."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError as error:
        raise DataError(
            f"{root}: {error.strerror}\nset data.root, data.train and data.val to folders of images"
        ) from None


def images_in(folder: Path) -> int:
    """How many images lie directly in `folder`."""
    with os.scandir(os.fsencode(folder)) as entries:
        return sum(is_image(entry.name) for entry in entries)


def no_classes_error(root: Path) -> DataError:
    """The error for a folder without class folders: ImageNet's validation images come like this."""
    return DataError(
        f"{root}: holds {images_in(root)} images and no class folders; each class needs a folder, "
        f"{root}/CLASS/*.JPEG\nsort the images into classes, or set data.root; ImageNet: {PREPARE} SOURCE {root.parent}"
    )


def check_classes(root: Path, found: Sequence[str], counts: Sequence[int]) -> None:
    """Raise DataError for class folders without images, and for folders that are not classes but hold classes.

    found: the folders in `root`; counts: the images in each, at any depth.
    """
    empty = [name for name, count in zip(found, counts, strict=True) if count == 0]
    if empty:
        raise DataError(
            f"{root}: {len(empty)} of {len(found)} class folders hold no image: {listed(empty)}\n"
            "remove these folders, or restore their images (an interrupted extraction leaves such folders)"
        )
    if len(found) == 1 or PART_NAMES.issuperset(name.lower() for name in found):
        inside = [root / name for name in found]
        if all(class_folders(folder) and not images_in(folder) for folder in inside):
            raise DataError(
                f"{root}: its folders ({listed(found)}) hold folders and no images: the classes are a level deeper\n"
                f"set data.root={root} data.train={found[0]} (and data.val likewise)"
            )


def check_part_exists(root: Path, part: str, key: str) -> None:
    """Raise DataError for a missing `root/part`, with the likely reason. key: data.train or data.val."""
    if (root / part).exists():
        return
    if not root.is_dir():
        raise DataError(
            f"{root}: no such folder (data.root, relative to {Path.cwd()})\nset data.root to the folder that holds "
            f"{part}/CLASS/*.JPEG; from ImageNet's archives: {PREPARE} SOURCE {root}"
        )
    found = class_folders(root)
    if not found:
        raise no_classes_error(root)
    candidates = [root] if root.name == part else []
    candidates += sorted(path for depth in ("*", "*/*", "*/*/*") for path in root.glob(f"{depth}/{part}"))
    if candidates:
        raise DataError(
            f"{root / part}: no such folder, but {candidates[0]} is there\nset data.root={candidates[0].parent}"
        )
    remedy = "without validation images: data.val=null data.val_fraction=0.1"
    if key == "data.train":
        remedy = "if these are the classes: data.train=. data.val=null data.val_fraction=0.1"
    raise DataError(f"{root / part}: no such folder; {root} holds {listed(found)}\nset data.root or {key}; {remedy}")
