"""The targets of images: one class for each image, or any number of them (`data.labels`).

With one class the target of an image is its index, and those of N images are int64 (N,). With
several labels it is a row of zeros and ones, float32 (classes,), and those of N images are uint8
(N, classes), one byte for each image and class. This module must not import torch: datasets are
indexed before torch is imported.
"""

from collections.abc import Iterable, Sequence

import numpy as np

_SEPARATOR = ";"  # between the labels of an image


def split_labels(text: str) -> tuple[str, ...]:
    """The labels in `cat; outdoor`, without empty ones."""
    return tuple(label for part in text.split(_SEPARATOR) if (label := part.strip()))


def multi_hot(classes_of_images: Sequence[Iterable[int]], num_classes: int) -> np.ndarray:
    """The targets of images with these classes: uint8 (N, num_classes)."""
    targets = np.zeros((len(classes_of_images), num_classes), np.uint8)
    for row, classes in zip(targets, classes_of_images, strict=True):
        row[list(classes)] = 1
    return targets


def map_targets(targets: np.ndarray, target_map: np.ndarray, num_classes: int) -> np.ndarray:
    """The targets in another order of classes.

    target_map: the new class of each class, int64; -1: it is left out. With one class for each
    image, none of the images has such a class.
    """
    if targets.ndim == 1:
        mapped: np.ndarray = target_map[targets]
        return mapped
    kept = np.flatnonzero(target_map >= 0)
    rows = np.zeros((len(targets), num_classes), targets.dtype)
    rows[:, target_map[kept]] = targets[:, kept]
    return rows


def class_sizes(targets: np.ndarray, num_classes: int) -> np.ndarray:
    """The number of images with each class: int64 (num_classes,)."""
    if targets.ndim == 2:
        return targets.sum(0, dtype=np.int64)
    return np.bincount(targets[targets >= 0], minlength=num_classes)[:num_classes]


def target_bytes(targets: np.ndarray) -> bytes:
    """The targets as bytes, for a digest."""
    return (targets.astype("<i8") if targets.ndim == 1 else targets).tobytes()
