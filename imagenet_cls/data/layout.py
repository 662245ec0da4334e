"""What lies in a data folder, and which of the usual mistakes it is when it is not what it should be.

Owns the walk over directories (what is an image, what is hidden, in which order) and the messages for wrong layouts.
Refuses to assign classes: `index` does. Called by `index`, `datasets` and `prepare`.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.errors import DataError

# torchvision's ImageFolder takes these, without .gif. Compared in lower case.
IMAGE_SUFFIXES = frozenset(
    {b".jpg", b".jpeg", b".png", b".bmp", b".gif", b".webp", b".ppm", b".pgm", b".tif", b".tiff"}
)
PART_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})
PREPARE = "python tools/prepare_imagenet.py"


def is_image(name: bytes) -> bool:
    """Whether a file of this name is taken for an image."""
    return name[name.rfind(b".") :].lower() in IMAGE_SUFFIXES and not name.startswith(b".")


def listed(names: Sequence[str], count: int = 3) -> str:
    """The first `count` names, and an ellipsis where there are more; of a name of any length 100 characters at most."""
    shown = [name if len(name) <= 100 else f"{name[:97]}..." for name in names[:count]]
    return ", ".join(shown) + (", ..." if len(names) > count else "")


def scan_images(base: bytes, folder: bytes) -> list[bytes]:
    """The images at any depth below `base/folder`, as paths relative to `base` with `/` between folders.

    Order: folders by their whole path, files by name within each, as torchvision's ImageFolder. Links are followed.
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
            shown = os.path.normpath(os.fsdecode(path))
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                raise DataError(f"{shown}: no such folder\nname the folder that holds the images") from None
            raise DataError(f"{shown}: {error.strerror}\nmake it readable for this user") from None
        files.sort()
        folders.append((current, files))
    return [current + b"/" + name for current, files in sorted(folders) for name in files]


def class_folders(root: Path) -> list[str]:
    """Names of the folders directly in `root`, sorted, without hidden ones. DataError where `root` cannot be listed."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except FileNotFoundError:
        raise DataError(
            f"{root}: no such folder\nset data.root, data.train and data.val to where the images are"
        ) from None
    except OSError as error:
        raise DataError(f"{root}: {error.strerror}\nset data.root to a folder that this user can read") from None


def images_in(folder: Path) -> int:
    """How many images lie directly in `folder`."""
    with os.scandir(os.fsencode(folder)) as entries:
        return sum(is_image(entry.name) for entry in entries)


def refuse_flat_folder(root: Path) -> None:
    """Raise the DataError for a folder without class folders: images directly in it, or nothing at all."""
    count = images_in(root)
    if count:
        raise DataError(
            f"{root}: {count} images lie directly in it, but each class needs a folder of its own "
            f"(ImageNet's validation images come like this)\nsort them into classes: {PREPARE} SOURCE {root.parent}"
        )
    raise DataError(
        f"{root}: holds neither class folders nor images\n"
        f"put images there as {root}/CLASS/*.JPEG, or set data.root; from archives: {PREPARE} SOURCE {root.parent}"
    )


def refuse_one_level_too_deep(root: Path, found: Sequence[str]) -> None:
    """Raise DataError where the class folders are in truth the parts of a data set, or one folder around them."""
    if not (len(found) == 1 or PART_NAMES.issuperset(name.lower() for name in found)):
        return
    inside = [root / name for name in found]
    if any(images_in(folder) or not class_folders(folder) for folder in inside):
        return
    if len(found) == 1:
        raise DataError(
            f"{root}: holds one folder only, {found[0]!r}, which holds only folders: the classes are a level deeper\n"
            f"set data.train (or data.val) one level deeper, to where the class folders are: .../{root.name}/{found[0]}"
        )
    raise DataError(
        f"{root}: its folders {', '.join(found)} are the parts of a data set, not classes\n"
        f"set data.root={root} and data.train={found[0]} (and data.val likewise)"
    )


def refuse_empty_classes(root: Path, empty: Sequence[str], total: int) -> None:
    """Raise DataError where class folders hold no image, as torchvision's ImageFolder does."""
    if empty:
        raise DataError(
            f"{root}: {len(empty)} of {total} class folders hold no image: {listed(empty)}\n"
            "remove these folders, or put their images back (an unpacking that broke off leaves such folders)"
        )


def refuse_missing_part(root: Path, part: str, key: str) -> None:
    """Raise DataError for a `root/part` that is not there, with the likeliest reason. key: data.train or data.val."""
    if (root / part).exists():
        return
    if not root.is_dir():
        raise DataError(
            f"{root}: no such folder (data.root, seen from {Path.cwd()})\nset data.root to the folder that holds "
            f"{part}/CLASS/*.JPEG; ImageNet's archives become one with: {PREPARE} SOURCE {root}"
        )
    if root.name == part and class_folders(root):
        raise DataError(
            f"{root / part}: no such folder, but data.root itself ends in {part!r}\nset data.root={root.parent}"
        )
    deeper = sorted([*root.glob(f"*/{part}"), *root.glob(f"*/*/{part}"), *root.glob(f"*/*/*/{part}")])
    if deeper:
        raise DataError(f"{root / part}: no such folder, but {deeper[0]} is there\nset data.root={deeper[0].parent}")
    if key == "data.val":
        raise DataError(
            f"{root / part}: no such folder, so there is nothing to validate on\n"
            f"hold out training images: data.val=null data.val_fraction=0.1; or make it: {PREPARE} SOURCE {root}"
        )
    found = class_folders(root)
    if not found:
        refuse_flat_folder(root)
    remedy = (
        "data.train=. data.val=null data.val_fraction=0.1"
        if part == "train" and "val" not in found
        else f"{key}=FOLDER"
    )
    raise DataError(
        f"{root / part}: no such folder; there are: {listed(found)}\nset {remedy} to use what is there, or data.root"
    )
