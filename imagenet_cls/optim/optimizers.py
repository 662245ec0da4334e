"""Builds the optimizer of a config's `optimizer` section, and checks the section."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import timm.optim
import torch
from torch import nn

from imagenet_cls.config.schema import NOT_NEGATIVE, OptimizerConfig
from imagenet_cls.errors import Problem, UserError
from imagenet_cls.lookup import (
    NameNotFoundError,
    component,
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
    UserError where it does not return an optimizer, and ConfigError for numbers that the
    constructor of a library rejects.
    """
    factory, _ = _factory_and_signature(optimizer)
    with component("optimizer.name", optimizer.name, optimizer.kwargs):
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

    Raises NameNotFoundError, and AssertionError or ImportError for an optimizer that needs a GPU.
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
        if inner == "adahessian":
            raise NameNotFoundError(f"{name!r} needs second derivatives; use another optimizer")
        if inner in timm.optim.list_optimizers():  # timm itself takes `nonsense_adamw` for `adamw`
            # Given groups and not the model, timm adds no exclusions from weight decay.
            factory = partial(timm.optim.create_optimizer_v2, opt=known)
            return factory, timm.optim.get_optimizer_class(inner, bind_defaults=False)
    elif is_factory_name(name):
        factory = import_factory(name)
        return factory, factory
    built_in = [*BUILT_IN, *BUILT_IN_FROM_TIMM]
    of_timm = [TIMM + known for known in timm.optim.list_optimizers()]
    raise NameNotFoundError(
        f"unknown optimizer {name!r}{did_you_mean(name, built_in + of_timm)} (built in: "
        f"{', '.join(built_in)}; or timm:NAME, my_module:my_factory)"
    )


def optimizer_problems(optimizer: OptimizerConfig) -> list[Problem]:
    """Problems of the section that show without building the optimizer."""
    try:
        _, signature = _factory_and_signature(optimizer)
    except (NameNotFoundError, AssertionError, ImportError) as error:
        return [Problem("optimizer.name", str(error))]
    problems = [
        Problem("optimizer.lr_scales", f"{pattern!r}: {text}")
        for pattern, factor in optimizer.lr_scales.items()
        if (text := number_problem(factor, NOT_NEGATIVE))
    ]
    # Whatever the first parameter is called, it receives the groups.
    names, _ = keyword_names(signature)
    return problems + kwargs_problems(
        "optimizer.kwargs",
        signature,
        optimizer.kwargs,
        passed=("lr", "weight_decay"),
        reserved=(*names[:1], "params"),
    )


def optimizer_of_layer(optimizer: OptimizerConfig, layer: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over the parameters of `layer`, without layer_decay and lr_scales, which need
    the real model.
    """
    plain = replace(optimizer, layer_decay=None, lr_scales={})
    return build_optimizer(plain, parameter_groups(layer, plain))
