"""User losses, class weights, the device of buffers, and checks. Every built-in loss:
tests/parity.
"""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from imagenet_cls.config.schema import DistillConfig, LossConfig
from imagenet_cls.errors import ConfigError, UserError
from imagenet_cls.optim.losses import (
    build_loss,
    build_training_loss,
    loss_problems,
    weights_by_size,
)

LOGITS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 4, 2, 2, 1, 3])


def own_dtype(weight):
    return lambda logits, targets: (
        weight * (logits.sum() if logits.dtype == torch.float32 else torch.tensor(float("nan")))
    )


def own_number():
    return 0.1


class OwnModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.ones(5))

    def forward(self, logits, targets):
        return (self.weights * logits).mean()


def test_user_loss_gets_float32_logits() -> None:
    loss = build_loss(LossConfig(name=f"{__name__}:own_dtype", kwargs={"weight": 2.0}), 5)
    assert loss(LOGITS.bfloat16(), TARGETS) == 2 * LOGITS.bfloat16().float().sum()
    bce = build_loss(
        LossConfig(
            name="timm.loss:BinaryCrossEntropy", kwargs={"smoothing": 0.0, "sum_classes": True}
        ),
        5,
    )
    one_hot = nn.functional.one_hot(TARGETS, 5).float()
    expected = nn.functional.binary_cross_entropy_with_logits(LOGITS, one_hot, reduction="none")
    torch.testing.assert_close(bce(LOGITS, TARGETS), expected.sum(1).mean())
    with pytest.raises(UserError):
        build_loss(LossConfig(name=f"{__name__}:own_number"), 5)
    losses = build_loss(
        LossConfig(name="torch.nn:CrossEntropyLoss", kwargs={"reduction": "none"}), 5
    )
    with pytest.raises(UserError, match=r"loss\.name"):
        losses(LOGITS, TARGETS)


@pytest.mark.parametrize(
    "loss", [LossConfig(class_weights=[1.0] * 5), LossConfig(f"{__name__}:OwnModule")]
)
def test_buffers_move_to_the_device_of_the_logits(loss: LossConfig) -> None:
    mean_loss = build_loss(loss, 5, device="meta")
    assert mean_loss(LOGITS.to("meta"), TARGETS.to("meta")).device.type == "meta"


@pytest.mark.parametrize(("kind", "beta"), [("balanced", None), ("effective", 0.99)])
def test_weights_by_class_size_have_mean_1_over_the_samples(kind: str, beta: float | None) -> None:
    counts = np.array([90, 0, 9, 1])
    weights = weights_by_size(counts, beta).numpy()
    assert weights[1] == 1  # a class without images
    np.testing.assert_allclose((weights * counts).sum(), 100, rtol=1e-6)
    expected = [9 / n if beta is None else (1 - beta**9) / (1 - beta**n) for n in (90, 9, 1)]
    np.testing.assert_allclose(weights[[0, 2, 3]] / weights[2], expected, rtol=1e-6)
    config = LossConfig(class_weights=kind, effective_beta=0.99)
    found = build_loss(config, 4, class_samples=counts)(torch.eye(4), torch.arange(4))
    plain = torch.nn.functional.cross_entropy(torch.eye(4), torch.arange(4), reduction="none")
    torch.testing.assert_close(found, (plain * torch.from_numpy(weights)).mean())


@pytest.mark.parametrize("name", ["bce", "cross_entropy", "focal"])
def test_class_weights_of_mixed_targets_are_not_rounded_under_autocast(name: str) -> None:
    draws = torch.Generator().manual_seed(0)
    logits, targets = (
        torch.randn(7, 5, generator=draws),
        torch.rand(7, 5, generator=draws).softmax(1),
    )
    loss = build_loss(LossConfig(name, class_weights=[1.3079, 0.7, 0.9, 1.1, 1.01]), 5)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = loss(logits, targets)
    torch.testing.assert_close(under_autocast, loss(logits, targets), rtol=1e-6, atol=0.0)


def test_model_that_returns_two_outputs_is_an_error_without_a_teacher() -> None:
    training_loss = build_training_loss(build_loss(LossConfig(), 3), DistillConfig())
    logits = torch.zeros(2, 3)
    with pytest.raises(UserError, match=r"^model\.name: .* returns a tuple"):
        training_loss((logits, logits), torch.tensor([0, 1]), torch.zeros(2, 3, 4, 4))


def test_auxiliary_outputs_are_no_distillation_token() -> None:
    """As torchvision's Inception (a named tuple of two) and GoogLeNet (of three) return them."""
    Two = namedtuple("Two", ["logits", "aux_logits"])
    training_loss = build_training_loss(
        build_loss(LossConfig(), 3), DistillConfig("soft"), lambda images: torch.zeros(2, 3)
    )
    logits = torch.zeros(2, 3)
    for outputs in (Two(logits, logits), (logits, logits, logits)):
        with pytest.raises(UserError, match="aux_logits"):
            training_loss(outputs, torch.tensor([0, 1]), torch.zeros(2, 3, 4, 4))


def test_wrong_number_of_class_weights_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^loss\.class_weights: "):
        build_loss(LossConfig(class_weights=[1.0, 2.0, 3.0]), 5)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"name": f"{__name__}:own_dtype", "kwargs": {"weight": 1}}, []),
        ({"name": "cross_entrop"}, ["loss.name"]),
        ({"name": f"{__name__}:own_not"}, ["loss.name"]),
        (
            {"name": f"{__name__}:own_dtype", "kwargs": {"weigth": 1}},
            ["loss.kwargs.weigth", "loss.kwargs"],
        ),
        ({"name": f"{__name__}:own_number", "label_smoothing": 0.1}, ["loss.label_smoothing"]),
        ({"name": f"{__name__}:own_number", "class_weights": [1.0]}, ["loss.class_weights"]),
        ({"kwargs": {"label_smoothing": 0.1}}, ["loss.kwargs.label_smoothing"]),
        ({"kwargs": {"gamma": 2}}, ["loss.kwargs.gamma"]),
        ({"name": "focal", "kwargs": {"alpha": 0.25}}, ["loss.kwargs.alpha"]),
        ({"name": "bce", "kwargs": {"target_threshold": 1.0}}, ["loss.kwargs.target_threshold"]),
        ({"name": "bce", "kwargs": {"sum_classes": 1}}, ["loss.kwargs.sum_classes"]),
        ({"name": "jsd", "kwargs": {"alpha": -1}}, ["loss.kwargs.alpha"]),
        ({"name": "jsd", "class_weights": [1.0, 2.0]}, ["loss.class_weights"]),
        ({"class_weights": [0.0, 0.0]}, ["loss.class_weights"]),
        ({"name": "focal", "kwargs": {"gamma": -1}}, ["loss.kwargs.gamma"]),
    ],
)
def test_problems_have_the_key(options: dict, keys: list[str]) -> None:
    assert [problem.key for problem in loss_problems(LossConfig(**options))] == keys
