"""Mixup and cutmix against timm's for the same draws, and against what the papers say of the distributions."""

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data.mixup import Mixup
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor
from torchvision.transforms import v2

from imagenet_cls.config.schema import LossConfig, MixConfig
from imagenet_cls.data.device import build_mixing
from imagenet_cls.optim.losses import build_loss
from imagenet_cls.seeding import hash_key, seed_generators

CLASSES = 8
SETTINGS = {
    "mixup": {"mixup_alpha": 0.2},
    "cutmix": {"cutmix_alpha": 1.0},
    "both": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "switch_prob": 0.3, "prob": 0.8},
    "sides": {"mixup_alpha": 0.2, "cutmix_minmax": [0.2, 0.9]},
}


def mix(options: dict, images: Tensor, targets: Tensor, key: int) -> tuple[Tensor, Tensor]:
    mixing = build_mixing(MixConfig(**options), CLASSES)
    assert mixing is not None
    seed_generators(key)
    return mixing(images.clone(), targets, 0)


def timms(options: dict, images: Tensor, targets: Tensor, key: int, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    defaults = {"mixup_alpha": 0.0}
    mixup = Mixup(**(defaults | options), label_smoothing=smoothing, num_classes=CLASSES)
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
            mix(options, *random_batch(key), key), timms(options, *random_batch(key), key), strict=True
        ):
            torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_targets_match_the_mixed_images(setting: str, mode: str) -> None:
    """Image i is of class i and of colour i throughout, so the mean of what comes out must be that of its targets; and
    whatever is in it comes from image i and its partner."""
    values = torch.arange(CLASSES, dtype=torch.float64)
    images = values.view(-1, 1, 1, 1).expand(-1, 3, 16, 12).contiguous()
    own = torch.eye(CLASSES, dtype=torch.bool)
    own_or_partners = own | own.flip(0)
    changed = 0
    for key in range(20):
        mixed, targets = mix(SETTINGS[setting] | {"mode": mode}, images, torch.arange(CLASSES), key)
        torch.testing.assert_close(mixed.mean((1, 2, 3)), targets.double() @ values, rtol=1e-6, atol=1e-6)
        assert (targets[~own_or_partners] == 0).all()
        changed += not torch.equal(mixed, images)
    assert changed > 5


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_smoothing_in_the_loss_equals_timms_mixup(smoothing: float) -> None:
    logits = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(1)) * 3
    options = SETTINGS["both"]
    references = {
        "cross_entropy": (SoftTargetCrossEntropy(), {}),
        "bce": (BinaryCrossEntropy(target_threshold=0.2), {"target_threshold": 0.2}),
    }
    for key in range(10):
        _, soft = mix(options, *random_batch(key), key)
        _, smoothed = timms(options, *random_batch(key), key, smoothing)
        for name, (reference, kwargs) in references.items():
            loss = build_loss(LossConfig(name, smoothing, kwargs=kwargs), CLASSES)
            torch.testing.assert_close(loss(logits, soft), reference(logits, smoothed), rtol=1e-6, atol=1e-6)


def kinds(options: dict, num_draws: int) -> dict[str, int]:
    """How often nothing, mixup and cutmix came out. Image 0 is black, image 1 is white: grey means mixup."""
    counts = {"none": 0, "mixup": 0, "cutmix": 0}
    images = torch.stack([torch.zeros(3, 32, 32), torch.ones(3, 32, 32)])
    for draw in range(num_draws):
        mixed, targets = mix(options, images, torch.tensor([0, 1]), hash_key("draw", draw))
        grey = ((mixed > 0) & (mixed < 1)).any()
        counts["mixup" if grey else "none" if targets[0, 0] == 1 else "cutmix"] += 1
    return counts


def test_probabilities_of_mixup_and_cutmix() -> None:
    """Within four standard deviations of prob and switch_prob; the keys are fixed, so this always ends alike."""
    num_draws, prob, switch_prob = 2000, 0.8, 0.3
    # Beta(5, 5) cuts a rectangle that is hardly ever nothing or everything.
    counts = kinds({"mixup_alpha": 5.0, "cutmix_alpha": 5.0, "prob": prob, "switch_prob": switch_prob}, num_draws)
    for kind, share in (
        ("none", 1 - prob),
        ("cutmix", prob * switch_prob),
        ("mixup", prob * (1 - switch_prob)),
    ):
        assert abs(counts[kind] - num_draws * share) < 4 * (num_draws * share * (1 - share)) ** 0.5, counts


def shares(options: dict, num_draws: int) -> list[float]:
    """What image 0 keeps of itself, batch by batch."""
    images, targets = torch.zeros(2, 1, 64, 64), torch.tensor([0, 1])
    return [float(mix(options, images, targets, hash_key("share", n))[1][0, 0]) for n in range(num_draws)]


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_share_has_a_beta_distribution(alpha: float) -> None:
    found = shares({"mixup_alpha": alpha}, 1000)
    assert stats.kstest(found, stats.beta(alpha, alpha).cdf).pvalue > 0.01
    assert stats.kstest(found, stats.beta(2 * alpha, 2 * alpha).cdf).pvalue < 0.01  # else this could not fail


def test_cutmix_share_has_the_distribution_of_torchvisions() -> None:
    """Both cut the rectangle at the border and correct the share; torchvision draws even sides only, hence 64 px."""
    cutmix, found = v2.CutMix(alpha=1.0, num_classes=2), []
    torch.manual_seed(0)
    for _ in range(1000):
        found.append(float(cutmix(torch.zeros(2, 1, 64, 64), torch.tensor([0, 1]))[1][0, 0]))
    assert stats.ks_2samp(shares({"cutmix_alpha": 1.0}, 1000), found).pvalue > 0.01
    assert stats.ks_2samp(shares({"cutmix_alpha": 0.2}, 1000), found).pvalue < 0.01
