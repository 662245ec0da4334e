"""Sides of training images by epoch, against the formula written out and against FFCV's ramps."""

from fractions import Fraction

import numpy as np
import pytest

from imagenet_cls.config.schema import AugmentConfig, ProgressiveConfig
from imagenet_cls.data.resolution import size_px_at, sizes_px


def growing(epochs: list[float], sizes: list[int], multiple_px: int = 32) -> AugmentConfig:
    return AugmentConfig(size_px=max(sizes), progressive=ProgressiveConfig(epochs, sizes, multiple_px))


def test_without_points_the_side_stays() -> None:
    assert {size_px_at(AugmentConfig(size_px=176), epoch) for epoch in range(100)} == {176}
    assert sizes_px(AugmentConfig(size_px=176)) == [176]


@pytest.mark.parametrize(("first", "last"), [(11, 13), (17, 20), (23, 27), (29, 34), (41, 48), (65, 76)])
def test_the_ramps_of_ffcv(first: int, last: int) -> None:
    """`get_resolution` of FFCV's ImageNet script: interpolate 160 to 192, round to a multiple of 32."""
    augment = growing([first, last], [160, 192])
    for epoch in range(100):
        expected = int(np.round(np.interp([epoch], [first, last], [160, 192])[0] / 32)) * 32
        assert size_px_at(augment, epoch) == expected
    assert sizes_px(augment) == [160, 192]


def test_straight_lines_between_points_rounded_to_the_multiple() -> None:
    epochs, sizes, multiple = [2.0, 10.0, 10.5, 30.0], [64, 128, 96, 224], 16
    augment = growing(epochs, sizes, multiple)
    seen = []
    for epoch in range(40):
        if epoch <= epochs[0]:
            side = Fraction(sizes[0])
        elif epoch >= epochs[-1]:
            side = Fraction(sizes[-1])
        else:
            n = max(i for i in range(4) if epochs[i] <= epoch)
            share = (Fraction(epoch) - Fraction(epochs[n])) / (Fraction(epochs[n + 1]) - Fraction(epochs[n]))
            side = sizes[n] + share * (sizes[n + 1] - sizes[n])
        seen.append(size_px_at(augment, epoch))
        assert seen[-1] == round(side / multiple) * multiple
    assert sizes_px(augment) == sorted(set(seen)) and len(set(seen)) > 6
    assert type(seen[5]) is int


def test_mosaics_ramp_rounds_to_multiples_of_4() -> None:
    augment = growing([0, 10], [112, 224], 4)
    assert [size_px_at(augment, epoch) for epoch in (0, 1, 5, 9, 10, 11)] == [112, 124, 168, 212, 224, 224]


def test_a_million_epochs_are_looked_at_at_once() -> None:
    assert sizes_px(growing([0, 10**6], [128, 160], 16)) == [128, 144, 160]
