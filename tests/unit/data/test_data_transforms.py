"""Transforms against torchvision's, on tensors (same bits) and on Pillow images (within a gray
level).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_eval
from torchvision.transforms import InterpolationMode, v2

from imagenet_cls.config.schema import (
    AugmentConfig,
    ColorJitterConfig,
    EvalConfig,
    ProgressiveConfig,
)
from imagenet_cls.data.decode import rgb_tensor
from imagenet_cls.data.device import Normalize
from imagenet_cls.data.transforms import EvalTransform, TrainTransform, size_px_at, sizes_px

NEAREST = InterpolationMode.NEAREST_EXACT
MODES = {
    "nearest": NEAREST,
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
}


def only_split(transform: TrainTransform, image: torch.Tensor, epoch: int = 0) -> torch.Tensor:
    ((image_of_split, _),) = transform(image, epoch, [0])
    return image_of_split


def with_next_draw(transform: Callable, image: torch.Tensor, seed: int) -> tuple[Any, float]:
    """What a transform returns, and the number that is drawn next."""
    torch.manual_seed(seed)
    result = transform(image)
    return result, torch.rand(1).item()


EQUAL = {
    "all": (
        AugmentConfig(
            size_px=64,
            scale=[0.3, 0.9],
            ratio=[0.5, 2.0],
            hflip_prob=0.4,
            vflip_prob=0.6,
            color_jitter=ColorJitterConfig(1.0, 0.4, 0.3, 0.2, 0.1),
            grayscale_prob=0.5,
        ),
        [
            v2.RandomResizedCrop(64, scale=(0.3, 0.9), ratio=(0.5, 2.0), antialias=True),
            v2.RandomHorizontalFlip(0.4),
            v2.RandomVerticalFlip(0.6),
            v2.ColorJitter(0.4, 0.3, 0.2, 0.1),
            v2.RandomGrayscale(0.5),
        ],
    ),
    "some": (
        AugmentConfig(
            size_px=[24, 40],
            interpolation="nearest",
            hflip_prob=0.0,
            color_jitter=ColorJitterConfig(0.3, brightness=0.5, hue=0.2),
            grayscale_prob=0.4,
        ),
        [
            v2.RandomResizedCrop((24, 40), interpolation=NEAREST),
            v2.RandomApply([v2.ColorJitter(brightness=0.5, hue=0.2)], p=0.3),
            v2.RandomGrayscale(0.4),
        ],
    ),
    "pad_crop": (
        AugmentConfig(size_px=[24, 40], crop="pad_crop", color_jitter=ColorJitterConfig(1.0, 0.5)),
        [
            v2.Resize((24, 40)),
            v2.RandomCrop((24, 40), padding=4),
            v2.RandomHorizontalFlip(0.5),
            v2.ColorJitter(brightness=0.5),
        ],
    ),
    "pad_crop reflect": (
        AugmentConfig(
            size_px=32, crop="pad_crop", pad_px=31, pad_mode="reflect", interpolation="bicubic"
        ),
        [
            v2.Resize((32, 32), InterpolationMode.BICUBIC),
            v2.RandomCrop(32, padding=31, padding_mode="reflect"),
            v2.RandomHorizontalFlip(0.5),
        ],
    ),
    "resize": (
        AugmentConfig(size_px=32, crop="resize"),
        [v2.Resize((32, 32)), v2.RandomHorizontalFlip(0.5)],
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_train_transform_equals_torchvisions(photographs: list[Image.Image], name: str) -> None:
    """And draws as much: a transform with probability 0 draws nothing."""
    augment, steps = EQUAL[name]
    ours, reference = partial(only_split, TrainTransform(augment)), v2.Compose(steps)
    images = [rgb_tensor(photographs[0]), rgb_tensor(photographs[1].resize((32, 32)))]
    images.append(images[0][:1].expand(3, -1, -1))  # as gray images are decoded
    for seed in range(40):
        result, next_draw = with_next_draw(ours, images[seed % 3], seed)
        expected, expected_draw = with_next_draw(reference, images[seed % 3], seed)
        assert torch.equal(result, expected) and next_draw == expected_draw


@pytest.mark.parametrize("ratio", [(0.75, 4 / 3), (8.0, 9.0), (0.1, 0.1)])
def test_draw_crop_equals_torchvisions(ratio: tuple[float, float]) -> None:
    """Also where no crop fits, as for most of the last two ranges."""
    transform = TrainTransform(AugmentConfig(ratio=list(ratio)))
    reference = v2.RandomResizedCrop(8, ratio=ratio)
    for seed in range(100):
        image = torch.empty(3, 20 + seed * 37 % 90, 20 + seed * 53 % 90)
        expected, next_draw = with_next_draw(lambda x: reference.make_params([x]), image, seed)
        crop = with_next_draw(lambda x: transform.draw_crop(*x.shape[1:]), image, seed)
        assert crop == (tuple(expected.values()), next_draw)


def test_interpolation_random_is_drawn_for_each_image(photographs: list[Image.Image]) -> None:
    image, drawn = rgb_tensor(photographs[0]), []
    transform = TrainTransform(AugmentConfig(size_px=48, interpolation="random", hflip_prob=0.0))
    modes = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)
    crops = [v2.RandomResizedCrop(48, interpolation=mode) for mode in modes]
    for seed in range(30):
        result, _ = with_next_draw(partial(only_split, transform), image, seed)
        equal = [torch.equal(result, with_next_draw(crop, image, seed)[0]) for crop in crops]
        drawn.append(equal.index(True))
    assert 8 <= sum(drawn) <= 22


def test_image_size_follows_the_epoch(photographs: list[Image.Image]) -> None:
    """timm's policies shift by at most 0.45 of the short side."""

    def shifts(transform: TrainTransform) -> list[int]:
        policies = [policy.policy.policy for policy in transform.policies.values()]
        return [policy.ops[0].hparams["translate_const"] for policy in policies]

    augment = replace(growing([1.0, 3.0], [32, 96], 16), policy="rand-m9-mstd0.5")
    transform, image = TrainTransform(augment), rgb_tensor(photographs[0])
    sides = [only_split(transform, image, epoch).shape[-1] for epoch in range(5)]
    assert sides == [32, 32, 64, 96, 96] and shifts(transform) == [14, 28, 43]
    wide = TrainTransform(AugmentConfig(size_px=[32, 96], policy="rand-m9-mstd0.5"))
    assert only_split(wide, image).shape == (3, 32, 96) and shifts(wide) == [14]


def test_one_channel_equals_torchvisions_transforms_of_gray_images(
    photographs: list[Image.Image],
) -> None:
    augment, steps = EQUAL["all"]
    ours = partial(only_split, TrainTransform(augment, mean=[0.5]))
    evaluation = EvalTransform(EvalConfig(crop_px=48, resize_px=60), mean=[0.5])
    reference = v2.Compose([v2.Resize(60, antialias=True), v2.CenterCrop(48)])
    for seed in range(20):
        photograph = photographs[seed % 2].resize((150 + seed, 120))
        gray = v2.functional.pil_to_tensor(photograph.convert("L"))
        assert torch.equal(evaluation(rgb_tensor(photograph)), reference(gray))
        expected, next_draw = with_next_draw(v2.Compose(steps), gray, seed)
        result, draw = with_next_draw(ours, rgb_tensor(photograph), seed)
        assert torch.equal(result, expected) and draw == next_draw


TIMMS_MODES = {"crop": "center", "squash": "squash", "pad": "border"}


@pytest.mark.parametrize("mode", list(TIMMS_MODES))
@pytest.mark.parametrize("interpolation", list(MODES))
@pytest.mark.parametrize(("crop_px", "crop_pct"), [(96, 0.875), (64, 1.0), ([48, 80], 0.875)])
def test_eval_mode_equals_timms(
    photographs: list[Image.Image],
    interpolation: str,
    mode: str,
    crop_px: int | list[int],
    crop_pct: float,
) -> None:
    """The same bits as timm's steps on uint8 tensors, its resize by torchvision's v2; rounding
    apart also on Pillow.
    """
    mean = (0.2, 0.5, 0.999)
    transform = EvalTransform(EvalConfig(mode, crop_px, crop_pct, None, interpolation), mean)
    on_pillow = transforms_imagenet_eval(
        crop_px,
        crop_pct=crop_pct,
        crop_mode=TIMMS_MODES[mode],
        interpolation=interpolation,
        mean=mean,
        normalize=False,
    )
    resize_step, crop_step = on_pillow.transforms[:2]
    upright = photographs[1].transpose(Image.Transpose.ROTATE_90)
    sizes = [(640, 427), (427, 640), (99, 55), (31, 200), (97, 96)]
    for photograph in [photographs[0], upright, *(photographs[1].resize(size) for size in sizes)]:
        image = rgb_tensor(photograph)
        result = transform(image)
        # which differs where rows or columns lie exactly between two pixels
        if interpolation != "nearest":
            assert (result.float() - on_pillow(photograph)).abs().mean() < 0.5
        resized_by_timm = resize_step(photograph).size[::-1]  # width and height of Pillow
        resized = v2.functional.resize(
            image, list(resized_by_timm), MODES[interpolation], antialias=True
        )
        expected = [timms_crop(crop_step, channel, i) for i, channel in enumerate(resized)]
        assert torch.equal(result, torch.stack(expected))


def timms_crop(step: torch.nn.Module, channel: torch.Tensor, number: int) -> torch.Tensor:
    """timm's center crop of one channel; torchvision's v1, which it uses, takes one fill value for
    a tensor.
    """
    step = copy(step)
    if isinstance(getattr(step, "fill", None), list):
        step.fill = step.fill[number]
    return step(channel[None])[0]


@pytest.mark.parametrize("size", [(1, 300), (300, 1)])
def test_extreme_ratio_keeps_a_row(size: tuple[int, int]) -> None:
    image = torch.zeros(3, *size, dtype=torch.uint8)
    result = EvalTransform(EvalConfig("pad", crop_px=32), [0.5, 0.5, 0.5])(image)
    assert result.shape == (3, 32, 32) and 0 < (result == 0).sum() <= 3 * 32
    square, ratio = image[:, :16, :16].expand(3, 16, 16), size[0] / size[1]
    crop = TrainTransform(AugmentConfig(size_px=16, ratio=[ratio, ratio]))
    assert only_split(crop, square).shape == (3, 16, 16)


def growing(epochs: list[float], sizes: list[int], multiple_px: int = 32) -> AugmentConfig:
    return AugmentConfig(
        size_px=max(sizes), progressive=ProgressiveConfig(epochs, sizes, multiple_px)
    )


def test_size_px_equals_ffcvs_ramps() -> None:
    """`get_resolution` of FFCV's ImageNet script: interpolate 160 to 192, round to a multiple of
    32.
    """
    augment = growing([65, 76], [160, 192])
    for epoch in range(100):
        expected = int(np.round(np.interp([epoch], [65, 76], [160, 192])[0] / 32)) * 32
        assert size_px_at(augment, epoch) == expected
    assert sizes_px(augment) == [160, 192]


@pytest.mark.parametrize("channels_last", [False, True])
def test_preprocess_normalizes(channels_last: bool) -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    images = torch.randint(0, 256, (4, 3, 9, 7), dtype=torch.uint8)
    result = Normalize(mean, std, torch.device("cpu"), channels_last)(images)
    expected = v2.functional.normalize(images.float() / 255, mean, std)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    assert result.is_contiguous(memory_format=torch.channels_last) == channels_last
