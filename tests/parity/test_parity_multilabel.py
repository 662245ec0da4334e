"""Several labels for an image: losses, mixing and results against timm, torch and scikit-learn, to
1e-6.
"""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score
from test_parity_losses import WEIGHTS, gradient
from timm.loss import AsymmetricLossMultiLabel
from torch import Tensor
from torch.nn import functional

from imagenet_cls.config.schema import LossConfig, MixConfig
from imagenet_cls.data.device import build_mixing, mix_batch
from imagenet_cls.optim.losses import build_loss, loss_problems
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.seeding import seed_generators
from imagenet_cls.tasks.label_scores import LabelOutputs, average_precision

N, CLASSES = 60, 7
DRAWS = torch.Generator().manual_seed(0)
LOGITS = torch.randn(N, CLASSES, generator=DRAWS) * 3
TARGETS = (torch.rand(N, CLASSES, generator=DRAWS) < 0.3).float()
ALONE = RankContext(RankInfo(), torch.device("cpu"))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-6, atol=1e-6, check_dtype=False
    )


def loss_of(name: str, smoothing: float = 0.0, weights: Any = None, **kwargs: Any) -> Any:
    config = LossConfig(name, smoothing, weights, kwargs=kwargs)
    assert loss_problems(config, "multi") == []
    counts = TARGETS.sum(0).long().numpy()
    return build_loss(config, CLASSES, 1, "multi", counts, N)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"gamma_neg": 4.0, "gamma_pos": 0.0, "clip": 0.05},
        {"gamma_neg": 2.0, "gamma_pos": 1.0, "clip": 0.0},
    ],
)
def test_asymmetric_loss_is_timms(kwargs: dict[str, float], smoothing: float) -> None:
    ours = loss_of("asymmetric", weights=WEIGHTS, **kwargs)
    timms = AsymmetricLossMultiLabel(**kwargs, pos_weight=torch.tensor(WEIGHTS))
    small = LOGITS / 6  # timm computes log(1 - sigmoid(x)) in float32, inexact for large x
    close(ours(small, TARGETS), timms(small, TARGETS))
    close(gradient(ours, small, TARGETS), gradient(timms, small, TARGETS))
    # timm mixes the gammas of smoothed targets, so only the targets are compared.
    without = {"gamma_neg": 0.0, "gamma_pos": 0.0, "clip": 0.0}
    smoothed = loss_of("asymmetric", smoothing, **without)
    close(
        smoothed(small, TARGETS),
        AsymmetricLossMultiLabel(**without, smoothing=smoothing)(small, TARGETS),
    )


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("clip", [0.0, 1e-8, 0.05])
def test_asymmetric_loss_has_finite_gradients_at_large_logits(gamma: float, clip: float) -> None:
    loss = loss_of("asymmetric", gamma_neg=gamma, gamma_pos=gamma, clip=clip)
    assert gradient(loss, LOGITS * 100, TARGETS).isfinite().all()
    # a positive whose probability rounds to 0 still learns
    assert gradient(loss, torch.full_like(LOGITS, -50.0), TARGETS)[TARGETS == 1].lt(0).all()


@pytest.mark.parametrize("weights", [None, WEIGHTS, "balanced"])
def test_bce_is_torchs(weights: Any) -> None:
    positives = TARGETS.sum(0)
    pos_weight = {"balanced": (N - positives) / positives}.get(str(weights))
    if isinstance(weights, list):
        pos_weight = torch.tensor(weights)
    for smoothing in (0.0, 0.2):
        expected = functional.binary_cross_entropy_with_logits(
            LOGITS, TARGETS * (1 - smoothing) + smoothing / 2, pos_weight=pos_weight
        )
        close(loss_of("bce", smoothing, weights)(LOGITS, TARGETS), expected)
    summed = loss_of("bce", weights=weights, sum_classes=True)
    close(summed(LOGITS, TARGETS), loss_of("bce", weights=weights)(LOGITS, TARGETS) * CLASSES)


def test_balanced_weight_of_a_class_without_images_is_one() -> None:
    """Likewise one that all images have."""
    counts = np.array([0, 3, 4])
    loss = build_loss(LossConfig("bce", class_weights="balanced"), 3, 1, "multi", counts, 4)
    # the weights are 1, (4 - 3) / 3 and 1
    close(loss(torch.zeros(1, 3), torch.ones(1, 3)), (1 + 1 / 3 + 1) / 3 * np.log(2))


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("options", [{"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}])
def test_rows_are_mixed_as_classes_are(options: dict[str, float], size: int, mode: Any) -> None:
    """Rows with one label give the images and targets of timm's Mixup for classes."""
    images = torch.rand(size, 3, 8, 8, generator=DRAWS)
    classes = torch.arange(size) % 5
    found = []
    for targets in (classes, functional.one_hot(classes, 5).float()):
        mixing = build_mixing(MixConfig(**options, mode=mode), 5, targets.ndim == 2)
        assert mixing is not None
        seed_generators(1)
        found.append(mix_batch(mixing, images.clone(), targets))
    (class_images, mixed_classes), (row_images, mixed_rows) = found
    assert torch.equal(class_images, row_images)
    close(mixed_rows, mixed_classes)


def scores_of(logits: Tensor, targets: Tensor, threshold: float) -> dict[str, float]:
    outputs = LabelOutputs(CLASSES)
    for batch in torch.arange(len(logits)).split(17):
        outputs.add(logits[batch], targets[batch])
    return outputs.results(threshold, ALONE)


@pytest.mark.parametrize("decimals", [0, 1, 6])  # few decimals: many equal scores
@pytest.mark.parametrize("threshold", [0.4, 0.5])
def test_results_are_those_of_scikit_learn(decimals: int, threshold: float) -> None:
    logits = (LOGITS + 0.05).round(decimals=decimals)
    result = scores_of(logits, TARGETS, threshold)
    labels = TARGETS.long()
    predicted = (logits.sigmoid() >= threshold).long()
    precisions = [
        average_precision_score(labels[:, label], logits[:, label]) for label in range(CLASSES)
    ]
    close(result["map_pct"], 100 * np.mean(precisions))
    for average in ("micro", "macro"):
        close(result[f"{average}_f1_pct"], 100 * f1_score(labels, predicted, average=average))
    close(result["loss"], functional.binary_cross_entropy_with_logits(logits, TARGETS))
    assert result["images"] == N
    found = {
        number / 100: f1_score(labels, logits.sigmoid() >= number / 100, average="micro")
        for number in range(1, 100)
    }
    highest = max(found.values())
    close(result["best_micro_f1_pct"], 100 * highest)
    equal = [value for value in found if found[value] == highest]
    assert result["best_threshold"] == equal[len(equal) // 2]


def test_class_without_positive_images_is_left_out() -> None:
    """The libraries count an average precision of 0 for it."""
    targets = TARGETS.clone()
    targets[:, 3] = 0
    others = [label for label in range(CLASSES) if label != 3]
    precisions = [average_precision_score(targets[:, k], LOGITS[:, k]) for k in others]
    close(scores_of(LOGITS, targets, 0.5)["map_pct"], 100 * np.mean(precisions))
    assert np.isnan(average_precision(LOGITS[:, 3].numpy(), targets[:, 3].numpy()))


def test_images_without_labels_count() -> None:
    targets = torch.zeros_like(TARGETS)
    result = scores_of(LOGITS, targets, 0.4)
    assert result["map_pct"] == result["micro_f1_pct"] == result["macro_f1_pct"] == 0.0
    assert result["best_threshold"] == 0.4 and result["best_micro_f1_pct"] == 0.0
    close(result["loss"], functional.binary_cross_entropy_with_logits(LOGITS, targets))
