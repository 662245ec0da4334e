"""Mixup and cutmix against timm's for the same draws."""

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from torch import Tensor

from imagenet_cls.config.schema import MixConfig
from imagenet_cls.data.device import build_mixing
from imagenet_cls.seeding import seed_generators

CLASSES = 8
SETTINGS = {
    "mixup": {"mixup_alpha": 0.2},
    "cutmix": {"cutmix_alpha": 1.0},
    "both": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "switch_prob": 0.3, "prob": 0.8},
}


def mix(options: dict, images: Tensor, targets: Tensor, key: int) -> tuple[Tensor, Tensor]:
    mixing = build_mixing(MixConfig(**options), CLASSES)
    assert mixing is not None
    seed_generators(key)
    return mixing(images.clone(), targets)


def timms(options: dict, images: Tensor, targets: Tensor, key: int) -> tuple[Tensor, Tensor]:
    defaults = {"mixup_alpha": 0.0}
    mixup = Mixup(**(defaults | options), label_smoothing=0.0, num_classes=CLASSES)
    np.random.seed(key)
    return mixup(images.clone(), targets)


def random_batch(key: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(key)
    return torch.randn(6, 3, 16, 12, generator=draws), torch.randint(CLASSES, (6,), generator=draws)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_images_and_targets_equal_timms(setting: str, mode: str) -> None:
    options = SETTINGS[setting] | {"mode": mode}
    for key in range(20):
        for ours, reference in zip(
            mix(options, *random_batch(key), key),
            timms(options, *random_batch(key), key),
            strict=True,
        ):
            torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6)
