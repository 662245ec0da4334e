"""The side of the training images as a function of the epoch.

Owns `augment.progressive`. Pure: no image, no state. Called by `transforms` and `synthetic` (each sample key names its
epoch, so that workers follow without being told), and by whoever plots a schedule or tries a model with every size.
"""

import math

import numpy as np
from numpy.typing import NDArray

from imagenet_cls.config.schema import AugmentConfig


def size_px_at(augment: AugmentConfig, epoch: int) -> int:
    """Side of the training images of epoch `epoch` (from 0), in pixels.

    Straight lines between the points, level before the first and behind the last, rounded to a multiple of
    `multiple_px`, halves to the even multiple: `round(interp(epoch) / 32) * 32` of FFCV's `rn50_train.py`.
    """
    return int(_sides_px(augment, np.array([epoch]))[0])


def sizes_px(augment: AugmentConfig) -> list[int]:
    """Every side that a run can meet, ascending."""
    last = math.ceil((augment.progressive.epochs or [0])[-1])
    return [int(side) for side in np.unique(_sides_px(augment, np.arange(last + 1)))]


def _sides_px(augment: AugmentConfig, epochs: NDArray[np.integer]) -> NDArray[np.integer]:
    points = augment.progressive
    if points.epochs is None or points.sizes_px is None:
        return np.full(len(epochs), augment.size_px)
    sides = np.interp(epochs, points.epochs, points.sizes_px)
    return np.rint(sides / points.multiple_px).astype(np.int64) * points.multiple_px
