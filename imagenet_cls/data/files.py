"""Datasets of image files: `folder` (class folders, archives, shards) and `list`."""

import os
from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archives import find_archives, index_archives
from imagenet_cls.data.image_set import ImageSet, indexed_images
from imagenet_cls.data.index import ImageIndex, index_folder, list_classes
from imagenet_cls.data.lists import index_list
from imagenet_cls.errors import DataError, Problem


def open_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageSet:
    """A part. classes: the training classes, for the labels of lists and shards; class folders are
    not matched to them. Raises DataError.
    """
    return indexed_images(_index_part(config, part, classes), config.decode, config.exif)


def problems(config: DataConfig) -> list[Problem]:
    """A problem for each argument: there are none to give."""
    return [
        Problem(f"data.kwargs.{name}", f"{config.name} takes no arguments")
        for name in config.kwargs
    ]


def _index_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageIndex:
    root = Path(config.root).expanduser()
    multilabel = config.labels == "multi"
    if config.name == "list":
        return index_list(root / part, root, classes, multilabel)
    archives = find_archives(root, part)
    if archives:
        index = index_archives(root, part, archives, classes, multilabel)
    else:
        index = index_folder(root / part)
    if multilabel and index.targets.ndim == 1:
        raise DataError(
            f"{root / part}: class folders, which give each image one label, and data.labels is "
            "multi.",
            "List the images with their labels (data.name=list), or set data.labels=single.",
        )
    return index


def training_classes(config: DataConfig) -> Sequence[str] | None:
    """The classes of the training part of `folder` or `list`; None without one."""
    if not has_training_part(config):
        return None
    root = Path(config.root).expanduser()
    if config.name == "folder" and not find_archives(root, config.train):
        return list_classes(root / config.train)[0]  # the images are not listed
    return _index_part(config, config.train).classes


def has_training_part(config: DataConfig) -> bool:
    """False if `data.val` is given, and the folder, archive or list of `data.train` is missing."""
    if config.name not in ("folder", "list") or config.val is None:
        return True
    root = Path(config.root).expanduser()
    exists = os.path.exists(root / config.train)  # noqa: PTH110 (pathlib raises for names that no file can have)
    return exists or bool(find_archives(root, config.train))
