"""Images to evaluate apart from any training part, such as a separate test set."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archives import find_archives, is_archive
from imagenet_cls.data.classes import chosen_classes
from imagenet_cls.data.datasets import describe_part, select_images
from imagenet_cls.data.files import open_part
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.targets import class_sizes
from imagenet_cls.errors import DataError


def locate_test_set(path: Path, config: DataConfig, list_root: str | None = None) -> DataConfig:
    """The section with all images at `path` as the validation part.

    path: a folder of classes, or with them in its folder `val`; an archive, a folder of archives, a
    pattern of their names, or a folder in an archive; or a list, whose paths are relative to
    `list_root` (None: to the folder of the list). Raises DataError.
    """
    path = path.expanduser()
    name = "folder"
    archives = [p for p in path.parents if is_archive(p.name) and os.path.isfile(p)]  # noqa: PTH113
    if os.path.isdir(path):  # noqa: PTH112 (pathlib raises for names that no file can have)
        root = path
        parts = ("val", "val.tar", "val.zip")
        part = next((p for p in parts if (path / p).is_dir() or find_archives(path, p)), ".")
    elif archives:
        root = archives[0]
        part = str(path.relative_to(root))
    elif os.path.isfile(path) and not is_archive(path.name):  # noqa: PTH113
        name = "list"
        root = path.parent
        part = path.name
        if list_root is not None:
            root = Path(list_root)
            part = os.path.abspath(path)  # noqa: PTH100 (keeps links)
    elif find_archives(path.parent, path.name):
        root = path.parent
        part = path.name
    else:
        raise DataError(
            f"{path}: neither a folder nor a file.",
            "Give the path of a folder or file after --data.",
        )
    config = replace(config, name=name, root=str(root), val=part, kwargs={}, exclude=None)
    return replace(config, val_fraction=None, fold=None, group=None)


def open_test_set(
    config: DataConfig, classes: Sequence[str] | None, *, allow_missing: bool = False
) -> ImageSet:
    """The validation part of a `folder` or `list` dataset. The training part is not opened.

    classes: those of the weights to evaluate, to which the images are matched; None to keep the
    classes of the images. allow_missing: the images need not have all classes. Raises DataError.
    """
    assert config.val is not None
    images = open_part(config, config.val, None if chosen_classes(config) else classes)
    place = describe_part(config, config.val)
    return select_images(config, images, "val", place, classes, allow_missing)


def describe_images(config: DataConfig, images: ImageSet) -> str:
    """How many images of how many classes are evaluated, and where they are from."""
    classes = len(images.classes)
    if images.targets is not None:
        classes = int(np.count_nonzero(class_sizes(images.targets, classes)))
    place = describe_part(config, config.val or config.train)
    where = f"in {place}"
    if config.fold is not None:
        where = f"held out of {place} by data.fold={config.fold}"
    elif config.val is None:
        where = f"held out of {place} by data.val_fraction={config.val_fraction}"
    return f"{len(images)} images of {classes} classes, {where}"
