"""Kinds of parameters, their weight decay and their factor of the learning rate. Parity with the
libraries is in `tests/parity/test_parity_groups.py`.
"""

from typing import Any

import pytest
import timm
import torch
from timm.layers import LayerNorm2d, LayerScale, RmsNorm
from timm.layers.grn import GlobalResponseNorm
from torch import nn

from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.errors import ConfigError
from imagenet_cls.optim.groups import decay_class, parameter_groups


def groups(model: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    return parameter_groups(model, OptimizerConfig(lr=1.0, **settings))


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name)


NORM_LAYERS = [nn.SyncBatchNorm(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)]
NORM_LAYERS += [nn.InstanceNorm2d(4, affine=True), LayerNorm2d(4), RmsNorm(4)]
NORM_LAYERS += [GlobalResponseNorm(4)]


@pytest.mark.parametrize("layer", NORM_LAYERS, ids=lambda layer: type(layer).__name__)
def test_norm_is_recognized_by_class(layer: nn.Module) -> None:
    for name, parameter in layer.named_parameters():
        assert decay_class(f"deep.down.{name}", parameter, layer) == "norm"


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("fc.weight", (3, 2), "weight"),
        ("fc.bias", (3,), "bias"),
        ("blocks.0.attn.in_proj_bias", (9,), "bias"),
        ("cls_token", (1, 1, 4), "token"),
        ("model.reg_token", (1, 4, 4), "token"),
        ("encoder.pos_embedding", (1, 5, 4), "token"),
        ("layers.0.attn.relative_position_bias_table", (9, 2), "token"),
        ("pos_embed.projection.weight", (4, 2), "weight"),
        ("blocks.0.gamma_1", (4,), "scale"),
        ("skipinit_gain", (), "scale"),
        ("act.weight", (1,), "scale"),
        ("gammas.weight", (2, 2), "weight"),
    ],
)
def test_other_kinds_are_recognized_by_name_and_shape(
    name: str, shape: tuple[int, ...], kind: str
) -> None:
    assert decay_class(name, torch.empty(shape), nn.Linear(1, 1)) == kind


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [("attn.temperature", "token"), ("attn.*", "token"), ("attn.TEMPERATURE", "weight")],
)
def test_no_weight_decay_of_the_model_makes_tokens(pattern: str, kind: str) -> None:
    found = decay_class("attn.temperature", torch.empty(2, 2), nn.Linear(1, 1), {pattern})
    assert found == kind


class EveryKind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = LayerScale(4)
        self.no_decay = nn.Parameter(torch.zeros(4, 4))

    def no_weight_decay(self) -> set[str]:
        return {"no_decay"}


def test_each_kind_has_its_decay() -> None:
    """null: that of weights."""
    decays = {
        "norm_weight_decay": 0.2,
        "bias_weight_decay": 0.3,
        "token_weight_decay": 0.4,
        "scale_weight_decay": 0.5,
    }
    found = {
        group["weight_decay"]: group["names"]
        for group in groups(EveryKind(), weight_decay=0.1, **decays)
    }
    assert found == {
        0.1: ["fc.weight"],
        0.2: ["norm.weight", "norm.bias"],
        0.3: ["fc.bias"],
        0.4: ["cls_token", "no_decay"],
        0.5: ["scale.gamma"],
    }
    (everything,) = groups(EveryKind(), weight_decay=0.1)
    assert everything["names"] == [name for name, _ in EveryKind().named_parameters()]
    assert (everything["weight_decay"], everything["lr_scale"]) == (0.1, 1.0)


def test_frozen_parameters_are_left_out_and_shared_ones_are_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    weights, biases = groups(model, weight_decay=0.1, bias_weight_decay=0.0, lr_scales={"1.*": 1})
    assert weights["names"] == ["0.weight"]
    assert biases["names"] == ["0.bias", "2.bias"]


def scales(model: nn.Module, **settings: Any) -> dict[str, float]:
    return {
        name: group["lr_scale"] for group in groups(model, **settings) for name in group["names"]
    }


def test_lr_scale_is_that_of_the_first_matching_pattern() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    found = scales(model, lr_scales={"1.bias": 0, "1.*": 10, "*": 0.5})
    assert found == {"0.weight": 0.5, "0.bias": 0.5, "1.weight": 10.0, "1.bias": 0.0}


def test_lr_scales_and_layer_decay_are_multiplied() -> None:
    """Layers: tests/parity."""
    model = on_meta("vit_tiny_patch16_224")
    plain = scales(model, layer_decay=0.5)
    both = scales(model, layer_decay=0.5, lr_scales={"blocks.11.*": 3, "head.*": 10})
    last, before = (f"blocks.{block}.mlp.fc1.weight" for block in (11, 10))
    assert both["head.bias"] == 10 and both[last] == 3 * plain[last]
    assert both[before] == plain[before] < 1


class OneLayer(EveryKind):
    def group_matcher(self, coarse: bool) -> dict[str, str]:
        return {"stem": "^patch_embed"}


@pytest.mark.parametrize("model", [EveryKind, OneLayer])
def test_layer_decay_without_layers_is_an_error(model: type[EveryKind]) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.layer_decay: "):
        groups(model(), layer_decay=0.5)
