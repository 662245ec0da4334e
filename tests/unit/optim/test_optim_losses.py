"""Losses by hand: the mean over the batch, in float32, for class indices and for mixed targets; checks.

Every loss against independent references: tests/parity/test_parity_losses.py.
"""

import pytest
import torch
from torch import nn

from imagenet_cls.config.schema import LossConfig
from imagenet_cls.errors import ConfigError, UserError
from imagenet_cls.optim.losses import build_loss, loss_problems

LOGITS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 4, 2, 2, 1, 3])


def test_cross_entropy_by_hand() -> None:
    expected = -torch.stack([LOGITS[i].log_softmax(0)[t] for i, t in enumerate(TARGETS)]).mean()
    torch.testing.assert_close(build_loss(LossConfig(), 5)(LOGITS, TARGETS), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loss_is_computed_in_float32(dtype: torch.dtype) -> None:
    loss = build_loss(LossConfig(), 5)(LOGITS.to(dtype), TARGETS)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, build_loss(LossConfig(), 5)(LOGITS.to(dtype).float(), TARGETS), rtol=0, atol=0)


def own_dtype(weight):
    return lambda logits, targets: (
        weight * (logits.sum() if logits.dtype == torch.float32 else torch.tensor(float("nan")))
    )


def own_number():
    return 0.1


def test_own_factories() -> None:
    loss = build_loss(LossConfig(name=f"{__name__}:own_dtype", kwargs={"weight": 2.0}), 5)
    assert loss(LOGITS.bfloat16(), TARGETS) == 2 * LOGITS.bfloat16().float().sum()
    bce = build_loss(LossConfig(name="timm.loss:BinaryCrossEntropy", kwargs={"smoothing": 0.0, "sum_classes": True}), 5)
    expected = nn.functional.binary_cross_entropy_with_logits(
        LOGITS, nn.functional.one_hot(TARGETS, 5).float(), reduction="none"
    )
    torch.testing.assert_close(bce(LOGITS, TARGETS), expected.sum(1).mean())
    with pytest.raises(UserError, match="returned float"):
        build_loss(LossConfig(name=f"{__name__}:own_number"), 5)


class OwnModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.ones(5))

    def forward(self, logits, targets):
        assert self.weights.device == logits.device
        return (self.weights * logits).mean()


def test_class_weights_are_moved_to_the_device_of_the_logits() -> None:
    """Buffers of a user's module too."""
    weighted = LossConfig(class_weights=[1.0, 2.0, 3.0, 4.0, 5.0])
    for loss in (weighted, LossConfig(name=f"{__name__}:OwnModule")):
        assert build_loss(loss, 5)(LOGITS.to("meta"), TARGETS.to("meta")).device.type == "meta"


def test_class_weights_by_hand() -> None:
    weights = [1.0, 0.0, 4.0, 2.0, 3.0]  # 2 on average
    loss = build_loss(LossConfig(class_weights=weights), 5)
    expected = torch.stack([-LOGITS[i].log_softmax(0)[t] * weights[t] / 2 for i, t in enumerate(TARGETS)]).mean()
    torch.testing.assert_close(loss(LOGITS, TARGETS), expected)


def test_wrong_number_of_class_weights_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"loss\.class_weights: 3 numbers, but there are 5 classes"):
        build_loss(LossConfig(class_weights=[1.0, 2.0, 3.0]), 5)


def keys(**options) -> list[str]:
    return [problem.key for problem in loss_problems(LossConfig(**options))]


def test_loss_problems() -> None:
    assert keys() == keys(label_smoothing=0.1) == keys(name=f"{__name__}:own_dtype", kwargs={"weight": 1}) == []
    assert "'cross_entropy'" in loss_problems(LossConfig(name="cross_entrop"))[0].message
    assert keys(name="cross_entrop") == keys(name=f"{__name__}:own_not") == ["loss.name"]
    assert keys(kwargs={"label_smoothing": 0.1}) == ["loss.kwargs.label_smoothing"]
    assert keys(name=f"{__name__}:own_dtype") == ["loss.kwargs"]
    assert keys(name=f"{__name__}:own_dtype", kwargs={"weigth": 1}) == ["loss.kwargs.weigth", "loss.kwargs"]
    assert keys(name=f"{__name__}:own_number", label_smoothing=0.1) == ["loss.label_smoothing"]


def message(**options) -> str:
    (problem,) = loss_problems(LossConfig(**options))
    return problem.message


def test_problems_of_built_in_losses() -> None:
    good = [
        {"name": "bce", "kwargs": {"target_threshold": 0.2, "sum_classes": True}, "class_weights": [0.0, 1.0]},
        {"name": "bce", "kwargs": {"target_threshold": None}},
        {"name": "focal", "kwargs": {"gamma": 0}, "class_weights": [1.0, 2.0]},
        {"name": "jsd", "kwargs": {"alpha": 12}, "label_smoothing": 0.1},
    ]
    assert [keys(**options) for options in good] == [[]] * len(good)
    assert "did you mean 'target_threshold'" in message(name="bce", kwargs={"target_treshold": 0.2})
    assert "allowed: gamma" in message(name="focal", kwargs={"alpha": 0.25})
    assert "allowed: none" in message(kwargs={"gamma": 2})
    assert "use the key loss.class_weights" in message(kwargs={"class_weights": [1.0]})
    assert "less than 1" in message(name="bce", kwargs={"target_threshold": 1.0})
    assert "true or false" in message(name="bce", kwargs={"sum_classes": 1})
    for value in (-1, "two", True, float("nan"), None, [2.0]):
        assert keys(name="focal", kwargs={"gamma": value}) == ["loss.kwargs.gamma"], value
    assert keys(name="jsd", kwargs={"alpha": -1}) == ["loss.kwargs.alpha"]
    assert "jsd" in message(name="jsd", class_weights=[1.0, 2.0])
    assert "all 0" in message(class_weights=[0.0, 0.0])
    assert keys(name=f"{__name__}:own_number", class_weights=[1.0]) == ["loss.class_weights"]
