"""From a config's `optimizer` section to an optimizer.

Owns the built-in optimizers and the check of the section. Refuses unknown names, keywords that the optimizer does not
take, and optimizers whose state is more than a checkpoint can hold, found out by a trial step on two tiny parameters.
`optimizer_problems` is called by `engine.check` before anything is started, `build_optimizer` by `engine.build` with the
groups of `groups.parameter_groups`, `state_names` by `engine.run` where a resumed run's arguments were changed,
`state_copies` by `engine.saving`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import timm.optim
import torch
from timm.optim import Lookahead
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.errors import Problem, UserError
from imagenet_cls.lookup import (
    did_you_mean,
    import_factory,
    is_factory_name,
    keyword_names,
    kwargs_problems,
    missing_kwargs_problems,
)
from imagenet_cls.optim.groups import parameter_groups

TIMM = "timm:"
BUILT_IN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
# The fastest implementation that each has on CPUs and GPUs alike; kwargs may choose another.
IMPLEMENTATION: dict[str, dict[str, bool]] = {
    "sgd": {"fused": True},
    "adamw": {"fused": True},
    "rmsprop": {"foreach": True},
}
# Built in under timm's name, and made by timm's factory, so that what it sets by default (momentum 0.9) holds here too.
BUILT_IN_FROM_TIMM = {"lamb": "timm:lamb", "rmsproptf": "timm:rmsproptf"}

# What the program passes itself.
RESERVED = ("params", "lr", "weight_decay")

# `timm:lookahead_NAME`: timm's Lookahead around its NAME. Its arguments, as a config writes them and as each group of
# parameters keeps them, so that none is mistaken for one of the optimizer inside; and as the class calls them.
LOOKAHEAD = "lookahead_"
LOOKAHEAD_KWARGS = {"lookahead_alpha": "alpha", "lookahead_k": "k"}


def build_optimizer(optimizer: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer over `groups`, each with its own `weight_decay` (and `names` and `lr_scale`, which every optimizer
    keeps as they are).

    `sgd` and `adamw` are fused, `rmsprop` is foreach, unless kwargs choose between `fused`, `foreach` and
    `differentiable`. A factory of the user's is called as `factory(groups, lr=..., weight_decay=..., **kwargs)`. Raises
    UserError where such a factory does not return an optimizer, and what the constructor raises for bad numbers
    (ValueError), which `optimizer_problems` reports beforehand.
    """
    built = _factory(optimizer)(groups, lr=optimizer.lr, weight_decay=optimizer.weight_decay, **optimizer.kwargs)
    if not isinstance(built, torch.optim.Optimizer):
        returned = type(built).__name__
        raise UserError(
            f"optimizer.name: {optimizer.name!r} returned {returned}; let it return a torch.optim.Optimizer"
        )
    return built


def _factory(optimizer: OptimizerConfig) -> Callable[..., Any]:
    """What is called with (groups, lr=, weight_decay=, **kwargs). Raises LookupError for names that nobody knows."""
    name = BUILT_IN_FROM_TIMM.get(optimizer.name, optimizer.name)
    if name in BUILT_IN:
        chosen = {"fused", "foreach", "differentiable"} & optimizer.kwargs.keys()
        return partial(BUILT_IN[name], **({} if chosen else IMPLEMENTATION[name]))
    if name.startswith(TIMM):
        known = _timm_name(name)
        # Groups, not the model, go in: timm then adds no exclusions from weight decay of its own.
        factory = partial(timm.optim.create_optimizer_v2, opt=known.removeprefix(LOOKAHEAD))
        return partial(_lookahead, factory) if known.startswith(LOOKAHEAD) else factory
    if is_factory_name(name):
        return import_factory(name)
    raise LookupError(_unknown_name(name))


def _lookahead(inner: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], **kwargs: Any) -> Lookahead:
    """timm's Lookahead around what `inner` makes of the groups; LOOKAHEAD_KWARGS are for it, the others for `inner`.

    After every k steps (timm: 6) the slow weights go the share alpha (timm: 0.5) of the way to the fast ones, which go
    on from there (Zhang et al. 2019, "Lookahead Optimizer: k steps forward, 1 step back", algorithm 1). timm's slow
    weights begin where the fast ones are after the first k steps, and not before them.

    What is evaluated, averaged and saved is the fast weights, wherever an epoch ends among the k steps; the paper's
    authors evaluate the slow ones. timm's script calls `sync_lookahead` at the end of each epoch, to no effect since
    torch 2.0: it passes over weights without a gradient, and `zero_grad` has removed all gradients before.
    """
    own = {ours: kwargs.pop(name) for name, ours in LOOKAHEAD_KWARGS.items() if name in kwargs}
    return Lookahead(inner(groups, **kwargs), **own)


def _unknown_name(name: str) -> str:
    prefix = TIMM + LOOKAHEAD if name.lower().removeprefix(TIMM).startswith("look") else TIMM
    candidates = [*BUILT_IN, *BUILT_IN_FROM_TIMM, *(prefix + known for known in timm.optim.list_optimizers())]
    allowed = f"(built in: {', '.join([*BUILT_IN, *BUILT_IN_FROM_TIMM])}; or timm:NAME, my_module:my_factory)"
    return f"unknown optimizer {name!r}{did_you_mean(name, candidates)} {allowed}"


def _timm_name(name: str) -> str:
    """timm's own name, checked here because timm takes `nonsense_adamw` for `adamw`."""
    known = name.removeprefix(TIMM).lower()
    if known.removeprefix(LOOKAHEAD) not in timm.optim.list_optimizers():
        raise LookupError(_unknown_name(name))
    return known


def _signature(optimizer: OptimizerConfig) -> Callable[..., Any]:
    """Whose signature the kwargs are compared with. Raises LookupError or, for what needs a GPU, AssertionError."""
    name = BUILT_IN_FROM_TIMM.get(optimizer.name, optimizer.name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith(TIMM):
        return timm.optim.get_optimizer_class(_timm_name(name).removeprefix(LOOKAHEAD), bind_defaults=False)
    return _factory(optimizer)


def optimizer_problems(optimizer: OptimizerConfig) -> list[Problem]:
    """Everything wrong with the section that shows without a model.

    Ends in a trial: one step on a (3, 2) weight and a (3,) bias on the CPU with fixed gradients. What it raises becomes
    a problem, and so does a state that is not made of tensors, numbers, texts and lists of them.
    """
    try:
        signature = _signature(optimizer)
    except (LookupError, AssertionError, ImportError) as error:
        return [Problem("optimizer.name", str(error))]
    more_names = LOOKAHEAD_KWARGS if _has_lookahead(optimizer) else ()
    problems = kwargs_problems("optimizer", signature, optimizer.kwargs, RESERVED, more_names)
    problems += _check_lookahead(optimizer.kwargs) if more_names else []
    # Whatever the first parameter is called, it receives the groups.
    groups_name = next(iter(keyword_names(signature)[0]), "params")
    problems += missing_kwargs_problems("optimizer", signature, optimizer.kwargs, given=(groups_name, *RESERVED))
    return [*_check_lr_scales(optimizer.lr_scales), *(problems or _trial(optimizer))]


def _has_lookahead(optimizer: OptimizerConfig) -> bool:
    return optimizer.name.lower().startswith(TIMM + LOOKAHEAD)


def _check_lookahead(kwargs: Mapping[str, Any]) -> Iterator[Problem]:
    """Narrower than timm's own: with alpha 0 nothing would be learned, and k = 2.5 would mean 5."""
    alpha, k = kwargs.get("lookahead_alpha", 0.5), kwargs.get("lookahead_k", 6)
    if isinstance(alpha, bool) or not (isinstance(alpha, int | float) and 0 < alpha <= 1):
        yield Problem("optimizer.kwargs.lookahead_alpha", f"{alpha!r} is not a number above 0 and up to 1")
    if isinstance(k, bool) or not (isinstance(k, int) and k >= 1):
        yield Problem("optimizer.kwargs.lookahead_k", f"{k!r} is not a whole number of at least 1")


def _check_lr_scales(factors: Mapping[str, Any]) -> Iterator[Problem]:
    for pattern, factor in factors.items():
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not (is_number and 0 <= factor < math.inf):
            yield Problem("optimizer.lr_scales", f"{pattern!r} has {factor!r}, which is not a number of at least 0")


def own_momentum(optimizer: OptimizerConfig) -> float | None:
    """The momentum (Adam's first beta) that the optimizer begins with; None where it has no such thing.

    Expects a section that `optimizer_problems` finds no problem in.
    """
    group = build_optimizer(optimizer, _groups_of(nn.Linear(1, 1), optimizer)).param_groups[0]
    momentum = group["momentum"] if "momentum" in group else group.get("betas", [None])[0]
    return None if momentum is None else float(momentum)


def _groups_of(layer: nn.Module, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups of a layer that stands for a model; rates by layer and by name need the real one."""
    return parameter_groups(layer, replace(optimizer, layer_decay=None, lr_scales={}))


def state_names(optimizer: OptimizerConfig) -> set[str]:
    """What the optimizer remembers of a parameter behind a step, such as `momentum_buffer`.

    Expects a section that `optimizer_problems` finds no problem in.
    """
    return {name for state in _trial_state(optimizer).values() for name in state}


def state_copies(optimizer: OptimizerConfig) -> int:
    """How many tensors of a weight's own shape the optimizer remembers of it, such as 2 for AdamW; as `state_names`."""
    weight, *_ = _trial_layer().parameters()
    values = [value for state in _trial_state(optimizer).values() for value in state.values()]
    copies = sum(isinstance(value, Tensor) and value.shape == weight.shape for value in values)
    # Slow weights are first kept after k steps, and the trial makes one.
    return copies + (_has_lookahead(optimizer) and optimizer.kwargs.get("lookahead_k") != 1)


def _trial_state(optimizer: OptimizerConfig) -> dict[int, dict[str, Any]]:
    """What is remembered of the trial layer's weight and bias after a step."""
    built = build_optimizer(optimizer, _groups_of(_trial_layer(), optimizer))
    built.step()
    return built.state_dict()["state"]


def _trial_layer() -> nn.Module:
    """A (3, 2) weight and a (3,) bias with gradients."""
    layer = nn.Linear(2, 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.5)
            parameter.grad = torch.full_like(parameter, 0.25)
    return layer


def _trial(optimizer: OptimizerConfig) -> list[Problem]:
    try:
        built = build_optimizer(optimizer, _groups_of(_trial_layer(), optimizer))
        problems = _check_state(optimizer.name, built.state_dict())
        if not problems:
            built.step()
            problems = _check_state(optimizer.name, built.state_dict())
        return problems
    except UserError as error:
        return [Problem("optimizer.name", str(error).removeprefix("optimizer.name: "))]
    except Exception as error:
        text = " ".join(str(error).split()) or "no reason given"
        return [
            Problem("optimizer", f"{optimizer.name!r} refuses these settings: {type(error).__name__}: {text[:200]}")
        ]


def _check_state(name: str, state: dict[str, Any]) -> list[Problem]:
    """Whether a checkpoint can hold what an optimizer's `state_dict()` returns."""
    kept = sorted(map(str, state.keys() - {"state", "param_groups"}))  # such as the generator state of timm's kron
    kept += sorted({f"a {type(v).__module__}.{type(v).__qualname__}" for v in _foreign_values(state)})
    owners = [*state.get("state", {}).values(), *state.get("param_groups", [])]
    kept += sorted({f"tensors within its {key!r}" for owner in owners for key in _keys_with_tensors_within(owner)})
    if not kept:
        return []
    text = f"{name!r} keeps {', '.join(kept)} besides tensors and numbers, which a checkpoint can't hold"
    return [Problem("optimizer.name", f"{text}; choose another optimizer")]


def _keys_with_tensors_within(owner: Mapping[str, Any]) -> Iterator[str]:
    """Keys of one parameter's state, or of a group, that hold tensors deeper down, where checkpoints do not look."""
    for key, value in owner.items():
        if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            yield key


def _foreign_values(value: Any) -> Iterator[Any]:
    """Everything within `value` that is neither a tensor, a number, a text nor a plain container of those."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _foreign_values(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _foreign_values(inner)
    elif not (value is None or isinstance(value, Tensor | bool | int | float | str)):
        yield value
