"""Images to evaluate apart from any training part, such as a separate test set."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archives import find_archives, is_archive
from imagenet_cls.data.classes import chosen_classes, join_names
from imagenet_cls.data.datasets import check_heif, index_part
from imagenet_cls.data.index import SPLIT_NAMES
from imagenet_cls.data.lists import exclude_images
from imagenet_cls.data.sources import FolderSource, ImageSource, targets_of, with_classes
from imagenet_cls.errors import DataError


def locate_test_set(path: Path, data: DataConfig, list_root: str | None = None) -> DataConfig:
    """The section `data` with all images at `path` as the validation part.

    path: a folder of classes, or with them in its folder `val`; an archive, a folder of archives, a
    pattern of their names, or a folder in an archive; or a list, whose paths are relative to
    `list_root` (None: to the folder of the list). Raises DataError.
    """
    path, name = path.expanduser(), "folder"
    archives = [p for p in path.parents if is_archive(p.name) and os.path.isfile(p)]  # noqa: PTH113
    if os.path.isdir(path):  # noqa: PTH112 (pathlib raises for names that no file can have)
        root, part = path, _validation_part(path)
    elif archives:
        root, part = archives[0], str(path.relative_to(archives[0]))
    elif os.path.isfile(path) and not is_archive(path.name):  # noqa: PTH113
        name, root, part = "list", path.parent, path.name
        if list_root is not None:
            root, part = Path(list_root), os.path.abspath(path)  # noqa: PTH100 (keeps links)
    elif find_archives(path.parent, path.name):
        root, part = path.parent, path.name
    else:
        raise DataError(f"{path}: neither a folder nor a file.\nCorrect the path after --data.")
    data = replace(data, name=name, root=str(root), val=part, kwargs={}, exclude=None)
    return replace(data, val_fraction=None, fold=None, group=None)


def _validation_part(folder: Path) -> str:
    """The part of a folder that holds the images to evaluate: its validation part, or all of it."""
    for part in ("val", "val.tar", "val.zip"):
        if (folder / part).is_dir() or find_archives(folder, part):
            return part
    found: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:  # `index_folder` raises an error for it
        found = sorted(entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")
    if found:
        check_no_parts(folder, found)
    return "."


def check_no_parts(place: Path, found: Sequence[str]) -> None:
    """Raise DataError if all folders in `place` are called as the parts of a dataset."""
    if SPLIT_NAMES.issuperset(map(str.lower, found)):
        what = f"holds the parts of a dataset ({join_names(found)}), not classes"
        part = next((name for name in found if not name.lower().startswith("train")), found[0])
        raise DataError(f"{place}: {what}.\nName the part to evaluate: --data {place / part}")


def open_test_set(
    data: DataConfig,
    classes: Sequence[str] | None,
    subset: bool = False,
) -> ImageSource:
    """The validation part of `folder` or `list`, whatever the training part is.

    classes: of the weights to evaluate, to which the images are matched. None: those of the images.
    subset: the images need not have all classes. Raises DataError.
    """
    assert data.val is not None
    place, chosen = Path(data.root).expanduser() / data.val, chosen_classes(data)
    index = index_part(data, data.val, None if chosen else classes, must_match=False)
    if index.spans is not None and (np.char.count(index.names, b"/") > 1).all():
        check_no_parts(place, index.classes)
    count = len(index)
    if data.exclude is not None:
        root, bad_images = Path(data.root).expanduser(), Path(data.exclude).expanduser()
        index, _ = exclude_images(index, root, bad_images, "validation")
    check_heif(index)
    source = FolderSource(index, None, data.decode, exif=data.exif, left_out=count - len(index))
    names = chosen or classes
    return source if names is None else with_classes(source, names, place, subset, bool(chosen))


def describe_images(data: DataConfig, source: ImageSource) -> str:
    """How many images of how many classes are evaluated, and where they are from."""
    targets = targets_of(source)
    classes = len(source.classes) if targets is None else len(np.unique(targets))
    part = data.train if data.val is None else data.val
    has_files = data.name != "synthetic" and ":" not in data.name
    place = str(Path(data.root) / part) if has_files else f"{data.name}, part {part!r}"
    where = f"in {place}"
    if data.val is None:
        fold = "" if data.fold is None else f"data.fold={data.fold}"
        where = f"held out of {place} by {fold or f'data.val_fraction={data.val_fraction}'}"
    return f"{len(source)} images of {classes} classes, {where}"
