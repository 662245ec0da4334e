"""Losses by hand: the mean over the batch, in float32, for class indices and for mixed targets."""

import pytest
import torch
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from imagenet_cls.config.schema import LossConfig
from imagenet_cls.errors import UserError
from imagenet_cls.optim.losses import build_loss, check_loss

LOGITS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 4, 2, 2, 1, 3])


def test_mean_of_minus_log_probability() -> None:
    expected = -torch.stack([LOGITS[i].log_softmax(0)[t] for i, t in enumerate(TARGETS)]).mean()
    torch.testing.assert_close(build_loss(LossConfig())(LOGITS, TARGETS), expected)


def test_label_smoothing_equals_timms() -> None:
    loss = build_loss(LossConfig(label_smoothing=0.1))
    torch.testing.assert_close(loss(LOGITS, TARGETS), LabelSmoothingCrossEntropy(0.1)(LOGITS, TARGETS))


def test_mixed_targets_equal_timms() -> None:
    soft = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).softmax(1)
    torch.testing.assert_close(build_loss(LossConfig())(LOGITS, soft), SoftTargetCrossEntropy()(LOGITS, soft))
    smoothed = build_loss(LossConfig(label_smoothing=0.1))(LOGITS, soft)
    torch.testing.assert_close(smoothed, SoftTargetCrossEntropy()(LOGITS, 0.9 * soft + 0.1 / 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_computed_in_float32_whatever_the_model_gives(dtype: torch.dtype) -> None:
    loss = build_loss(LossConfig())(LOGITS.to(dtype), TARGETS)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, build_loss(LossConfig())(LOGITS.to(dtype).float(), TARGETS), rtol=0, atol=0)


def own_dtype(weight):
    return lambda logits, targets: (
        weight * (logits.sum() if logits.dtype == torch.float32 else torch.tensor(float("nan")))
    )


def own_number():
    return 0.1


def test_own_factories() -> None:
    loss = build_loss(LossConfig(name=f"{__name__}:own_dtype", kwargs={"weight": 2.0}))
    assert loss(LOGITS.bfloat16(), TARGETS) == 2 * LOGITS.bfloat16().float().sum()
    bce = build_loss(LossConfig(name="timm.loss:BinaryCrossEntropy", kwargs={"smoothing": 0.0, "sum_classes": True}))
    expected = nn.functional.binary_cross_entropy_with_logits(
        LOGITS, nn.functional.one_hot(TARGETS, 5).float(), reduction="none"
    )
    torch.testing.assert_close(bce(LOGITS, TARGETS), expected.sum(1).mean())
    with pytest.raises(UserError, match="returned float"):
        build_loss(LossConfig(name=f"{__name__}:own_number"))


def keys(**options) -> list[str]:
    return [problem.key for problem in check_loss(LossConfig(**options))]


def test_checks() -> None:
    assert keys() == keys(label_smoothing=0.1) == keys(name=f"{__name__}:own_dtype", kwargs={"weight": 1}) == []
    assert "'cross_entropy'" in check_loss(LossConfig(name="cross_entrop"))[0].message
    assert keys(name="cross_entrop") == keys(name=f"{__name__}:own_not") == ["loss.name"]
    assert keys(kwargs={"label_smoothing": 0.1}) == ["loss.kwargs.label_smoothing"]
    assert keys(name=f"{__name__}:own_dtype") == ["loss.kwargs"]
    assert keys(name=f"{__name__}:own_dtype", kwargs={"weigth": 1}) == ["loss.kwargs.weigth", "loss.kwargs"]
    assert keys(name=f"{__name__}:own_number", label_smoothing=0.1) == ["loss.label_smoothing"]
