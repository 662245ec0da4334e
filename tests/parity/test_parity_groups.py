"""Parameter groups against timm's and those of torchvision's reference scripts, on whole models
without memory.
"""

from collections.abc import Mapping
from functools import cache

import pytest
import timm
import torch
import torchvision
from timm.optim._param_groups import param_groups_layer_decay
from torch import nn

from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.models.head import head_names
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.optimizers import build_optimizer

TIMM = ["resnet50", "convnext_tiny", "vit_small_patch16_224", "swin_tiny_patch4_window7_224"]
TORCHVISION = ["resnet50", "convnext_tiny", "vit_b_16", "swin_t"]
DECAY = 0.05
ONLY_WEIGHTS = {f"{kind}_weight_decay": 0.0 for kind in ("norm", "bias", "token", "scale")}
TORCHVISIONS_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LocalResponseNorm,
)


@cache
def timms(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name)


@cache
def torchvisions(name: str) -> nn.Module:
    with torch.device("meta"):
        return torchvision.models.get_model(name)


def ours(model: nn.Module, key: str, optimizer: OptimizerConfig) -> dict[str, float]:
    """What a parameter's group says under `key`, by the parameter's name."""
    return {
        name: group[key] for group in parameter_groups(model, optimizer) for name in group["names"]
    }


def theirs(model: nn.Module, key: str, groups: list[dict]) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}


@pytest.mark.parametrize("name", TIMM)
def test_layer_and_weight_decay_equal_timms(name: str) -> None:
    model = timms(name)
    named = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    groups = param_groups_layer_decay(model, DECAY, no_weight_decay_list=named, layer_decay=0.75)
    optimizer = OptimizerConfig(lr=1.0, weight_decay=DECAY, layer_decay=0.75, **ONLY_WEIGHTS)
    for key in ("lr_scale", "weight_decay"):
        assert ours(model, key, optimizer) == pytest.approx(theirs(model, key, groups), rel=1e-12)
    made = parameter_groups(model, optimizer)
    assert len({(group["lr_scale"], group["weight_decay"]) for group in made}) == len(made)
    assert min(group["lr_scale"] for group in made) < 0.75**3


def set_weight_decay(
    model: nn.Module, norm: float, by_name: Mapping[str, float]
) -> dict[str, float]:
    """torchvision's rule: a parameter's own name first, then the class of the module that holds it,
    then the rest.
    """
    decays = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            decay = norm if isinstance(module, TORCHVISIONS_NORMS) else DECAY
            decays[f"{prefix}.{name}" if prefix else name] = by_name.get(name, decay)
    return decays


@pytest.mark.parametrize("name", TORCHVISION)
def test_norm_bias_and_token_weight_decay_equal_torchvisions(name: str) -> None:
    """But for two names of its ViT, which the names of its own script miss."""
    model = torchvisions(name)
    tokens = dict.fromkeys(
        ("class_token", "position_embedding", "relative_position_bias_table"), 0.01
    )
    expected = set_weight_decay(model, 0.0, {"bias": 0.0, **tokens})
    optimizer = OptimizerConfig(
        lr=1.0,
        weight_decay=DECAY,
        norm_weight_decay=0.0,
        bias_weight_decay=0.0,
        token_weight_decay=0.01,
    )
    found = ours(model, "weight_decay", optimizer)
    differing = {key for key in expected if found[key] != expected[key]}
    assert {key.rpartition(".")[2] for key in differing} == (
        {"in_proj_bias", "pos_embedding"} if name == "vit_b_16" else set()
    )


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("optimizer", ["muon", "nadamuon"])
def test_parameters_that_muon_updates_equal_timms(name: str, optimizer: str) -> None:
    """Its factory is given the names of the head. Without them, Muon updates the head and 2D
    embeddings too.
    """
    kwargs = {"depths": (1, 1, 1, 1), "embed_dim": 48} if "swin" in name else {}
    model = timm.create_model(name, num_classes=10, **kwargs)
    head = head_names(model, 10)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    config = OptimizerConfig(f"timm:{optimizer}", lr=0.1, weight_decay=DECAY, **ONLY_WEIGHTS)
    mine = build_optimizer(config, parameter_groups(model, config, head))
    timms = timm.optim.create_optimizer_v2(
        model,
        optimizer,
        lr=0.1,
        weight_decay=DECAY,
        fallback_list=head,
        fallback_no_weight_decay=True,
    )
    mine.step()
    timms.step()
    used = {key: mine.state[parameter]["use_muon"] for key, parameter in model.named_parameters()}
    assert used == {
        key: timms.state[parameter]["use_muon"] for key, parameter in model.named_parameters()
    }
    assert not any(used[key] for key in head) and any(used.values())
