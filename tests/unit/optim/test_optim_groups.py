"""Weight decay by shape: compared with timm's split."""

import pytest
import timm
import torch
from timm.optim._param_groups import param_groups_weight_decay
from torch import nn

from imagenet_cls.optim.groups import parameter_groups


@pytest.mark.parametrize("name", ["resnet50", "vit_small_patch16_224"])
def test_equals_timms_split(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    decayed, spared = parameter_groups(model, 0.05, decay_norm_and_bias=False)
    theirs = {group["weight_decay"]: group["params"] for group in param_groups_weight_decay(model, 0.05)}
    assert [id(p) for p in decayed["params"]] == [id(p) for p in theirs[0.05]]
    assert [id(p) for p in spared["params"]] == [id(p) for p in theirs[0.0]]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.05, 0.0)


def test_names_are_parallel_and_complete() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet18")
    groups = parameter_groups(model, 1e-4, decay_norm_and_bias=False)
    by_name = dict(model.named_parameters())
    for group in groups:
        assert [id(by_name[name]) for name in group["names"]] == [id(p) for p in group["params"]]
    assert sorted(name for group in groups for name in group["names"]) == sorted(by_name)


def test_one_group_where_all_decay() -> None:
    model = nn.Linear(2, 3)
    (group,) = parameter_groups(model, 0.1, decay_norm_and_bias=True)
    assert group["names"] == ["weight", "bias"]
    assert group["weight_decay"] == 0.1


def test_frozen_and_shared_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    decayed, spared = parameter_groups(model, 0.1, decay_norm_and_bias=False)
    assert decayed["names"] == ["0.weight"]
    assert spared["names"] == ["0.bias", "2.bias"]
    assert [g["names"] for g in parameter_groups(nn.BatchNorm1d(3), 0.1, decay_norm_and_bias=False)] == [
        ["weight", "bias"]
    ]
