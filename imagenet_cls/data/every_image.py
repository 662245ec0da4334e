"""All images of a dataset, also those that a training leaves out, and what is wrong with one."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from imagenet_cls.config.schema import DataConfig, EvalConfig
from imagenet_cls.data.archive_files import ArchiveChangedError
from imagenet_cls.data.archives import index_members, is_archive
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.decode import decode_rgb
from imagenet_cls.data.image_set import FileImages, ImageSet, indexed_images, reason_of
from imagenet_cls.data.index import ImageIndex, count_others, images_of_tree, list_tree
from imagenet_cls.data.transforms import EvalTransform
from imagenet_cls.entry_points import data_opener
from imagenet_cls.errors import DataError, UsageError
from imagenet_cls.text import first_line


def every_image(place: Path | DataConfig) -> list[ImageSet]:
    """All images of a folder or an archive, at any depth, or of both parts of a config's dataset.
    Raises DataError, and UsageError for a dataset not made of files.
    """
    return _images_of_config(place) if isinstance(place, DataConfig) else _images_below(place)


def _images_below(root: Path) -> list[ImageSet]:
    """The images at any depth below a folder, also in archives there, or in the archive `root`."""
    if root.is_file():
        return [indexed_images(index_members(root, [root]))]
    tree = list_tree(os.fsencode(root), b".")
    unread = count_others(tree)
    for suffix in (b".tar", b".zip"):  # they are read below
        del unread[suffix]
    names = np.array(images_of_tree(tree), bytes)
    images = ImageIndex(root, names, np.zeros(len(names), np.int64), (), unread=unread)
    archives = sorted(
        path
        for folder, content in tree.items()
        for path in (root / os.fsdecode(folder) / os.fsdecode(name) for name in content.others)
        if is_archive(path.name) and path.is_file()
    )
    indexes = [images, index_members(root, archives)] if archives else [images]
    return list(map(indexed_images, indexes))


def _images_of_config(data: DataConfig) -> list[ImageSet]:
    """The training and the validation part, with the images that `data.exclude` names."""
    opener = data_opener(data.name)
    if opener is None or not opener.has_paths:
        raise UsageError(
            f"data.name {data.name!r} is not made of image files.",
            "Give a folder, or a config with a folder or a list.",
        )
    sets = open_datasets(replace(data, exclude=None), allow_missing=True)
    return [sets.train, sets.val]


def image_problem(images: FileImages, number: int, evaluation: EvalConfig) -> str | None:
    """Read and decode an image: why it can't be used in training or evaluation, or None."""
    try:
        image = decode_rgb(images.read(number))
        EvalTransform(evaluation).resized_size(*image.shape[1:])
    except ArchiveChangedError:
        raise
    except (OSError, DataError) as error:
        return reason_of(error)
    except Exception as error:  # damaged files make decoders raise anything; training would end too
        return f"{type(error).__name__}: {first_line(error)}"
    return None
