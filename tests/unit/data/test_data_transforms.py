"""Transforms against torchvision's, on tensors (same bits) and on Pillow images (within a grey level)."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from imagenet_cls.config.schema import AugmentConfig, ColorJitterConfig, EvalConfig
from imagenet_cls.data.decode import rgb_tensor
from imagenet_cls.data.device import Preprocess
from imagenet_cls.data.transforms import eval_transform, train_transform

MODES = {
    "nearest": InterpolationMode.NEAREST_EXACT,
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
}


def assert_alike(ours: torch.Tensor, reference: Image.Image, interpolation: str) -> None:
    """Within a grey level; `nearest` may differ in the few rows and columns that lie exactly between two pixels."""
    pixels = ours.permute(1, 2, 0).numpy().astype(int)
    differs = (np.abs(pixels - np.asarray(reference).astype(int)) > 1).any(-1)
    assert differs.mean() <= (0.03 if interpolation == "nearest" else 0)


def assert_form(image: torch.Tensor, size_px: int) -> None:
    assert image.dtype == torch.uint8 and image.shape == (3, size_px, size_px) and image.is_contiguous()


@pytest.mark.parametrize("interpolation", list(MODES))
def test_train_transform_within_a_grey_level_of_pillow(photographs: list[Image.Image], interpolation: str) -> None:
    augment = AugmentConfig(size_px=96, interpolation=interpolation, hflip_prob=0.5)  # type: ignore[arg-type]
    mode = InterpolationMode.NEAREST if interpolation == "nearest" else MODES[interpolation]
    reference = v1.Compose([v1.RandomResizedCrop(96, interpolation=mode), v1.RandomHorizontalFlip(0.5)])
    ours = train_transform(augment)
    for seed in range(20):
        photograph = photographs[seed % 2]
        torch.manual_seed(seed)
        expected = reference(photograph)
        torch.manual_seed(seed)
        image = ours(rgb_tensor(photograph))
        assert_form(image, 96)
        assert_alike(image, expected, interpolation)


def test_train_transform_has_torchvisions_draws(photographs: list[Image.Image]) -> None:
    augment = AugmentConfig(
        size_px=64,
        scale=[0.3, 0.9],
        ratio=[0.5, 2.0],
        hflip_prob=0.4,
        vflip_prob=0.6,
        color_jitter=ColorJitterConfig(1.0, 0.4, 0.3, 0.2, 0.1),
    )
    steps = [
        v2.RandomResizedCrop(64, scale=(0.3, 0.9), ratio=(0.5, 2.0), antialias=True),
        v2.RandomHorizontalFlip(0.4),
        v2.RandomVerticalFlip(0.6),
    ]
    jitter = v2.ColorJitter(0.4, 0.3, 0.2, 0.1)
    ours = train_transform(augment)
    image = rgb_tensor(photographs[0])
    results = []
    for seed in range(20):
        torch.manual_seed(seed)
        # all draws come first in ours, which changes nothing for those: applying draws nothing
        expected = jitter(v2.Compose(steps)(image))
        torch.manual_seed(seed)
        results.append(ours(image))
        assert torch.equal(results[-1], expected)
    assert len({tuple(result.flatten().tolist()) for result in results}) == 20


def test_nothing_is_drawn_for_what_cannot_happen(photographs: list[Image.Image]) -> None:
    transform = train_transform(AugmentConfig(size_px=32, hflip_prob=0.0))
    reference = v2.RandomResizedCrop(32)
    image = rgb_tensor(photographs[0])
    torch.manual_seed(3)
    reference(image)
    expected = torch.rand(1)
    torch.manual_seed(3)
    transform(image)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("interpolation", list(MODES))
@pytest.mark.parametrize(("crop_px", "crop_pct", "resize_px"), [(96, 0.875, None), (96, 0.95, None), (64, 0.9, 72)])
def test_eval_transform_within_a_grey_level_of_pillow(
    photographs: list[Image.Image], interpolation: str, crop_px: int, crop_pct: float, resize_px: int | None
) -> None:
    config = EvalConfig(crop_px, crop_pct, resize_px, interpolation)  # type: ignore[arg-type]
    mode = InterpolationMode.NEAREST if interpolation == "nearest" else MODES[interpolation]
    short_px = resize_px or int(crop_px / crop_pct)
    reference = v1.Compose([v1.Resize(short_px, interpolation=mode), v1.CenterCrop(crop_px)])
    upright, small = photographs[1].transpose(Image.Transpose.ROTATE_90), photographs[1].resize((99, 55))
    for photograph in (photographs[0], upright, small):
        image = eval_transform(config)(rgb_tensor(photograph))
        assert_form(image, crop_px)
        assert_alike(image, reference(photograph), interpolation)


@pytest.mark.parametrize("channels_last", [False, True])
def test_preprocess_normalises(channels_last: bool) -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    images = torch.randint(0, 256, (4, 3, 9, 7), dtype=torch.uint8)
    result = Preprocess(mean, std, torch.device("cpu"), channels_last)(images)
    expected = v2.functional.normalize(images.float() / 255, mean, std)
    assert result.dtype == torch.float32 and torch.allclose(result, expected, atol=1e-6)
    assert result.is_contiguous(memory_format=torch.channels_last) == channels_last
