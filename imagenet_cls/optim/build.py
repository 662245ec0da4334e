"""Builds the optimizer of a config's `optimizer` section, and checks the section."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import timm.optim
import torch
from torch import Tensor, nn

from imagenet_cls.config.schema import NOT_NEGATIVE, OptimizerConfig
from imagenet_cls.errors import Problem, UserError
from imagenet_cls.lookup import (
    did_you_mean,
    import_factory,
    is_factory_name,
    keyword_names,
    kwargs_problems,
    number_problem,
)
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.text import first_line, shorten

TIMM = "timm:"
BUILT_IN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
# The fastest implementation on CPUs and GPUs, unless kwargs choose another.
IMPLEMENTATION = {"sgd": "fused", "adamw": "fused", "rmsprop": "foreach"}
# Built by timm's factory, which adds momentum 0.9 where kwargs have none.
BUILT_IN_FROM_TIMM = {"lamb": "timm:lamb", "rmsproptf": "timm:rmsproptf"}

# `timm:lookahead_NAME` is timm's Lookahead around its optimizer NAME (Zhang et al. 2019, "Lookahead
# Optimizer: k steps forward, 1 step back", algorithm 1): after every 6 steps the slow weights move
# half of the way to the fast ones, which continue from there. timm's slow weights start after the
# first 6 steps, not before them. The fast weights are evaluated, averaged and saved; the authors
# evaluate the slow ones.
LOOKAHEAD = "lookahead_"


def build_optimizer(
    optimizer: OptimizerConfig, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer over `groups`, each with its `weight_decay`, `names` and `lr_scale` (kept
    unchanged).

    `sgd` and `adamw` are fused, `rmsprop` is foreach, unless kwargs choose an implementation. A
    user's factory is called as `factory(groups, lr=..., weight_decay=..., **kwargs)`. Raises
    UserError where it does not return an optimizer, and the constructor's ValueError for bad
    numbers.
    """
    factory, _ = _factory_and_signature(optimizer)
    built = factory(
        groups, lr=optimizer.lr, weight_decay=optimizer.weight_decay, **optimizer.kwargs
    )
    if not isinstance(built, torch.optim.Optimizer):
        raise UserError(
            f"optimizer.name: {optimizer.name!r} returned {type(built).__name__}.",
            "Return a torch.optim.Optimizer.",
        )
    return built


def _factory_and_signature(
    optimizer: OptimizerConfig,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What is called with (groups, lr=, weight_decay=, **kwargs), and what has the names of its
    arguments.

    Raises LookupError, and AssertionError or ImportError for an optimizer that needs a GPU.
    """
    name = BUILT_IN_FROM_TIMM.get(optimizer.name, optimizer.name)
    if name in BUILT_IN:
        factory: Callable[..., Any] = BUILT_IN[name]
        if not optimizer.kwargs.keys() & {"fused", "foreach", "differentiable"}:
            factory = partial(factory, **{IMPLEMENTATION[name]: True})
        return factory, BUILT_IN[name]
    if name.startswith(TIMM):
        known = name.removeprefix(TIMM).lower()
        inner = known.removeprefix(LOOKAHEAD)
        if inner in timm.optim.list_optimizers():  # timm itself takes `nonsense_adamw` for `adamw`
            # Given groups and not the model, timm adds no exclusions from weight decay.
            factory = partial(timm.optim.create_optimizer_v2, opt=known)
            return factory, timm.optim.get_optimizer_class(inner, bind_defaults=False)
    elif is_factory_name(name):
        factory = import_factory(name)
        return factory, factory
    prefix = TIMM + LOOKAHEAD if name.lower().removeprefix(TIMM).startswith("look") else TIMM
    built_in = [*BUILT_IN, *BUILT_IN_FROM_TIMM]
    of_timm = [prefix + known for known in timm.optim.list_optimizers()]
    raise LookupError(
        f"unknown optimizer {name!r}{did_you_mean(name, built_in + of_timm)} (built in: "
        f"{', '.join(built_in)}; or timm:NAME, my_module:my_factory)"
    )


def optimizer_problems(optimizer: OptimizerConfig) -> list[Problem]:
    """All problems of the section that can be found without a model, by a step of a small layer on
    the CPU. Some optimizers (torch's LBFGS and SparseAdam) fail only in the step.

    An optimizer of another library than torch and timm may need a GPU: of its errors, only a
    TypeError or ValueError of the constructor is a problem.
    """
    try:
        _, signature = _factory_and_signature(optimizer)
    except (LookupError, AssertionError, ImportError) as error:
        return [Problem("optimizer.name", str(error))]
    lr_scales = [
        Problem("optimizer.lr_scales", f"{pattern!r}: {text}")
        for pattern, factor in optimizer.lr_scales.items()
        if (text := number_problem(factor, NOT_NEGATIVE))
    ]
    # Whatever the first parameter is called, it receives the groups.
    passed = (*keyword_names(signature)[0][:1], "params", "lr", "weight_decay")
    problems = kwargs_problems("optimizer.kwargs", signature, optimizer.kwargs, passed)
    return lr_scales + (problems or _step_problems(optimizer))


def initial_momentum(optimizer: OptimizerConfig) -> float | None:
    """The momentum (Adam's first beta) that the optimizer starts with; None where it has none or
    needs a GPU.
    """
    try:
        group = optimizer_of_layer(optimizer, layer_with_gradients()).param_groups[0]
    except Exception:
        return None
    momentum = group["momentum"] if "momentum" in group else group.get("betas", [None])[0]
    return None if momentum is None else float(momentum)


def layer_with_gradients(device: torch.device | None = None) -> nn.Linear:
    """A layer with a (3, 2) weight, a (3,) bias and gradients."""
    layer = nn.Linear(2, 3, device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.5)
            parameter.grad = torch.full_like(parameter, 0.25)
    return layer


def optimizer_of_layer(optimizer: OptimizerConfig, layer: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the parameters of `layer`, without layer_decay and lr_scales, which need
    the real model.
    """
    plain = replace(optimizer, layer_decay=None, lr_scales={})
    return build_optimizer(optimizer, parameter_groups(layer, plain))


def _step_problems(optimizer: OptimizerConfig) -> list[Problem]:
    built = None
    try:
        built = optimizer_of_layer(optimizer, layer_with_gradients())
        if problems := _state_problems(optimizer.name, built.state_dict()):
            return problems  # before a step, which with timm's kron compiles
        built.step()
        return _state_problems(optimizer.name, built.state_dict())
    except UserError as error:
        text = f"{error.problem} {error.remedy}".removeprefix("optimizer.name: ")
        return [Problem("optimizer.name", text)]
    except Exception as error:
        package = getattr(_factory_and_signature(optimizer)[1], "__module__", "").partition(".")[0]
        concerns_arguments = built is None and isinstance(error, TypeError | ValueError)
        if package not in ("torch", "timm") and not concerns_arguments:
            return []
        text = shorten(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
        return [Problem("optimizer", f"{optimizer.name!r} fails with these settings: {text}")]


def _state_problems(name: str, state: dict[str, Any]) -> list[Problem]:
    """A problem for an optimizer's `state_dict()` that a checkpoint can't store: it stores tensors
    and JSON.
    """
    owners = (*state.get("state", {}).values(), *state.get("param_groups", []))
    values = [{key: v for key, v in owner.items() if not isinstance(v, Tensor)} for owner in owners]
    try:
        json.dumps(values)
        # such as the generator state of timm's kron
        found = ", ".join(map(str, state.keys() - {"state", "param_groups"}))
    except (TypeError, ValueError) as error:
        found = first_line(error)
    if not found:
        return []
    text = f"a checkpoint can't store the state of {name!r} ({found}); use another optimizer"
    return [Problem("optimizer.name", text)]
