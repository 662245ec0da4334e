"""Optimizer state through named tensors and JSON, above all for fused optimizers on channels-last
weights.
"""

import json
import random
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn

from imagenet_cls.checkpoint.optimizer_state import (
    check_state,
    copy_to_host,
    load_optimizer,
    optimizer_to_tensors,
)
from imagenet_cls.config.schema import OptimizerConfig, TrainConfig
from imagenet_cls.engine.step import Updater
from imagenet_cls.errors import CheckpointError, ConfigError
from imagenet_cls.lookup import NameNotFoundError
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.optimizers import build_optimizer

KWARGS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "rmsprop": {"momentum": 0.9},
}
NAMES = [
    "sgd",
    "adamw",
    "rmsprop",
    "lamb",
    "rmsproptf",
    "timm:nadamw",
    "timm:adafactor",
    "timm:lookahead_adamw",
]
OF_TIMM = [
    f"timm:{name}" for name in timm.optim.list_optimizers(exclude_filters=["fused*", "bnb*"])
]
DECAYS = {"weight_decay": 0.01, "norm_weight_decay": 0.0, "bias_weight_decay": 0.0}


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, groups=2), nn.Flatten()
    )
    return model.to(memory_format=torch.channels_last)


def optimizer_for(model: nn.Module, name: str, **kwargs: bool) -> torch.optim.Optimizer:
    kwargs = KWARGS.get(name, {}) | kwargs
    config = OptimizerConfig(name=name, lr=0.05, kwargs=kwargs, **DECAYS)
    optimizer = build_optimizer(config, parameter_groups(model, config))
    for group in optimizer.param_groups:
        if "lookahead_k" in group:
            group["lookahead_k"] = 2  # the halves meet between two looks ahead
    return optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(images.contiguous(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_files(tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> tuple[dict, dict]:
    """As safetensors and JSON do it: contiguous tensors, and lists for tuples."""
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(
        json.dumps(numbers)
    )


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.nightly) for name in OF_TIMM)]
)
def test_resumed_optimizer_ends_in_the_same_bits(name: str) -> None:
    """Six steps, against three, a save, a load into a model and optimizer with other values, and
    three more.
    """
    whole = network()
    try:
        optimizer = optimizer_for(whole, name)
        steps(whole, optimizer, 0, 1)
        check_state(optimizer, name)
    except (ConfigError, NameNotFoundError):
        return  # no run accepts it
    steps(whole, optimizer, 1, 5)

    first = network()
    optimizer = optimizer_for(first, name)
    steps(first, optimizer, 0, 3)
    weights = copy_to_host(first.state_dict())
    tensors, numbers = through_files(*optimizer_to_tensors(first, optimizer))

    second = network()
    fresh = optimizer_for(second, name)
    steps(second, fresh, 100, 2)  # its state is to be replaced
    second.load_state_dict(weights)
    load_optimizer(second, fresh, tensors, numbers)
    for parameter, state in fresh.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                assert value.stride() == parameter.stride(), key
    # else the line above proves nothing
    assert first[0].weight.stride() != first[0].weight.contiguous().stride()
    steps(second, fresh, 3, 3)
    for key, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key


def test_load_optimizer_other_groups_is_an_error() -> None:
    model = network()
    tensors, numbers = optimizer_to_tensors(model, optimizer_for(model, "sgd"))
    config = OptimizerConfig(lr=0.1, kwargs=KWARGS["sgd"])
    other = build_optimizer(config, parameter_groups(model, config))
    with pytest.raises(CheckpointError, match=r"\[6\].*\[2, 4\]"):
        load_optimizer(model, other, tensors, numbers)


def test_load_optimizer_arguments_come_from_the_config() -> None:
    """The momentum of the checkpoint may be that of a schedule, which the run no longer has."""
    model = network()
    optimizer = optimizer_for(model, "sgd")
    steps(model, optimizer, 0, 2)
    kwargs = {"momentum": 0.5, "nesterov": True}
    config = OptimizerConfig(lr=0.05, kwargs=kwargs, **DECAYS | {"weight_decay": 0.7})
    changed = build_optimizer(config, parameter_groups(model, config))
    for group in changed.param_groups:
        group["lr_scale"] = 0.5
    load_optimizer(model, changed, *optimizer_to_tensors(model, optimizer), ["nesterov"])
    for group, decay in zip(changed.param_groups, (0.7, 0.0), strict=True):
        arguments = {"weight_decay": decay, "lr_scale": 0.5, **kwargs}
        assert arguments.items() <= group.items()
    weight = model[0].weight
    assert torch.equal(
        changed.state[weight]["momentum_buffer"], optimizer.state[weight]["momentum_buffer"]
    )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(("before", "after"), [("foreach", "fused"), ("fused", "foreach")])
def test_load_optimizer_implementation_comes_from_the_config(
    name: str, before: str, after: str
) -> None:
    """Otherwise the second update could fail, or copy each parameter from a GPU to the host."""
    model = network()
    first = optimizer_for(model, name, **{before: True})
    steps(model, first, 0, 2)
    second = optimizer_for(model, name, **{after: True})
    expected = [(group["foreach"], group["fused"]) for group in second.param_groups]
    load_optimizer(model, second, *through_files(*optimizer_to_tensors(model, first)))
    assert [(group["foreach"], group["fused"]) for group in second.param_groups] == expected
    updater = Updater(model, second, TrainConfig(), torch.amp.GradScaler("cpu", enabled=False))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert not updater.update(0.1)[1]


@pytest.mark.parametrize(("fused", "device"), [(False, "cpu"), (True, "meta")])
def test_step_of_a_run_on_a_cpu_is_loaded_where_the_kernels_read_it(
    fused: bool, device: str
) -> None:
    """meta stands for a GPU."""
    first = network()
    optimizer = optimizer_for(first, "adamw", fused=fused)
    steps(first, optimizer, 0, 1)
    saved = through_files(*optimizer_to_tensors(first, optimizer))
    second = network().to("meta")
    resumed = optimizer_for(second, "adamw", fused=False)
    for group in resumed.param_groups:
        group["fused"] = fused  # the constructor refuses tensors on meta
    load_optimizer(second, resumed, *saved)
    assert {state["step"].device.type for state in resumed.state.values()} == {device}
    assert {state["exp_avg"].device.type for state in resumed.state.values()} == {"meta"}


class WithGeneratorInState(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["generator"] = [random.Random(0)]
        return super().step(closure)


@pytest.mark.parametrize(
    "kind", [WithGeneratorInState, timm.optim.kron.Kron, timm.optim.AdafactorBigVision]
)
def test_state_that_a_checkpoint_can_not_store_is_a_config_error(
    kind: type[torch.optim.Optimizer],
) -> None:
    model = network()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    if kind is not timm.optim.kron.Kron:  # whose step compiles
        steps(model, optimizer, 0, 1)
    with pytest.raises(ConfigError, match=r"^optimizer\.name: "):
        check_state(optimizer, "name")
