"""A run's state, taken apart into named tensors and numbers, and put together again in the same bits.

Owns the names of optimizer state and the strides it is given back in. No generator state is among it: every random
draw has a key of its own. Called by `engine.run` around `engine.checkpoint`.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.errors import CheckpointError

_SEPARATOR = "//"

# Of a group of parameters: what the config says, also where it was allowed to change since.
_OF_THE_CONFIG = ("weight_decay", "lr_scale")


@dataclass
class Progress:
    """Where a run stands. step: optimizer updates done. best: per kind of weights (raw, ema) its top1_pct and step.

    evaluations: step and top-1 (per cent, raw weights) of each, which is what the schedule `plateau` goes by.
    """

    step: int = 0
    evaluated_step: int = 0
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies that share memory with nothing, as safetensors wants them."""
    contiguous = torch.contiguous_format
    return {name: t.detach().to("cpu", copy=True, memory_format=contiguous) for name, t in tensors.items()}


def state_holder(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose `state` is the real one: timm's Lookahead keeps all of its own in the one that it wraps."""
    return getattr(optimizer, "_base_optimizer", optimizer)


def optimizer_to_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by name (`layer1.0.conv1.weight//momentum_buffer`) and JSON-able numbers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {"groups": [], "parameters": {}, "on_host": []}
    for index, group in enumerate(optimizer.param_groups):
        kept = {key: value for key, value in group.items() if key not in ("params", "names")}
        tensors |= {f"group{_SEPARATOR}{index}{_SEPARATOR}{k}": v for k, v in kept.items() if isinstance(v, Tensor)}
        members = [names[id(parameter)] for parameter in group["params"]]
        values = {key: value for key, value in kept.items() if not isinstance(value, Tensor)}
        numbers["groups"].append({"members": members, "values": values})
    for parameter, state in state_holder(optimizer).state.items():
        name = names[id(parameter)]
        tensors |= {f"{name}{_SEPARATOR}{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        numbers["on_host"] += [
            f"{name}{_SEPARATOR}{key}"
            for key, value in state.items()
            if isinstance(value, Tensor) and value.device != parameter.device
        ]
        plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        numbers["parameters"][name] = plain
    return copy_to_host(tensors), numbers


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    changed: Collection[str] = (),
    needed: Collection[str] = (),
) -> None:
    """Put what `optimizer_to_tensors` took into an optimizer of the same kind over the same parameters.

    changed: the optimizer's arguments that the config was allowed to change since; they stay as they were built.
    needed: what the optimizer with these must find remembered of each parameter.

    Each tensor takes its parameter's strides: fused kernels walk weight and state flat, side by side, so a contiguous
    momentum under a channels-last weight corrupts the run in silence (error 2e-2 on weights of 0.1 in the first step).

    Raises CheckpointError where the groups of parameters differ, or what is needed is not there.
    """
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    there = [group["members"] for group in numbers["groups"]]
    if here != there:
        raise CheckpointError(
            f"the optimizer has {len(here)} groups of {[len(g) for g in here]} parameters, the checkpoint "
            f"{len(there)} of {[len(g) for g in there]}.\n"
            "Resume with the config that the run was started with (its config.yaml)."
        )
    remembered = {name.rpartition(_SEPARATOR)[2] for name in tensors}.union(*numbers["parameters"].values())
    if lacking := sorted(set(needed) - remembered):
        raise CheckpointError(
            f"with optimizer.kwargs changed, the optimizer needs {', '.join(lacking)}, which the checkpoint lacks.\n"
            "Put them back, or start a new run from its weights: model.checkpoint=CHECKPOINT"
        )
    for index, group in enumerate(optimizer.param_groups):
        for key, value in numbers["groups"][index]["values"].items():
            if key in _OF_THE_CONFIG or key in changed:
                continue
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    held = state_holder(optimizer).state
    held.clear()
    for name, plain in numbers["parameters"].items():
        held[parameters[name]] = dict(plain)
    on_host = set(numbers["on_host"])
    for full_name, tensor in tensors.items():
        *owner, key = full_name.split(_SEPARATOR)
        if owner[0] == "group":
            group = optimizer.param_groups[int(owner[1])]
            group[key] = tensor.to(group["params"][0].device, copy=True)
            continue
        parameter = parameters[owner[0]]
        if tensor.shape == parameter.shape:
            value = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
        else:
            value = tensor.to("cpu" if full_name in on_host else parameter.device, copy=True)
        held[parameter][key] = value
