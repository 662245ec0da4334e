"""Which images of a part are held out for validation, and which are trained on.

Hashes of their names decide. A hash depends on the name alone, so the choice is the same on every
machine, and added files move few others.
"""

import os
import re
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.errors import DataError
from imagenet_cls.text import format_value

Names = Sequence[bytes] | np.ndarray
"""Paths below the part's folder as bytes, or what stands for them."""


def split_by_config(
    config: DataConfig, names: Names, classes: np.ndarray, images: Iterable[Hashable]
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the training part that are trained on, and those that are held out: int64,
    ascending.

    names, classes: `split_keys` and `strata` of an `ImageSet`. images: equal where rows are of the
    same image. Such rows stay together: the name and the class of the first one count. Raises
    DataError for a name that `data.group` does not match.
    """
    first_row: dict[Hashable, int] = {}
    rows = [first_row.setdefault(image, row) for row, image in enumerate(images)]
    firsts, image_of_row = np.unique(rows, return_inverse=True)
    names = np.array(names)[firsts]
    classes = classes[firsts]
    groups = None if config.group is None else group_names(names, config.group)
    if config.fold is not None and config.stratify and groups is None:
        mask = stratified_fold_mask(names, classes, config.fold)
    elif config.fold is not None:
        mask = fold_mask(names if groups is None else groups, config.fold)
    else:
        assert config.val_fraction is not None  # by the rules of a config
        mask = held_out_mask(names, classes, config.val_fraction, groups)
    is_held_out = mask[image_of_row]
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def name_hashes(names: Names) -> np.ndarray:
    """The BLAKE2b hash of each name in 64 bits: uint64 (N,)."""
    hashes = (int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names)
    return np.fromiter(hashes, np.uint64, len(names))


def fold_mask(names: Names, fold: Sequence[int]) -> np.ndarray:
    """Which images are of fold i of k, where fold is [i, k]: bool (N,). The hash of their names
    modulo k is i.
    """
    number, folds = fold
    mask: np.ndarray = name_hashes(names) % np.uint64(folds) == np.uint64(number)
    return mask


def stratified_fold_mask(names: Names, targets: np.ndarray, fold: Sequence[int]) -> np.ndarray:
    """Which images are of fold i of k, where fold is [i, k]: bool (N,). The images of each class,
    by ascending hash of their names, are cut into k blocks, and block i is in the fold.

    The sizes of the blocks of a class differ by at most one. Which of them are the larger ones
    varies with the class, so that folds have about the same size. n added images of a class move at
    most (k - 1) * n other images of it to another fold.
    """
    number, folds = fold
    mask = np.zeros(len(names), bool)
    for rows in _by_class(name_hashes(names), targets):
        shift = int(targets[rows[0]]) % folds
        first, end = ((i * len(rows) + shift) // folds for i in (number, number + 1))
        mask[rows[first:end]] = True
    return mask


def held_out_mask(
    names: Names, targets: np.ndarray, fraction: float, groups: Sequence[bytes] | None = None
) -> np.ndarray:
    """Which images are held out for validation: bool (N,).

    Of a class with n images these are round(n * fraction) (half to even), with the smallest hashes
    of their names; at least one, and not all, where the class has two or more images. A single
    image stays in training.

    groups: the group of each image. Then groups are held out instead of images, until the number of
    their images is nearest to the fraction; class by class if no group has images of several
    classes, else of all.
    """
    if groups is None:
        return _smallest_hashes(
            name_hashes(names), targets, np.ones(len(names), np.int64), fraction
        )
    unique, first, group_of = np.unique(np.array(groups), return_index=True, return_inverse=True)
    classes = targets[first]
    if (classes[group_of] != targets).any():
        classes = np.zeros_like(classes)
    hashes = name_hashes(unique)
    held_out: np.ndarray = _smallest_hashes(hashes, classes, np.bincount(group_of), fraction)
    return held_out[group_of]


def _smallest_hashes(
    hashes: np.ndarray, classes: np.ndarray, sizes: np.ndarray, fraction: float
) -> np.ndarray:
    """Which units (images, or groups of `sizes` images) are held out of each class: bool
    (units,).
    """
    mask = np.zeros(len(hashes), bool)
    for rows in _by_class(hashes, classes):
        if len(rows) >= 2:
            ends = np.cumsum(sizes[rows])
            count = np.count_nonzero(ends - sizes[rows] / 2 <= round(ends[-1] * fraction))
            mask[rows[: min(max(count, 1), len(rows) - 1)]] = True
    return mask


def fraction_rows(names: Names, classes: np.ndarray, fraction: float) -> np.ndarray:
    """The share of each class to train on, at least one image: int64 rows, ascending.

    It has the images with the smallest hashes, so that a smaller share is part of a larger one.
    """
    by_class = _by_class(name_hashes(names), classes)
    return np.sort(
        np.concatenate([rows[: max(round(len(rows) * fraction), 1)] for rows in by_class])
    )


def _by_class(hashes: np.ndarray, classes: np.ndarray) -> list[np.ndarray]:
    """The rows of each class that has any, by ascending hash."""
    order = np.lexsort((hashes, classes))
    return np.split(order, np.flatnonzero(np.diff(classes[order])) + 1)


def group_names(names: Names, pattern: str) -> list[bytes]:
    """The group of each image: group 1 of the first match of `pattern` in its name, without `./`
    and `..`, or the whole match without one.

    Raises DataError for a name without a match.
    """
    compiled = re.compile(pattern)
    groups = []
    for name in map(os.path.normpath, map(os.fsdecode, names)):
        match = compiled.search(name)
        group = None if match is None else match[min(compiled.groups, 1)]
        if group is None:
            raise DataError(
                f"data.group: {format_value(pattern)} does not match the path "
                f"{format_value(name)}.",
                "Give a regular expression that matches the path of every training image.",
            )
        groups.append(os.fsencode(group))
    return groups
