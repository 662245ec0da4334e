"""Folders of images: which files are images, in which order, and the usual mistakes in a folder's layout."""

import os
from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.errors import DataError

# torchvision's ImageFolder takes these, except .gif. Compared in lower case.
IMAGE_SUFFIXES = frozenset(
    {b".jpg", b".jpeg", b".png", b".bmp", b".gif", b".webp", b".ppm", b".pgm", b".tif", b".tiff"}
)
PART_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})
PREPARE = "python tools/prepare_imagenet.py"


def is_image(name: bytes) -> bool:
    """Whether a file of this name counts as an image."""
    return name[name.rfind(b".") :].lower() in IMAGE_SUFFIXES and not name.startswith(b".")


def listed(names: Sequence[str], count: int = 3) -> str:
    """The first `count` names, each cut to 100 characters, and an ellipsis if there are more."""
    shown = [name if len(name) <= 100 else f"{name[:97]}..." for name in names[:count]]
    return ", ".join(shown) + (", ..." if len(names) > count else "")


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
