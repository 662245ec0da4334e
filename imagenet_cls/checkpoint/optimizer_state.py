"""Optimizer state as named tensors and JSON values, and back, bit for bit."""

import json
from collections.abc import Collection
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.errors import CheckpointError, ConfigError
from imagenet_cls.private_names import base_optimizer

_SEPARATOR = "//"

# Values of a parameter group that always come from the config, not from the checkpoint. A schedule
# of the momentum sets it before each step. max_lr_snapshot: the highest learning rate, in timm's
# optimizers with a corrected weight decay. The last four choose the implementation of torch's
# optimizers, for which the `Updater` was built.
_FROM_CONFIG = (
    "weight_decay",
    "lr_scale",
    "momentum",
    "betas",
    "max_lr_snapshot",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies that share memory with nothing, as safetensors requires."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def optimizer_to_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state: tensors by name (`layer1.0.conv1.weight//momentum_buffer`), and all
    other values, for JSON.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    groups = []
    members = group_members(model, optimizer)
    parameters = {}
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "names")}
        tensors, others = _split(settings)
        for key, tensor in tensors.items():
            found[f"group{_SEPARATOR}{index}{_SEPARATOR}{key}"] = tensor
        groups.append({"members": members[index], "values": others})
    for parameter, state in base_optimizer(optimizer).state.items():
        name = names[id(parameter)]
        tensors, parameters[name] = _split(state)
        for key, tensor in tensors.items():
            found[f"{name}{_SEPARATOR}{key}"] = tensor
    values = {"groups": groups, "parameters": parameters}
    return copy_to_host(found), deepcopy(values)


def check_state(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise ConfigError if a checkpoint can't store the state of an optimizer after its first step:
    it stores tensors and JSON. name: `optimizer.name`.
    """
    state = optimizer.state_dict()
    # such as the generator state of timm's kron
    others = ", ".join(map(str, state.keys() - {"state", "param_groups"}))
    try:
        for owner in (*state["state"].values(), *state["param_groups"]):
            json.dumps(_split(owner)[1])
    except (TypeError, ValueError) as error:
        others = str(error)
    if others:
        raise ConfigError(
            [
                f"optimizer.name: a checkpoint can't store the state of {name!r} ({others}); use "
                "another optimizer"
            ]
        )


def _split(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return tensors, {key: value for key, value in state.items() if key not in tensors}


def group_members(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    values: dict[str, Any],
    changed: Collection[str] = (),
) -> None:
    """Load what `optimizer_to_tensors` returned into an optimizer of the same kind over the same
    parameters.

    changed: the optimizer's arguments that differ from the checkpoint's config; they keep their new
    values. Each tensor gets its parameter's strides: fused kernels walk weight and state in memory
    order, so a contiguous momentum with a channels-last weight silently corrupts the run. Raises
    CheckpointError if the groups differ.
    """
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    here = group_members(model, optimizer)
    there = [group["members"] for group in values["groups"]]
    if here != there:
        raise CheckpointError(
            f"The optimizer has groups of {[len(group) for group in here]} parameters, and the "
            f"checkpoint groups of {[len(group) for group in there]}.",
            "Resume with the config and the model of the run, or start a new run from its weights: "
            "model.checkpoint=RUN",
        )
    for index, group in enumerate(optimizer.param_groups):
        for key, value in values["groups"][index]["values"].items():
            if key in _FROM_CONFIG or key in changed:
                continue
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    state = base_optimizer(optimizer).state
    state.clear()
    for name, plain in values["parameters"].items():
        state[parameters[name]] = dict(plain)
    # As in torch's `Optimizer.load_state_dict`, fused and capturable kernels read `step` on the
    # device. Otherwise the host reads it, and would wait for a GPU. A checkpoint of a run on a CPU
    # does not show where it belongs.
    on_device = {
        names[id(parameter)]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    for full_name, tensor in tensors.items():
        *owner, key = full_name.split(_SEPARATOR)
        if owner[0] == "group":
            group = optimizer.param_groups[int(owner[1])]
            group[key] = tensor.to(group["params"][0].device, copy=True)
            continue
        parameter = parameters[owner[0]]
        if key == "step":
            value = tensor.to(parameter.device if owner[0] in on_device else "cpu", copy=True)
        elif tensor.shape == parameter.shape:
            value = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)
            value.copy_(tensor)
        else:
            value = tensor.to(parameter.device, copy=True)
        state[parameter][key] = value
