"""One update: what it does with a good gradient, and that it does nothing with a bad one."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from imagenet_cls.config.schema import OptimizerConfig, TrainConfig
from imagenet_cls.engine.precision import autocast, choose_precision
from imagenet_cls.engine.step import Updater, gradient_norm
from imagenet_cls.errors import UsageError
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.optimizers import build_optimizer

CPU = torch.device("cpu")
HEAD = ["3.weight", "3.bias"]  # of `network`
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adamw": {},
    "rmsprop": {"momentum": 0.9},
    "lamb": {},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(5))


def optimizer_for(model: nn.Module, name: str, **kwargs: Any) -> torch.optim.Optimizer:
    config = OptimizerConfig(
        name=name,
        lr=0.1,
        weight_decay=0.01,
        norm_weight_decay=0.0,
        bias_weight_decay=0.0,
        kwargs=OPTIMIZERS.get(name, {}) | kwargs,
    )
    return build_optimizer(config, parameter_groups(model, config))


def updater_for(
    name: str, clip: dict[str, float] | None = None, **kwargs: Any
) -> tuple[nn.Module, Updater]:
    """clip: what a config says of clipping. The head is the last layer."""
    model = network()
    model(torch.zeros(2, 3, 8, 8))
    model.to(memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = optimizer_for(model, name, **kwargs)
    return model, Updater(model, optimizer, TrainConfig(**(clip or {})), scaler, head_names=HEAD)


def set_gradients(model: nn.Module, number: int, bad: float | None = None) -> None:
    """Gradients that depend on `number` alone; with `bad`, one element of one of them is that."""
    source = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).copy_(
            torch.randn(parameter.shape, generator=source)
        )
    if bad is not None:
        gradient = list(model.parameters())[number % 3].grad
        gradient[(0,) * gradient.ndim] = bad


# 1e30 is finite, but the norm with it overflows.
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize(
    "clip", [{}, {"clip_norm": 1.0}, {"clip_value": 0.1}, {"clip_agc": 0.01}], ids=str
)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "sgd not fused", "adamw not fused"])
def test_a_gradient_that_is_not_finite_changes_nothing(
    name: str, clip: dict[str, float], bad: float
) -> None:
    """First of all, between two good ones, and twice in a row: against a run in which those steps
    never happened.
    """
    kwargs = {"fused": False} if name.endswith("not fused") else {}
    name = name.partition(" ")[0]
    states = []
    for with_bad_steps in (False, True):
        model, updater = updater_for(name, clip, **kwargs)
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


@pytest.mark.parametrize(
    "dtypes", [[torch.float32], [torch.bfloat16], [torch.float32, torch.bfloat16], []]
)
def test_gradient_norm_has_the_bits_of_torchs(dtypes: list[torch.dtype]) -> None:
    """Of many sizes, with parameters that have no gradient."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(3))]
    for size in (1, 7, 64, 1000, 4097):
        for dtype in dtypes:
            parameters.append(nn.Parameter(torch.zeros(size, dtype=dtype)))
            parameters[-1].grad = torch.randn(size, generator=generator).to(dtype)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    found, expected = gradient_norm(parameters), nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_update_with_a_loss_scale_skips_what_the_scaler_found_and_lowers_the_scale() -> None:
    model, updater = updater_for("sgd")
    updater.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    expected, reference = updater_for("sgd")
    scaler.scale(torch.zeros(()))  # creates the scale
    for number, is_bad in enumerate([False, True, False]):
        set_gradients(model, number, math.inf if is_bad else None)
        for parameter in model.parameters():
            parameter.grad.mul_(scaler.get_scale())
        _, skipped = updater.update(0.1)
        assert bool(skipped) == is_bad
        if not is_bad:
            set_gradients(expected, number)
            reference.update(0.1)
    assert scaler.get_scale() == 2.0
    assert all(
        torch.equal(model.state_dict()[key], value) for key, value in expected.state_dict().items()
    )


def clip_by_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)


def clip_by_value(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.clamp_(-0.3, 0.3)


def clip_by_unit(model: nn.Module) -> None:
    """Equation 3 of Brock et al. 2021, row by row, but for the last layer."""
    for parameter in list(model.parameters())[:-2]:
        rows = (
            zip(parameter.detach(), parameter.grad, strict=True)
            if parameter.ndim > 1
            else [(parameter, parameter.grad)]
        )
        for weights, gradient in rows:
            largest = 0.05 * max(float(weights.detach().norm()), 1e-3)
            gradient.mul_(min(1.0, largest / float(gradient.norm())))


CLIPPING = {
    "norm": ({"clip_norm": 2.0}, clip_by_norm),
    "value": ({"clip_value": 0.3}, clip_by_value),
    "agc": ({"clip_agc": 0.05}, clip_by_unit),
}


@pytest.mark.parametrize("manner", CLIPPING)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_the_optimizers_own_step_on_the_clipped_gradient(
    name: str, manner: str
) -> None:
    clip, clip_reference = CLIPPING[manner]
    model, updater = updater_for(name, clip)
    reference, _ = updater_for(name)
    optimizer = optimizer_for(reference, name)
    for number in range(3):
        set_gradients(model, number)
        set_gradients(reference, number)
        expected = torch.stack([p.grad.norm() for p in reference.parameters()]).norm().item()
        clip_reference(reference)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
        optimizer.step()
        norm, skipped = updater.update(0.1 / (number + 1))
        assert not skipped and norm.item() == pytest.approx(expected) and norm > 2
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, msg=key)


@pytest.mark.parametrize(
    "name", ["sgd", "adamw", "rmsprop", "lamb", "timm:lookahead_adamw", "timm:lion", "timm:muon"]
)
def test_learning_rate_reaches_every_group(name: str) -> None:
    """Multiplied by `lr_scale`."""
    model, updater = updater_for(name)
    groups = updater.optimizer.param_groups
    groups[1]["lr_scale"] = 0.1
    set_gradients(model, 0)
    updater.update(0.5)
    assert [group["lr"] for group in groups] == [0.5, pytest.approx(0.05)]


def test_precision_on_a_cpu() -> None:
    assert choose_precision(TrainConfig(), CPU) is None
    assert choose_precision(TrainConfig(precision="bf16"), CPU) is torch.bfloat16
    with pytest.raises(UsageError):
        choose_precision(TrainConfig(precision="fp16"), CPU)
    layer, images = nn.Linear(2, 2), torch.zeros(1, 2)
    with autocast(CPU, torch.bfloat16):
        assert layer(images).dtype is torch.bfloat16
    with autocast(CPU, None):
        assert layer(images).dtype is torch.float32


@pytest.mark.parametrize(
    ("capability", "sam_rho", "expected"),
    [
        ((8, 0), 0.05, torch.bfloat16),
        ((7, 0), None, torch.float16),
        ((7, 5), 0.05, None),  # as a T4
        ((6, 1), None, None),
    ],
)
def test_automatic_precision_is_one_that_the_gpu_does_not_emulate(
    capability: tuple[int, int],
    sam_rho: float | None,
    expected: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    # As torch, which makes a tensor in bf16 to find out whether it can be emulated.
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda *_: True)
    assert choose_precision(TrainConfig(sam_rho=sam_rho), torch.device("cuda", 0)) is expected
    bf16 = TrainConfig(precision="bf16")
    if capability >= (8, 0):
        assert choose_precision(bf16, torch.device("cuda", 0)) is torch.bfloat16
    else:
        with pytest.raises(UsageError, match="auto"):
            choose_precision(bf16, torch.device("cuda", 0))
