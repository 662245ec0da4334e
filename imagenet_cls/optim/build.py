"""Builds the optimizer of a config's `optimizer` section, and checks the section."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import timm.optim
import torch
from timm.optim import Lookahead
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from imagenet_cls.config.fields import COUNT, NOT_NEGATIVE, Range
from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.errors import Problem, UserError, shorten
from imagenet_cls.lookup import (
    did_you_mean,
    import_factory,
    is_factory_name,
    keyword_names,
    kwargs_problems,
    number_problem,
)
from imagenet_cls.optim.groups import parameter_groups

TIMM = "timm:"
BUILT_IN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
# The fastest implementation on CPUs and GPUs, unless kwargs choose another.
IMPLEMENTATION = {"sgd": "fused", "adamw": "fused", "rmsprop": "foreach"}
# Built by timm's factory, so that its defaults (momentum 0.9) hold here too.
BUILT_IN_FROM_TIMM = {"lamb": "timm:lamb", "rmsproptf": "timm:rmsproptf"}

# Arguments that the program passes.
RESERVED = ("params", "lr", "weight_decay")

# `timm:lookahead_NAME` is timm's Lookahead around its optimizer NAME. Its arguments have other names in a config
# (config name -> timm's name), since the inner optimizer may have arguments of the same name.
LOOKAHEAD = "lookahead_"
LOOKAHEAD_KWARGS = {"lookahead_alpha": "alpha", "lookahead_k": "k"}
# Narrower than timm's: with alpha 0 nothing would be learned.
LOOKAHEAD_RANGES = {"lookahead_alpha": Range(0, 1, low_open=True), "lookahead_k": COUNT}


def build_optimizer(optimizer: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer over `groups`, each with its `weight_decay`, `names` and `lr_scale` (kept unchanged).

    `sgd` and `adamw` are fused, `rmsprop` is foreach, unless kwargs choose between `fused`, `foreach` and
    `differentiable`. A user's factory is called as `factory(groups, lr=..., weight_decay=..., **kwargs)`. Raises
    UserError where it does not return an optimizer, and the constructor's ValueError for bad numbers.
    """
    built = _factory(optimizer)(groups, lr=optimizer.lr, weight_decay=optimizer.weight_decay, **optimizer.kwargs)
    if not isinstance(built, torch.optim.Optimizer):
        returned = type(built).__name__
        raise UserError(f"optimizer.name: {optimizer.name!r} returned {returned}; return a torch.optim.Optimizer")
    return built


def _factory(optimizer: OptimizerConfig) -> Callable[..., Any]:
    """What is called with (groups, lr=, weight_decay=, **kwargs). Raises LookupError for an unknown name."""
    name = BUILT_IN_FROM_TIMM.get(optimizer.name, optimizer.name)
    if name in BUILT_IN:
        chosen = {"fused", "foreach", "differentiable"} & optimizer.kwargs.keys()
        return partial(BUILT_IN[name], **({} if chosen else {IMPLEMENTATION[name]: True}))
    if name.startswith(TIMM):
        known = _timm_name(name)
        # Given groups and not the model, timm adds no exclusions from weight decay.
        factory = partial(timm.optim.create_optimizer_v2, opt=known.removeprefix(LOOKAHEAD))
        return partial(_build_lookahead, factory) if known.startswith(LOOKAHEAD) else factory
    if is_factory_name(name):
        return import_factory(name)
    raise LookupError(_unknown_name(name))


def _build_lookahead(
    inner: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], **kwargs: Any
) -> Lookahead:
    """timm's Lookahead around the optimizer that `inner` builds; LOOKAHEAD_KWARGS are its own, the others `inner`'s.

    After every k steps (default 6) the slow weights move by the share alpha (default 0.5) towards the fast ones, which
    continue from there (Zhang et al. 2019, "Lookahead Optimizer: k steps forward, 1 step back", algorithm 1). timm's
    slow weights start after the first k steps, not before them.

    Evaluated, averaged and saved are the fast weights, wherever an epoch ends within the k steps; the paper's authors
    evaluate the slow ones. timm's script calls `sync_lookahead` after each epoch, without effect since torch 2.0: it
    skips weights without a gradient, and `zero_grad` has removed all gradients before.
    """
    own = {timms: kwargs.pop(name) for name, timms in LOOKAHEAD_KWARGS.items() if name in kwargs}
    return Lookahead(inner(groups, **kwargs), **own)


def _unknown_name(name: str) -> str:
    prefix = TIMM + LOOKAHEAD if name.lower().removeprefix(TIMM).startswith("look") else TIMM
    candidates = [*BUILT_IN, *BUILT_IN_FROM_TIMM, *(prefix + known for known in timm.optim.list_optimizers())]
    allowed = f"(built in: {', '.join([*BUILT_IN, *BUILT_IN_FROM_TIMM])}; or timm:NAME, my_module:my_factory)"
    return f"unknown optimizer {name!r}{did_you_mean(name, candidates)} {allowed}"


def _timm_name(name: str) -> str:
    """timm's name. Raises LookupError for an unknown one; timm itself takes `nonsense_adamw` for `adamw`."""
    known = name.removeprefix(TIMM).lower()
    if known.removeprefix(LOOKAHEAD) not in timm.optim.list_optimizers():
        raise LookupError(_unknown_name(name))
    return known


def _signature(optimizer: OptimizerConfig) -> Callable[..., Any]:
    """What `kwargs` are compared with. Raises LookupError or, for an optimizer that needs a GPU, AssertionError."""
    name = BUILT_IN_FROM_TIMM.get(optimizer.name, optimizer.name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(TIMM):
        return timm.optim.get_optimizer_class(_timm_name(name).removeprefix(LOOKAHEAD), bind_defaults=False)
    return _factory(optimizer)


def optimizer_problems(optimizer: OptimizerConfig) -> list[Problem]:
    """All problems of the section that can be found without a model.

    The last check is a step on a (3, 2) weight and a (3,) bias on the CPU: its errors are problems, and so is a state
    that is not made of tensors, numbers, strings and lists of them.
    """
    try:
        signature = _signature(optimizer)
    except (LookupError, AssertionError, ImportError) as error:
        return [Problem("optimizer.name", str(error))]
    lr_scales = [
        Problem("optimizer.lr_scales", f"{pattern!r}: {text}")
        for pattern, factor in optimizer.lr_scales.items()
        if (text := number_problem(factor, NOT_NEGATIVE))
    ]
    ranges = LOOKAHEAD_RANGES if _is_lookahead(optimizer) else {}
    # Whatever the first parameter is called, it receives the groups.
    passed = (*keyword_names(signature)[0][:1], *RESERVED)
    problems = kwargs_problems("optimizer.kwargs", signature, optimizer.kwargs, passed, more_names=ranges)
    for name, allowed in ranges.items():
        text = number_problem(optimizer.kwargs.get(name, 1), allowed, whole=name == "lookahead_k")
        problems += [Problem(f"optimizer.kwargs.{name}", text)] if text else []
    return lr_scales + (problems or _step_problems(optimizer))


def _is_lookahead(optimizer: OptimizerConfig) -> bool:
    return optimizer.name.lower().startswith(TIMM + LOOKAHEAD)


def initial_momentum(optimizer: OptimizerConfig) -> float | None:
    """The momentum (Adam's first beta) that the optimizer starts with; None where it has none.

    Requires a section without problems, like `state_names` and `state_copies`.
    """
    group = _optimizer_of_layer(optimizer).param_groups[0]
    momentum = group["momentum"] if "momentum" in group else group.get("betas", [None])[0]
    return None if momentum is None else float(momentum)


def state_names(optimizer: OptimizerConfig) -> set[str]:
    """Names of what the optimizer stores of a parameter after a step, such as `momentum_buffer`."""
    return {name for state in _state_after_step(optimizer) for name in state}


def state_copies(optimizer: OptimizerConfig) -> int:
    """How many tensors of a weight's shape the optimizer stores for it, such as 2 for AdamW."""
    values = [value for state in _state_after_step(optimizer) for value in state.values()]
    copies = sum(isinstance(value, Tensor) and value.shape == (3, 2) for value in values)
    # Lookahead stores slow weights after k steps.
    return copies + (_is_lookahead(optimizer) and optimizer.kwargs.get("lookahead_k") != 1)


def _state_after_step(optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    built = _optimizer_of_layer(optimizer)
    built.step()
    return list(built.state_dict()["state"].values())


def _optimizer_of_layer(optimizer: OptimizerConfig) -> torch.optim.Optimizer:
    """Over a (3, 2) weight and a (3,) bias with gradients; layer_decay and lr_scales need the real model."""
    layer = nn.Linear(2, 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.5)
            parameter.grad = torch.full_like(parameter, 0.25)
    return build_optimizer(optimizer, parameter_groups(layer, replace(optimizer, layer_decay=None, lr_scales={})))


def _step_problems(optimizer: OptimizerConfig) -> list[Problem]:
    try:
        built = _optimizer_of_layer(optimizer)
        if problems := _state_problems(optimizer.name, built.state_dict()):
            return problems
        built.step()
        return _state_problems(optimizer.name, built.state_dict())
    except UserError as error:
        return [Problem("optimizer.name", str(error).removeprefix("optimizer.name: "))]
    except Exception as error:
        text = shorten(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
        return [Problem("optimizer", f"{optimizer.name!r} fails with these settings: {text}")]


def _state_problems(name: str, state: dict[str, Any]) -> list[Problem]:
    """What of an optimizer's `state_dict()` a checkpoint can't store."""
    found = sorted(map(str, state.keys() - {"state", "param_groups"}))  # such as the generator state of timm's kron
    leaves = tree_leaves(state, is_leaf=lambda value: not isinstance(value, dict | list | tuple))
    unsupported = {type(leaf) for leaf in leaves if not isinstance(leaf, Tensor | bool | int | float | str | None)}
    found += sorted(f"a {kind.__module__}.{kind.__qualname__}" for kind in unsupported)
    owners = [*state.get("state", {}).values(), *state.get("param_groups", [])]
    values = [(key, value) for owner in owners for key, value in owner.items() if not isinstance(value, Tensor)]
    nested = {key for key, value in values if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))}
    found += [f"tensors within its {key!r}" for key in sorted(nested)]
    if not found:
        return []
    text = f"the state of {name!r} has {', '.join(found)}, which a checkpoint can't store"
    return [Problem("optimizer.name", f"{text}; use another optimizer")]
