"""The side of the training images as a function of the epoch.

Owns `augment.progressive`. Pure: no image, no state. Called by `transforms` and `synthetic` (each sample key names its
epoch, so that workers follow without being told), and by whoever plots a schedule or tries a model with every size.
"""

import math

import numpy as np

from imagenet_cls.config.schema import AugmentConfig


def size_px_at(augment: AugmentConfig, epoch: int) -> int:
    """Side of the training images of epoch `epoch` (from 0), in pixels.

    Straight lines between the points, level before the first and behind the last, rounded to a multiple of
    `multiple_px`, halves to the even multiple: `round(interp(epoch) / 32) * 32` of FFCV's `rn50_train.py`.
    """
    points = augment.progressive
    if points.epochs is None or points.sizes_px is None:
        return augment.size_px
    side = float(np.interp(epoch, points.epochs, points.sizes_px))
    return round(side / points.multiple_px) * points.multiple_px


def sizes_px(augment: AugmentConfig) -> list[int]:
    """Every side that a run can meet, ascending."""
    last = math.ceil((augment.progressive.epochs or [0])[-1])
    return sorted({size_px_at(augment, epoch) for epoch in range(last + 1)})
