"""Frozen parameters and statistics keep their bits while the rest trains, as with timm's own
freezing.
"""

import pytest
import timm
import timm.layers
import timm.utils
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ConfigError
from imagenet_cls.models.adapt import freeze, set_training

STAGES = ["conv1.*", "bn1.*", "layer1.*", "layer2.*"]


def network(name: str = "test_resnet") -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        name, num_classes=5, **({"zero_init_last": False} if "resnet" in name else {})
    )


def train(model: nn.Module, cfg: ModelConfig | None) -> nn.Module:
    """Two steps with momentum; cfg None: modes as `model.train()` has them."""
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9
    )
    for step in range(2):
        set_training(model, cfg) if cfg is not None else model.train()
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    "cfg",
    [ModelConfig(freeze=STAGES), ModelConfig(freeze_bn=True), ModelConfig(head_only=True)],
    ids=["stages", "bn", "head"],
)
def test_training_equals_timms_freezing(cfg: ModelConfig) -> None:
    """timm puts another class in place of each frozen BatchNorm; here the class stays. The outputs
    are the same.
    """
    ours, theirs = network(), network()
    if cfg.freeze_bn:
        theirs = timm.layers.freeze_batch_norm_2d(theirs)
    else:
        timm.utils.freeze(
            theirs, [p.removesuffix(".*") for p in STAGES] + (["layer3", "layer4"] * cfg.head_only)
        )
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    assert freeze(ours, cfg, 5) is not None
    train(ours, cfg)
    train(theirs, None)
    with torch.no_grad():
        images = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=0, atol=1e-6)
    after, reference = ours.state_dict(), theirs.state_dict()
    assert list(after) == list(before)
    for name in after.keys() & reference.keys():
        torch.testing.assert_close(after[name], reference[name], rtol=0, atol=1e-6, msg=name)
    norms = [name for name, module in ours.named_modules() if isinstance(module, _BatchNorm)]
    expected = {
        name
        for name in before
        if (cfg.freeze and name.startswith(("conv1.", "bn1.", "layer1.", "layer2.")))
        or (cfg.freeze_bn and name.rpartition(".")[0] in norms)
        or (cfg.head_only and not name.startswith("fc."))
    }
    assert {
        name for name in before if torch.equal(before[name], after[name])
    } == expected and expected


def test_only_frozen_batch_norm_leaves_the_training_mode() -> None:
    """Without weights it is updated in front of a trained head, as for MAE's linear probes; within
    a frozen part it is not. Dropout stays on.
    """
    body = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4))
    head = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 5))
    model = nn.Sequential(body, head)
    freeze(model, cfg := ModelConfig(head_only=True), 5)
    set_training(model, cfg)
    assert [module.training for module in (*body, head[0])] == [True, False, False, True]
    set_training(model, ModelConfig(freeze_bn=True))
    assert (body[1].training, head[0].training) == (False, False)


@pytest.mark.parametrize(
    ("name", "cfg", "keys"),
    [
        (
            "test_resnet",
            {"freeze": ["zebra", "conv1.*", "quagga"]},
            ["model.freeze", "model.freeze"],
        ),
        ("test_resnet", {"freeze": ["*"]}, ["model.freeze"]),
        ("test_vit", {"freeze_bn": True}, ["model.freeze_bn"]),
    ],
)
def test_bad_patterns_are_an_error(name: str, cfg: dict, keys: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        freeze(network(name), ModelConfig(name=name, **cfg), 5)
    assert [line.partition(":")[0] for line in caught.value.lines] == keys


def test_model_without_head_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^model\.head_only: "):
        freeze(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), ModelConfig(head_only=True), 5)
