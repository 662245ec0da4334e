"""Transforms against torchvision's, on tensors (same bits) and on Pillow images (within a gray
level).
"""

import io
from copy import copy

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_eval
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from imagenet_cls.config.schema import (
    AugmentConfig,
    ColorJitterConfig,
    EvalConfig,
    ProgressiveConfig,
    height_width,
)
from imagenet_cls.data.decode import decode_rgb, rgb_tensor
from imagenet_cls.data.device import Preprocess
from imagenet_cls.data.transforms import EvalTransform, TrainTransform, resize, size_px_at, sizes_px

MODES = {
    "nearest": InterpolationMode.NEAREST_EXACT,
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
}


def assert_alike(ours: torch.Tensor, reference: Image.Image, interpolation: str) -> None:
    """Within a gray level; `nearest` may differ in the few rows and columns that lie exactly
    between two pixels.
    """
    pixels = ours.permute(1, 2, 0).numpy().astype(int)
    differs = (np.abs(pixels - np.asarray(reference).astype(int)) > 1).any(-1)
    assert differs.mean() <= (0.03 if interpolation == "nearest" else 0)


def only_split(transform: TrainTransform, image: torch.Tensor, epoch: int = 0) -> torch.Tensor:
    ((image_of_split, _),) = transform(image, epoch, [0])
    return image_of_split


def assert_form(image: torch.Tensor, size_px: int) -> None:
    assert image.dtype == torch.uint8 and image.shape == (3, size_px, size_px)


@pytest.mark.parametrize("interpolation", list(MODES))
def test_train_transform_within_a_gray_level_of_pillow(
    photographs: list[Image.Image], interpolation: str
) -> None:
    augment = AugmentConfig(size_px=96, interpolation=interpolation, hflip_prob=0.5)
    mode = InterpolationMode.NEAREST if interpolation == "nearest" else MODES[interpolation]
    reference = v1.Compose(
        [v1.RandomResizedCrop(96, interpolation=mode), v1.RandomHorizontalFlip(0.5)]
    )
    ours = TrainTransform(augment)
    for seed in range(20):
        photograph = photographs[seed % 2]
        torch.manual_seed(seed)
        expected = reference(photograph)
        torch.manual_seed(seed)
        image = only_split(ours, rgb_tensor(photograph))
        assert_form(image, 96)
        assert_alike(image, expected, interpolation)


PAD_CROP = [v2.Resize((32, 32)), v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(0.5)]
EQUAL = {
    "all": (
        AugmentConfig(
            size_px=64,
            scale=[0.3, 0.9],
            ratio=[0.5, 2.0],
            hflip_prob=0.4,
            vflip_prob=0.6,
            color_jitter=ColorJitterConfig(1.0, 0.4, 0.3, 0.2, 0.1),
        ),
        [
            v2.RandomResizedCrop(64, scale=(0.3, 0.9), ratio=(0.5, 2.0), antialias=True),
            v2.RandomHorizontalFlip(0.4),
            v2.RandomVerticalFlip(0.6),
            v2.ColorJitter(0.4, 0.3, 0.2, 0.1),
        ],
    ),
    "some": (
        AugmentConfig(
            size_px=32,
            color_jitter=ColorJitterConfig(0.3, brightness=0.5, hue=0.2),
            grayscale_prob=0.4,
        ),
        [
            v2.RandomResizedCrop(32),
            v2.RandomHorizontalFlip(0.5),
            v2.RandomApply([v2.ColorJitter(brightness=0.5, hue=0.2)], p=0.3),
            v2.RandomGrayscale(0.4),
        ],
    ),
    "crop": (AugmentConfig(size_px=32, hflip_prob=0.0), [v2.RandomResizedCrop(32)]),
    "pad_crop": (
        AugmentConfig(size_px=32, crop="pad_crop", vflip_prob=0.5),
        [*PAD_CROP, v2.RandomVerticalFlip(0.5)],
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
    "pad_crop edge": (
        AugmentConfig(size_px=32, crop="pad_crop", pad_px=3, pad_mode="edge"),
        [
            v2.Resize((32, 32)),
            v2.RandomCrop(32, padding=3, padding_mode="edge"),
            v2.RandomHorizontalFlip(0.5),
        ],
    ),
    "pad_crop symmetric": (
        AugmentConfig(size_px=32, crop="pad_crop", pad_mode="symmetric"),
        [
            v2.Resize((32, 32)),
            v2.RandomCrop(32, padding=4, padding_mode="symmetric"),
            v2.RandomHorizontalFlip(0.5),
        ],
    ),
    "pad_crop by 31": (
        AugmentConfig(size_px=32, crop="pad_crop", pad_px=31),
        [
            v2.Resize((32, 32)),
            v2.RandomCrop(32, padding=31),
            v2.RandomHorizontalFlip(0.5),
        ],
    ),
    "pad_crop without padding": (
        AugmentConfig(size_px=32, crop="pad_crop", pad_px=0),
        [v2.Resize((32, 32)), v2.RandomHorizontalFlip(0.5)],
    ),
    "[height, width]": (
        AugmentConfig(size_px=[24, 40], grayscale_prob=0.4),
        [v2.RandomResizedCrop((24, 40)), v2.RandomHorizontalFlip(0.5), v2.RandomGrayscale(0.4)],
    ),
    "pad_crop of [height, width]": (
        AugmentConfig(size_px=[24, 40], crop="pad_crop"),
        [v2.Resize((24, 40)), v2.RandomCrop((24, 40), padding=4), v2.RandomHorizontalFlip(0.5)],
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
    ours, reference = TrainTransform(augment), v2.Compose(steps)
    image = rgb_tensor(photographs[0])
    for seed in range(30):
        torch.manual_seed(seed)
        expected, next_draw = reference(image), torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(only_split(ours, image), expected) and torch.equal(
            torch.rand(1), next_draw
        )


def test_pad_crop_of_images_of_the_size_equals_torchvisions(photographs: list[Image.Image]) -> None:
    """As for CIFAR: nothing is resized. The colors after the crop are drawn as before."""
    jitter = ColorJitterConfig(brightness=0.5)
    ours = TrainTransform(AugmentConfig(size_px=32, crop="pad_crop", color_jitter=jitter))
    reference = v2.Compose([*PAD_CROP[1:], v2.ColorJitter(brightness=0.5)])
    image = rgb_tensor(photographs[0].resize((32, 32)))
    for seed in range(30):
        torch.manual_seed(seed)
        expected = reference(image)
        torch.manual_seed(seed)
        assert torch.equal(only_split(ours, image), expected)


@pytest.mark.parametrize("interpolation", list(MODES))
def test_resize_of_crops_equals_torchvisions(
    photographs: list[Image.Image], interpolation: str
) -> None:
    draws = np.random.default_rng(0)
    for number in range(20):
        photograph = photographs[number % 2].resize(
            [int(side) for side in draws.integers(20, 300, 2)]
        )
        file = io.BytesIO()
        photograph.convert("L" if number % 5 == 4 else "RGB").save(
            file, "JPEG", quality=90, subsampling=number % 3
        )
        image = decode_rgb(file.getvalue())
        top, left = (int(draws.integers(side)) for side in image.shape[1:])
        crop = image[:, top:, left:]
        for size in ([64, 64], [7, 150], list(crop.shape[1:])):
            expected = v2.functional.resize(
                crop.contiguous(), size, MODES[interpolation], antialias=True
            )
            assert torch.equal(resize(crop, size, interpolation), expected)


@pytest.mark.parametrize("ratio", [(0.75, 4 / 3), (0.05, 20.0), (8.0, 9.0), (0.1, 0.1)])
def test_draw_crop_equals_torchvisions(ratio: tuple[float, float]) -> None:
    """Also where no crop fits, as for most of the last two ranges."""
    transform, reference = (
        TrainTransform(AugmentConfig(ratio=list(ratio))),
        v2.RandomResizedCrop(8, ratio=ratio),
    )
    for seed in range(100):
        image = torch.empty(3, 20 + seed * 37 % 90, 20 + seed * 53 % 90)
        torch.manual_seed(seed)
        expected, next_draw = reference.make_params([image]), torch.rand(1)
        torch.manual_seed(seed)
        assert transform.draw_crop(*image.shape[1:]) == tuple(expected.values())
        assert torch.equal(torch.rand(1), next_draw)


@pytest.mark.parametrize("ratio", [1000.0, 0.001])
def test_crop_of_an_extreme_ratio_is_at_least_a_pixel_wide(ratio: float) -> None:
    transform = TrainTransform(AugmentConfig(size_px=16, ratio=[ratio, ratio]))
    assert_form(only_split(transform, torch.zeros(3, 16, 16, dtype=torch.uint8)), 16)


def test_interpolation_random_is_drawn_for_each_image(photographs: list[Image.Image]) -> None:
    image = rgb_tensor(photographs[0])
    crops = {
        mode: v2.RandomResizedCrop(48, interpolation=MODES[mode])
        for mode in ("bilinear", "bicubic")
    }
    transform, drawn = (
        TrainTransform(AugmentConfig(size_px=48, interpolation="random", hflip_prob=0.0)),
        [],
    )
    for seed in range(30):
        torch.manual_seed(seed)
        result = only_split(transform, image)
        expected = {}
        for mode, crop in crops.items():
            torch.manual_seed(seed)
            expected[mode] = crop(image)
        (mode,) = (mode for mode, pixels in expected.items() if torch.equal(result, pixels))
        drawn.append(mode)
    assert 8 <= drawn.count("bicubic") <= 22


def test_policy_is_applied_between_flips_and_color(photographs: list[Image.Image]) -> None:
    augment = AugmentConfig(
        size_px=32, policy="torchvision:trivial_augment_wide", grayscale_prob=1.0
    )
    transform = TrainTransform(augment)
    policy = v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR)
    first = v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(0.5)])
    image = rgb_tensor(photographs[0])
    for seed in range(20):
        torch.manual_seed(seed)
        expected = v2.functional.rgb_to_grayscale(
            v2.functional.pil_to_tensor(policy(v2.functional.to_pil_image(first(image)))),
            num_output_channels=3,
        )
        torch.manual_seed(seed)
        result = only_split(transform, image)
        assert_form(result, 32)
        assert torch.equal(result, expected)


def test_image_size_follows_the_epoch(photographs: list[Image.Image]) -> None:
    augment = AugmentConfig(
        size_px=96,
        policy="rand-m9-mstd0.5",
        progressive=ProgressiveConfig([1.0, 3.0], [32, 96], multiple_px=16),
    )
    transform, image = TrainTransform(augment), rgb_tensor(photographs[0])
    assert [only_split(transform, image, epoch).shape[-1] for epoch in range(5)] == [
        32,
        32,
        64,
        96,
        96,
    ]
    # timm's shifts in pixels are at most 0.45 of the side
    shifts = [
        policy.policy.ops[0].hparams["translate_const"] for policy in transform.policies.values()
    ]
    assert list(transform.policies) == [(32, 32), (64, 64), (96, 96)] and shifts == [14, 28, 43]
    wide = TrainTransform(AugmentConfig(size_px=[32, 96], policy="rand-m9-mstd0.5"))
    (policy,) = wide.policies.values()
    assert policy.policy.ops[0].hparams["translate_const"] == 14, "of the short side, as in timm"
    assert only_split(wide, image).shape == (3, 32, 96)


@pytest.mark.parametrize("interpolation", list(MODES))
@pytest.mark.parametrize(
    ("crop_px", "crop_pct", "resize_px"), [(96, 0.875, None), (96, 0.95, None), (64, 0.9, 72)]
)
def test_eval_transform_within_a_gray_level_of_pillow(
    photographs: list[Image.Image],
    interpolation: str,
    crop_px: int,
    crop_pct: float,
    resize_px: int | None,
) -> None:
    config = EvalConfig("crop", crop_px, crop_pct, resize_px, interpolation)
    mode = InterpolationMode.NEAREST if interpolation == "nearest" else MODES[interpolation]
    short_px = resize_px or int(crop_px / crop_pct)
    reference = v1.Compose([v1.Resize(short_px, interpolation=mode), v1.CenterCrop(crop_px)])
    upright, small = (
        photographs[1].transpose(Image.Transpose.ROTATE_90),
        photographs[1].resize((99, 55)),
    )
    for photograph in (photographs[0], upright, small):
        image = EvalTransform(config)(rgb_tensor(photograph))
        assert_form(image, crop_px)
        assert_alike(image, reference(photograph), interpolation)


def test_one_channel_equals_torchvisions_transforms_of_gray_images(
    photographs: list[Image.Image],
) -> None:
    steps = [
        v2.RandomResizedCrop(48, antialias=True),
        v2.RandomHorizontalFlip(0.5),
        v2.ColorJitter(0.4, 0.3, 0.2, 0.1),
        v2.RandomGrayscale(0.5),
    ]
    jitter = ColorJitterConfig(1.0, 0.4, 0.3, 0.2, 0.1)
    ours = TrainTransform(
        AugmentConfig(size_px=48, color_jitter=jitter, grayscale_prob=0.5), mean=[0.5]
    )
    evaluation, square = (
        EvalTransform(EvalConfig(crop_px=48, resize_px=60), mean=[0.5]),
        v2.CenterCrop(48),
    )
    for seed in range(20):
        photograph = photographs[seed % 2].resize((150 + seed, 120))
        gray = v2.functional.pil_to_tensor(photograph.convert("L"))
        assert torch.equal(
            evaluation(rgb_tensor(photograph)),
            square(v2.functional.resize(gray, [60], antialias=True)),
        )
        torch.manual_seed(seed)
        expected, next_draw = v2.Compose(steps)(gray), torch.rand(1)
        torch.manual_seed(seed)
        result = only_split(ours, rgb_tensor(photograph))
        assert result.shape == (1, 48, 48) and torch.equal(result, expected)
        assert torch.equal(torch.rand(1), next_draw)


TIMMS_MODES = {"crop": "center", "squash": "squash", "pad": "border"}


@pytest.mark.parametrize("mode", list(TIMMS_MODES))
@pytest.mark.parametrize("interpolation", list(MODES))
@pytest.mark.parametrize(
    ("crop_px", "crop_pct"), [(96, 0.875), (64, 1.0), ([48, 80], 0.875), ([90, 30], 1.0)]
)
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
    config = EvalConfig(mode, crop_px, crop_pct, None, interpolation)
    transform = EvalTransform(config, mean)
    options = {
        "crop_pct": crop_pct,
        "crop_mode": TIMMS_MODES[mode],
        "interpolation": interpolation,
        "mean": mean,
    }
    on_pillow = transforms_imagenet_eval(crop_px, **options, normalize=False)
    steps = on_pillow.transforms[:2]
    upright = photographs[1].transpose(Image.Transpose.ROTATE_90)
    sizes = [(640, 427), (427, 640), (99, 55), (31, 200), (64, 64), (97, 96)]
    for photograph in [photographs[0], upright, *(photographs[1].resize(size) for size in sizes)]:
        image = rgb_tensor(photograph)
        result = transform(image)
        assert result.dtype == torch.uint8 and result.shape == (3, *height_width(crop_px))
        # which differs where rows or columns lie exactly between two pixels
        if interpolation != "nearest":
            assert (result.float() - on_pillow(photograph)).abs().mean() < 0.5
        resized_by_timm = steps[0](photograph).size[::-1]  # width and height of Pillow
        expected = v2.functional.resize(
            image, list(resized_by_timm), MODES[interpolation], antialias=True
        )
        expected = torch.stack(
            [timms_crop(steps[1], channel, i) for i, channel in enumerate(expected)]
        )
        assert torch.equal(result, expected)


def timms_crop(step: torch.nn.Module, channel: torch.Tensor, number: int) -> torch.Tensor:
    """timm's center crop of one channel; torchvision's v1, which it uses, takes one fill value for
    a tensor.
    """
    step = copy(step)
    if isinstance(getattr(step, "fill", None), list):
        step.fill = step.fill[number]
    return step(channel[None])[0]


def test_eval_mode_pad_of_an_extreme_ratio_keeps_a_row() -> None:
    transform = EvalTransform(EvalConfig("pad", crop_px=32), [0.5, 0.5, 0.5])
    for height, width in ((1, 300), (300, 1)):
        result = transform(torch.zeros(3, height, width, dtype=torch.uint8))
        assert_form(result, 32)
        assert 0 < (result == 0).sum() <= 3 * 32


def growing(epochs: list[float], sizes: list[int], multiple_px: int = 32) -> AugmentConfig:
    return AugmentConfig(
        size_px=max(sizes), progressive=ProgressiveConfig(epochs, sizes, multiple_px)
    )


@pytest.mark.parametrize(("first", "last"), [(11, 13), (29, 34), (65, 76)])
def test_size_px_equals_ffcvs_ramps(first: int, last: int) -> None:
    """`get_resolution` of FFCV's ImageNet script: interpolate 160 to 192, round to a multiple of
    32.
    """
    augment = growing([first, last], [160, 192])
    for epoch in range(100):
        expected = int(np.round(np.interp([epoch], [first, last], [160, 192])[0] / 32)) * 32
        assert size_px_at(augment, epoch) == expected
    assert sizes_px(augment) == [160, 192]


def test_size_px_between_several_points_is_linear() -> None:
    several = growing([2.0, 10.0, 10.5, 30.0], [64, 128, 96, 224], 16)
    expected = {0: 64, 2: 64, 6: 96, 10: 128, 11: 96, 20: 160, 30: 224, 40: 224}
    assert {epoch: size_px_at(several, epoch) for epoch in expected} == expected
    assert sizes_px(several) == sorted({size_px_at(several, epoch) for epoch in range(40)})


@pytest.mark.parametrize("channels_last", [False, True])
def test_preprocess_normalizes(channels_last: bool) -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    images = torch.randint(0, 256, (4, 3, 9, 7), dtype=torch.uint8)
    result = Preprocess(mean, std, torch.device("cpu"), channels_last)(images)
    expected = v2.functional.normalize(images.float() / 255, mean, std)
    assert result.dtype == torch.float32 and torch.allclose(result, expected, atol=1e-6)
    assert result.is_contiguous(memory_format=torch.channels_last) == channels_last
    gray = Preprocess(mean[1:2], std[1:2], torch.device("cpu"), channels_last)(images[:, 1:2])
    assert torch.equal(gray, result[:, 1:2])
