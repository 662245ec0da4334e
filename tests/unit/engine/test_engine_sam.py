"""Sharpness-aware minimization against its formula, and what it must leave unchanged."""

import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from imagenet_cls.config.schema import OptimizerConfig, TrainConfig
from imagenet_cls.engine.step import Sam, Updater
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.optimizers import build_optimizer

RHO, LR = 0.5, 0.1


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4) if norm else nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 16, 5),
    ]
    return nn.Sequential(*layers).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    images = torch.randn(8, 3, 6, 6, generator=draws, dtype=torch.float64)
    return images, torch.randint(0, 5, (8,), generator=draws)


def sam_and_updater(model: nn.Module) -> tuple[Sam, Updater]:
    config = OptimizerConfig(
        lr=LR, weight_decay=0.01, bias_weight_decay=0.0, kwargs={"momentum": 0.9}
    )
    optimizer = build_optimizer(config, parameter_groups(model, config))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Sam(model, optimizer, RHO), Updater(model, optimizer, TrainConfig(), scaler)


def backward(model: nn.Module, images: Tensor, targets: Tensor, accumulation: int = 1) -> None:
    for some_images, some_targets in zip(
        images.chunk(accumulation), targets.chunk(accumulation), strict=True
    ):
        (nn.functional.cross_entropy(model(some_images), some_targets) / accumulation).backward()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("accumulation", [1, 4])
def test_sam_two_steps_equal_formula(accumulation: int) -> None:
    """Equation 2 and the update of Algorithm 1, with momentum and weight decay, on a dictionary of
    tensors.
    """
    model = network()
    sam, updater = sam_and_updater(model)
    weights = values(model)
    momenta = {name: torch.zeros_like(p) for name, p in weights.items()}
    for step in range(2):
        images, targets = batch(step)

        def gradients(
            at: dict[str, Tensor], images: Tensor = images, targets: Tensor = targets
        ) -> dict[str, Tensor]:
            leaves = {name: w.clone().requires_grad_() for name, w in at.items()}
            loss = nn.functional.cross_entropy(functional_call(model, leaves, (images,)), targets)
            return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

        g = gradients(weights)
        length = math.sqrt(sum(float(each.square().sum()) for each in g.values()))
        perturbed = gradients({name: w + RHO * g[name] / length for name, w in weights.items()})
        for name, w in weights.items():
            decay = 0.0 if name.endswith("bias") else 0.01
            momenta[name] = 0.9 * momenta[name] + perturbed[name] + decay * w
            weights[name] = w - LR * momenta[name]

        backward(model, images, targets, accumulation)
        with sam.perturbed_weights():
            backward(model, images, targets, accumulation)
        norm, _ = updater.update(LR)
        expected_norm = math.sqrt(sum(float(each.square().sum()) for each in perturbed.values()))
        assert norm.item() == pytest.approx(expected_norm, rel=1e-9)
        assert abs(expected_norm - length) > 1e-3
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=0, atol=1e-12)


def test_sam_restores_bits_strides_and_buffers_also_after_an_error() -> None:
    """float32, where adding and subtracting again changes bits."""
    model, plain = network(norm=True).float(), network(norm=True).float()
    model.to(memory_format=torch.channels_last)
    images, targets = batch()
    before, strides = values(model), [p.stride() for p in model.parameters()]
    sam, _ = sam_and_updater(model)
    backward(model, images.float(), targets)
    gradients = [weakref.ref(p.grad) for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), sam.perturbed_weights():
        assert not any(gradient() is not None for gradient in gradients), "they need memory"
        moved = [(p - before[name]).flatten() for name, p in model.named_parameters()]
        backward(model, images.float(), targets)
        raise ZeroDivisionError
    assert torch.cat(moved).norm().item() == pytest.approx(RHO, rel=1e-5)
    assert_equal(model, before)
    assert [p.stride() for p in model.parameters()] == strides
    plain(images.float())
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_sam_zero_or_nonfinite_gradient_leaves_weights(value: float) -> None:
    model = network()
    sam, _ = sam_and_updater(model)
    before = values(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    with sam.perturbed_weights():
        assert_equal(model, before)


def test_sam_frozen_and_unused_parameters_stay() -> None:
    used = network()
    used[0].bias.requires_grad_(False)
    model = nn.ModuleDict({"used": used, "unused": nn.Linear(2, 2).double()})
    sam, _ = sam_and_updater(model)
    before = values(model)
    backward(used, *batch())
    with sam.perturbed_weights():
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"used.0.weight", "used.3.weight", "used.3.bias"}
