"""Parameter groups for an optimizer.

Weight decay by kind of parameter, learning rate factor by layer and name.
"""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from timm.models import group_parameters
from torch import Tensor, nn

from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.errors import ConfigError
from imagenet_cls.lookup import did_you_mean_part
from imagenet_cls.private_names import BatchNormBase

DecayClass = Literal["weight", "norm", "bias", "token", "scale"]

# torch's norm layers, from which torchvision's are derived.
_NORMS = (
    BatchNormBase,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
# Modules of timm's norm layers that are derived from none of torch's.
_TIMM_NORMS = {
    f"timm.layers.{module}"
    for module in (
        "norm",
        "norm_act",
        "evo_norm",
        "filter_response_norm",
        "grn",
        "inplace_abn",
        "split_batchnorm",
    )
}
# The last part of a parameter's name, as in timm, torchvision and the papers.
_TOKEN = re.compile(
    r"(cls|class|dist|distillation|reg|register)_tokens?|pos(ition)?(al)?_embed(ding)?s?|relative_position_bias_table"
)
# timm's optimizers that use AdamW for groups with `use_fallback`.
_MUON = re.compile(r"timm:(lookahead_)?n?(ada)?muon", re.IGNORECASE)
_SCALE = re.compile(r"(layer_?scale|gamma)(_?\d+)?")


def decay_class(
    name: str, parameter: Tensor, owner: nn.Module, no_decay_patterns: Collection[str] = ()
) -> DecayClass:
    """The weight decay class of a parameter: which key of `optimizer` sets its decay.

    name: the parameter's full name. owner: the module that holds it. no_decay_patterns: the result
    of the model's `no_weight_decay()`.

    * `token` (`token_weight_decay`): class, distillation, register and position tokens and relative
      position tables by name, and whatever matches `no_decay_patterns`, norms and biases included;
    * `norm`: weights and biases of normalization layers, by class;
    * `bias`: any other bias, by name, `in_proj_bias` of torch's attention included (which
      torchvision's script takes for a weight, since its name is not `bias`);
    * `scale` (`scale_weight_decay`): layer scales by name, and everything else of at most one
      dimension;
    * `weight`: everything else.
    """
    last = name.rpartition(".")[2]
    if _TOKEN.fullmatch(last) or any(fnmatchcase(name, pattern) for pattern in no_decay_patterns):
        return "token"
    if isinstance(owner, _NORMS) or any(
        base.__module__ in _TIMM_NORMS for base in type(owner).__mro__
    ):
        return "norm"
    if last == "bias" or (last.endswith("_bias") and parameter.ndim <= 1):
        return "bias"
    if parameter.ndim <= 1 or _SCALE.fullmatch(last):
        return "scale"
    return "weight"


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, head: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Groups for an optimizer: `params` (tensors), `names` (of these tensors, for a user's
    optimizer), `weight_decay` and `lr_scale`.

    head: names of the head's parameters. With timm's Muon, the groups of the head and of tokens
    have `use_fallback`: AdamW updates them, since Muon is for hidden layers (Jordan et al. 2024).

    Frozen parameters are left out. Groups and their members are in the order of
    `model.named_parameters()`.

    Without norm, bias, token and scale decay, the groups equal the groups of timm's
    `param_groups_weight_decay`, except that tokens and layer scales never have decay. If only
    `norm_weight_decay` is set, they equal the groups of torchvision's `set_weight_decay`, but its
    bias decay includes the biases of norms.

    Raises ConfigError for `optimizer.layer_decay` with a model without known layers, and for a
    pattern of `optimizer.lr_scales` that matches no parameter.
    """
    decays = {
        "norm": config.norm_weight_decay,
        "bias": config.bias_weight_decay,
        "token": config.token_weight_decay,
        "scale": config.scale_weight_decay,
    }
    names = [name for name, _ in model.named_parameters()]
    layer_scales = {}
    if config.layer_decay is not None:
        layer_scales = layer_lr_scales(model, config.layer_decay)
    pattern_scales = pattern_lr_scales(names, config.lr_scales)
    no_decay_patterns: Collection[str] = getattr(model, "no_weight_decay", tuple)()
    is_muon = _MUON.fullmatch(config.name) is not None
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        parameter_class = decay_class(name, parameter, owner, no_decay_patterns)
        decay = decays.get(parameter_class)
        if decay is None:
            decay = config.weight_decay
        scale = layer_scales.get(name, 1.0) * pattern_scales.get(name, 1.0)
        flags = {}
        if is_muon and (parameter_class == "token" or name in head):
            flags = {"use_fallback": True}
        new = {"params": [], "names": [], "weight_decay": decay, "lr_scale": scale, **flags}
        group = groups.setdefault((decay, scale, bool(flags)), new)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def layer_lr_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Factor of the learning rate by parameter name: layer_decay to the power of the number of
    layers after its own.

    As in the script of BEiT (Bao et al. 2021), through timm: the model's `group_matcher` defines
    the layers. The head, and parameters of no layer, have 1. Raises ConfigError for a model without
    that method (timm would guess layers of twelve parameters each), or with all in one layer.
    """
    group_matcher = getattr(model, "group_matcher", None)
    layers = {}
    if group_matcher is not None:
        layers = group_parameters(model, group_matcher(coarse=False), reverse=True)
    last = max(layers.values(), default=0)
    if last == 0:
        raise ConfigError(
            [
                f"optimizer.layer_decay: {type(model).__name__} has no group_matcher that finds "
                "layers; give optimizer.layer_decay=null (optimizer.lr_scales has rates by name), "
                "or use a model of timm"
            ]
        )
    return {name: layer_decay ** (last - layer) for name, layer in layers.items()}


def pattern_lr_scales(names: Collection[str], patterns: Mapping[str, float]) -> dict[str, float]:
    """The factor of the first pattern (as in `fnmatch`, case-sensitive) that matches each name.

    Raises ConfigError for patterns that match none.
    """
    unused = [
        pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if unused:
        examples = f"(the model has {', '.join([*names][:2] + [*names][-1:])}, ...)"
        raise ConfigError(
            [
                f"optimizer.lr_scales: {pattern!r} matches no parameter"
                f"{did_you_mean_part(pattern, names)} {examples}"
                for pattern in unused
            ]
        )
    factors = {}
    for name in names:
        matching = [factor for pattern, factor in patterns.items() if fnmatchcase(name, pattern)]
        if matching:
            factors[name] = float(matching[0])
    return factors
