"""One update: what it does with a good gradient, and that it does nothing with a bad one."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.engine.step import Updater, autocast, choose_precision
from imagenet_cls.errors import UsageError
from imagenet_cls.optim.build import build_optimizer
from imagenet_cls.optim.groups import parameter_groups

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adamw": {},
    "rmsprop": {"momentum": 0.9},
    "lamb": {},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(5))


def updater_for(name: str, clip_norm: float | None = None, **kwargs: Any) -> tuple[nn.Module, Updater]:
    model = network()
    model(torch.zeros(2, 3, 8, 8))
    model.to(memory_format=torch.channels_last)
    config = OptimizerConfig(name=name, lr=0.1, weight_decay=0.01, kwargs=OPTIMIZERS.get(name, {}) | kwargs)
    optimizer = build_optimizer(config, parameter_groups(model, 0.01, decay_norm_and_bias=False))
    return model, Updater(model, optimizer, clip_norm, torch.amp.GradScaler("cpu", enabled=False))


def set_gradients(model: nn.Module, number: int, bad: float | None = None) -> None:
    """Gradients that depend on `number` alone; with `bad`, one element of one of them is that."""
    source = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=source))
    if bad is not None:
        gradient = list(model.parameters())[number % 3].grad
        assert gradient is not None
        gradient[(0,) * gradient.ndim] = bad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "sgd not fused", "adamw not fused"])
def test_a_gradient_that_is_not_finite_changes_nothing(name: str, clip_norm: float | None, bad: float) -> None:
    """First of all, between two good ones, and twice in a row: against a run in which those steps never happened."""
    kwargs = {"fused": False} if name.endswith("not fused") else {}
    name = name.partition(" ")[0]
    states = []
    for with_bad_steps in (False, True):
        model, updater = updater_for(name, clip_norm, **kwargs)
        for number, is_bad in enumerate([True, False, True, True, False, True, False]):
            if is_bad and not with_bad_steps:
                continue
            set_gradients(model, number, bad if is_bad else None)
            norm, skipped = updater.update(0.1)
            assert bool(skipped) == is_bad and bool(torch.isfinite(norm)) != is_bad
            assert all(parameter.grad is None for parameter in model.parameters())
        states.append((model.state_dict(), updater.optimizer.state_dict()["state"]))
    weights, optimizer = states[0]
    assert all(torch.equal(states[1][0][key], value) for key, value in weights.items())
    assert optimizer.keys() == states[1][1].keys() and optimizer
    for index, state in optimizer.items():
        for key, value in state.items():
            torch.testing.assert_close(states[1][1][index][key], value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_the_optimizers_own_step_on_the_clipped_gradient(name: str) -> None:
    model, updater = updater_for(name, clip_norm=2.0)
    reference, _ = updater_for(name)
    optimizer = build_optimizer(
        OptimizerConfig(name=name, lr=0.1, weight_decay=0.01, kwargs=OPTIMIZERS[name]),
        parameter_groups(reference, 0.01, decay_norm_and_bias=False),
    )
    for number in range(3):
        set_gradients(model, number)
        set_gradients(reference, number)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 2.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
        optimizer.step()
        norm, skipped = updater.update(0.1 / (number + 1))
        assert not skipped and norm.item() == pytest.approx(expected.item()) and norm > 2
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, msg=key)


def test_the_norm_is_that_of_the_whole_gradient_and_small_ones_are_left_alone() -> None:
    model, updater = updater_for("sgd", clip_norm=1e6)
    plain, without = updater_for("sgd")
    set_gradients(model, 1)
    set_gradients(plain, 1)
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert updater.update(0.1)[0].item() == pytest.approx(expected, rel=1e-5)
    without.update(0.1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_the_learning_rate_reaches_every_group_scaled_where_the_group_says_so() -> None:
    model, updater = updater_for("sgd")
    updater.optimizer.param_groups[1]["lr_scale"] = 0.1
    set_gradients(model, 0)
    updater.update(0.5)
    assert [group["lr"] for group in updater.optimizer.param_groups] == [0.5, pytest.approx(0.05)]


def test_a_parameter_that_took_no_part_is_left_alone() -> None:
    model, updater = updater_for("adamw", clip_norm=1.0)
    set_gradients(model, 0)
    unused = next(model.parameters())
    unused.grad = None
    before = unused.detach().clone()
    updater.update(0.1)
    assert torch.equal(unused, before)


def test_precision_on_a_cpu() -> None:
    assert choose_precision("auto", CPU) is None and choose_precision("fp32", CPU) is None
    assert choose_precision("bf16", CPU) is torch.bfloat16
    with pytest.raises(UsageError, match="needs a GPU"):
        choose_precision("fp16", CPU)
    layer, images = nn.Linear(2, 2), torch.zeros(1, 2)
    with autocast(CPU, torch.bfloat16):
        assert layer(images).dtype is torch.bfloat16
    with autocast(CPU, None):
        assert layer(images).dtype is torch.float32
