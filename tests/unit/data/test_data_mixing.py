"""Mixup and cutmix: when they are on, and what they draw from."""

import pytest
import torch
from torch import Tensor

from imagenet_cls.config.schema import MixConfig
from imagenet_cls.data.device import build_mixing, mixing_problems
from imagenet_cls.seeding import seed_generators

TARGETS = torch.tensor([3, 0, 1, 1, 4, 2])
BOTH = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}


def noise() -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def mixed(key: int, epoch: int = 0, **options) -> tuple[Tensor, Tensor]:
    mixing = build_mixing(MixConfig(**options), 5)
    assert mixing is not None
    seed_generators(key)
    return mixing(noise(), TARGETS, epoch)


def test_build_mixing_without_alphas_is_none() -> None:
    assert build_mixing(MixConfig(), 5) is None
    for options in ({"mixup_alpha": 0.1}, {"cutmix_alpha": 1.0}, {"cutmix_minmax": [0.2, 0.8]}):
        assert build_mixing(MixConfig(**options), 5) is not None


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixing_is_a_function_of_its_key(mode: str) -> None:
    images, targets = mixed(7, mode=mode, **BOTH)
    again_images, again_targets = mixed(7, mode=mode, **BOTH)
    assert torch.equal(images, again_images) and torch.equal(targets, again_targets)
    assert not torch.equal(images, mixed(8, mode=mode, **BOTH)[0])
    assert targets.shape == (6, 5) and targets.dtype == torch.float32
    torch.testing.assert_close(targets.sum(1), torch.ones(6))


def test_mixing_from_off_epoch_returns_its_arguments() -> None:
    mixing = build_mixing(MixConfig(mixup_alpha=1.0, off_epoch=3), 5)
    assert mixing is not None
    for epoch in (3, 4):
        images = noise()
        after = mixing(images, TARGETS, epoch)
        assert after[0] is images and after[1] is TARGETS
        assert torch.equal(images, noise())
    assert mixed(1, epoch=2, mixup_alpha=1.0, off_epoch=3)[1].shape == (6, 5)


def test_mixing_with_prob_0_returns_one_hot_targets() -> None:
    images, targets = mixed(1, mixup_alpha=1.0, prob=0.0)
    assert torch.equal(images, noise())
    assert torch.equal(targets, torch.eye(5)[TARGETS])


def test_mixing_problems_of_odd_micro_batches() -> None:
    on = MixConfig(**BOTH)
    assert mixing_problems(on, 6) == mixing_problems(MixConfig(), 7) == []
    (problem,) = mixing_problems(on, 7, global_batch=28)
    assert problem.key == "train.global_batch_size" and "24 or 32" in problem.message
    assert "use 4" in mixing_problems(on, 1, global_batch=2)[0].message
    assert mixing_problems(MixConfig(cutmix_minmax=[0.2, 0.8]), 7) != []
