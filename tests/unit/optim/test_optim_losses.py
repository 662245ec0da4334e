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


def own_result(result):
    return lambda logits, targets: result


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


def test_user_loss_that_returns_no_number_is_an_error() -> None:
    with pytest.raises(UserError):
        build_loss(LossConfig(name=f"{__name__}:own_number"), 5)
    config = LossConfig(name="torch.nn:CrossEntropyLoss", kwargs={"reduction": "none"})
    with pytest.raises(UserError, match=r"loss\.name"):
        build_loss(config, 5)(LOGITS, TARGETS)


@pytest.mark.parametrize("result", [None, 0.5, [LOGITS.mean()], LOGITS[:1, 0], LOGITS.mean()])
def test_user_loss_without_a_scalar_that_has_a_gradient_is_an_error(result: object) -> None:
    config = LossConfig(f"{__name__}:own_result", kwargs={"result": result})
    with pytest.raises(ConfigError, match=r"^loss\.name: "):
        build_loss(config, 5)(LOGITS.clone().requires_grad_(), TARGETS)


@pytest.mark.parametrize(
    "loss", [LossConfig(class_weights=[1.0] * 5), LossConfig(f"{__name__}:OwnModule")]
)
def test_buffers_move_to_the_device_of_the_logits(loss: LossConfig) -> None:
    mean_loss = build_loss(loss, 5, device="meta")
    assert mean_loss(LOGITS.to("meta"), TARGETS.to("meta")).device.type == "meta"


@pytest.mark.parametrize(("kind", "beta"), [("balanced", None), ("effective", 0.99)])
def test_weights_by_class_size_have_mean_1_over_the_samples(kind: str, beta: float | None) -> None:
    counts = np.array([90, 0, 9, 1])
    weights = weights_by_size(counts, beta)
    assert weights[1] == 1  # a class without images
    assert (weights * torch.from_numpy(counts)).sum() == pytest.approx(100)
    expected = [9 / n if beta is None else (1 - beta**9) / (1 - beta**n) for n in (90, 9, 1)]
    assert (weights[[0, 2, 3]] / weights[2]).tolist() == pytest.approx(expected)
    config = LossConfig(class_weights=kind, effective_beta=0.99)
    logits, targets = torch.eye(4), torch.arange(4)
    found = build_loss(config, 4, class_samples=counts)(logits, targets)
    plain = nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(found, (plain * weights).mean())


@pytest.mark.parametrize("name", ["bce", "cross_entropy"])
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


Two = namedtuple("Two", ["logits", "aux_logits"])


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        (None, (LOGITS, LOGITS)),  # without a teacher
        # auxiliary outputs, as of torchvision's Inception and GoogLeNet, are no distillation token
        ("soft", Two(LOGITS, LOGITS)),
        ("soft", (LOGITS, LOGITS, LOGITS)),
    ],
)
def test_outputs_that_are_not_logits_are_an_error(kind: str | None, outputs: tuple) -> None:
    distill = DistillConfig(kind) if kind else DistillConfig()
    training_loss = build_training_loss(build_loss(LossConfig(), 5), distill, lambda images: LOGITS)
    with pytest.raises(UserError, match=r"^model\.name: "):
        training_loss(outputs, TARGETS, torch.zeros(6, 3, 4, 4))


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"name": f"{__name__}:own_dtype", "kwargs": {"weight": 1}}, []),
        (
            {"name": f"{__name__}:own_dtype", "kwargs": {"weigth": 1}},
            ["loss.kwargs.weigth", "loss.kwargs"],
        ),
        ({"name": f"{__name__}:own_number", "label_smoothing": 0.1}, ["loss.label_smoothing"]),
        ({"name": f"{__name__}:own_number", "class_weights": [1.0]}, ["loss.class_weights"]),
        ({"kwargs": {"label_smoothing": 0.1}}, ["loss.kwargs.label_smoothing"]),
        ({"name": "focal", "kwargs": {"alpha": 0.25}}, ["loss.kwargs.alpha"]),
        ({"name": "bce", "kwargs": {"sum_classes": 1}}, ["loss.kwargs.sum_classes"]),
        ({"name": "asymmetric"}, ["loss.name"]),  # which is for data.labels multi
        ({"name": "focal", "kwargs": {"gamma": -1}}, ["loss.kwargs.gamma"]),
    ],
)
def test_problems_have_the_key(options: dict, keys: list[str]) -> None:
    assert [problem.key for problem in loss_problems(LossConfig(**options))] == keys
