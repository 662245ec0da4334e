"""Mixup and cutmix: when they are on, and what they draw from."""

import pytest
import torch
from torch import Tensor

from imagenet_cls.config.schema import ErasingConfig, MixConfig
from imagenet_cls.data.device import Normalize, TrainPreprocess, build_mixing
from imagenet_cls.data.loader import TrainBatch

BOTH = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}
PREPROCESS = Normalize([0.5] * 3, [0.5] * 3, torch.device("cpu"), channels_last=False)


def batch(size: int = 6) -> TrainBatch:
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=draws)
    return TrainBatch(images[:size], torch.tensor([3, 0, 1, 1, 4, 2])[:size])


def mixed(
    step: int,
    epoch: int = 0,
    rank: int = 0,
    micro_step: int = 0,
    off_epoch: int | None = None,
    size: int = 6,
    **options,
) -> tuple[Tensor, Tensor]:
    mixing = build_mixing(MixConfig(**options), 5)
    return TrainPreprocess(PREPROCESS, ErasingConfig(), mixing, 1, rank, off_epoch)(
        batch(size), epoch, step, micro_step
    )


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixing_is_a_function_of_step_rank_and_micro_batch(mode: str) -> None:
    images, targets = mixed(7, mode=mode, **BOTH)
    again_images, again_targets = mixed(7, mode=mode, **BOTH)
    assert torch.equal(images, again_images) and torch.equal(targets, again_targets)
    for other in ({"step": 8}, {"step": 7, "rank": 1}, {"step": 7, "micro_step": 1}):
        assert not torch.equal(images, mixed(**other, mode=mode, **BOTH)[0])
    assert targets.shape == (6, 5) and targets.dtype == torch.float32
    torch.testing.assert_close(targets.sum(1), torch.ones(6))


def test_mixing_from_off_epoch_changes_nothing() -> None:
    images, targets = mixed(1, epoch=3, mixup_alpha=1.0, off_epoch=3)
    assert torch.equal(images, PREPROCESS(batch().images)) and torch.equal(targets, batch().targets)
    assert mixed(1, epoch=2, mixup_alpha=1.0, off_epoch=3)[1].shape == (6, 5)


@pytest.mark.parametrize("options", [{"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixing_of_an_odd_batch_leaves_the_middle_image(mode: str, options: dict) -> None:
    """The others are paired from both ends; a single image stays."""
    originals, labels = PREPROCESS(batch().images), batch().targets
    for size in (1, 3, 5):
        images, targets = mixed(2, size=size, mode=mode, **options)
        assert images.shape == (size, 3, 8, 8) and targets.shape == (size, 5)
        middle = size // 2
        torch.testing.assert_close(images[middle], originals[middle])
        for place, target in enumerate(targets):
            others = torch.ones(5).index_fill(0, labels[[place, size - 1 - place]], 0)
            assert target @ others == 0 and target.sum() == pytest.approx(1)
            if place != middle and "mixup_alpha" in options:
                assert not torch.equal(images[place], originals[place])
