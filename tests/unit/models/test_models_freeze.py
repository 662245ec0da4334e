"""Frozen parameters and statistics keep their bits while the rest trains, as with timm's own freezing."""

import pytest
import timm
import timm.layers
import timm.utils
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import ConfigError
from imagenet_cls.models.adapt import freeze, freeze_problems, set_training
from imagenet_cls.models.check import model_problems

STAGES = ["conv1.*", "bn1.*", "layer1.*", "layer2.*"]


def network(name: str = "test_resnet") -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=5, **({"zero_init_last": False} if "resnet" in name else {}))


def train(model: nn.Module, cfg: ModelConfig | None) -> nn.Module:
    """Two steps with momentum; cfg None: modes as `model.train()` has them."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9)
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
    """timm puts another class in place of each frozen BatchNorm; here the class stays. The outputs are the same."""
    ours, theirs = network(), network()
    if cfg.freeze_bn:
        theirs = timm.layers.freeze_batch_norm_2d(theirs)
    else:
        timm.utils.freeze(theirs, [p.removesuffix(".*") for p in STAGES] + (["layer3", "layer4"] * cfg.head_only))
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    freeze(ours, cfg, 5)
    train(ours, cfg)
    train(theirs, None)
    with torch.no_grad():
        images = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=0, atol=1e-6)
    after, reference = ours.state_dict(), theirs.state_dict()
    assert list(after) == list(before)
    for name, value in after.items():
        counter = name.endswith("num_batches_tracked")  # timm's frozen layers have none
        if name in reference:
            torch.testing.assert_close(value, reference[name], rtol=0, atol=1e-6, msg=name)
        else:
            assert counter and torch.equal(value, before[name])
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    norms = [name for name, module in ours.named_modules() if isinstance(module, _BatchNorm)]
    expected = {
        name
        for name in before
        if (cfg.freeze and name.startswith(("conv1.", "bn1.", "layer1.", "layer2.")))
        or (cfg.freeze_bn and name.rpartition(".")[0] in norms)
        or (cfg.head_only and not name.startswith("fc."))
    }
    assert unchanged == expected and expected


def test_freeze_returns_counts() -> None:
    model = network()
    sentence = freeze(model, ModelConfig(head_only=True), 5)
    head, everything = 5 * model.fc.in_features + 5, sum(p.numel() for p in model.parameters())
    layers = sum(isinstance(module, _BatchNorm) for module in model.modules())
    assert sentence == (
        f"{head:,} of {everything:,} parameters are trained; {layers} BatchNorm layers keep their running statistics"
    )
    assert freeze(network(), ModelConfig(), 5) is None
    assert "BatchNorm" not in str(freeze(network("test_vit"), ModelConfig(head_only=True), 5))


def test_set_training_without_freezing_trains_all() -> None:
    model = network()
    freeze(model, ModelConfig(), 5)
    set_training(model.eval(), ModelConfig())
    assert all(module.training for module in model.modules())


def test_set_training_keeps_dropout_in_frozen_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 5))
    freeze(model, cfg := ModelConfig(head_only=True), 5)
    set_training(model, cfg)
    assert [module.training for module in model] == [True, True, False, True]


def test_batch_norm_without_weights_follows_the_module_around_it() -> None:
    """In front of a trained head it is updated, as for MAE's linear probes; within a frozen part it is not."""
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    head = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 5))
    model = nn.Sequential(body, head)
    freeze(model, cfg := ModelConfig(head_only=True), 5)
    set_training(model, cfg)
    assert (body[1].training, head[0].training) == (False, True)
    everything = ModelConfig(freeze_bn=True)
    set_training(model, everything)
    assert (body[1].training, head[0].training) == (False, False)


@pytest.mark.parametrize("name", ["resnet18"])
@pytest.mark.parametrize(
    ("cfg", "key", "text"),
    [
        ({"freeze": ["layer1"]}, "model.freeze", "'layer1' matches no parameter of {}; did you mean 'layer1.*'"),
        ({"freeze": ["layr1.*"]}, "model.freeze", "did you mean 'layer1.*'"),
        ({"freeze": ["zebra"]}, "model.freeze", "(its parts: conv1.*, bn1.*, layer1.*, "),
        ({"freeze": ["*"]}, "model.freeze", "no parameter of {} to train"),
    ],
)
def test_bad_patterns_are_the_same_error_in_check_and_freeze(name: str, cfg: dict, key: str, text: str) -> None:
    config = ModelConfig(name=name, **cfg)
    (problem,) = model_problems(config)
    assert problem.key == key and text.format(name) in problem.message
    with pytest.raises(ConfigError) as caught:
        freeze(network("resnet18"), config, 5)
    assert str(caught.value) == f"{key}: {problem.message}"


def test_all_unmatched_patterns_are_reported() -> None:
    problems = freeze_problems(network(), ModelConfig(freeze=["zebra", "conv1.*", "quagga"]), 5)
    assert ["zebra" in problems[0].message, "quagga" in problems[1].message, len(problems)] == [True, True, 2]


def test_model_without_head_or_batch_norm_is_a_problem() -> None:
    (problem,) = model_problems(ModelConfig(name="test_vit", freeze_bn=True))
    assert problem.key == "model.freeze_bn" and "has no BatchNorm" in problem.message
    (problem,) = freeze_problems(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), ModelConfig(head_only=True), 5)
    assert problem.key == "model.head_only" and "no recognised head" in problem.message
    (problem,) = freeze_problems(nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)), ModelConfig(freeze=["*"]), 5)
    assert problem.key == "model.freeze"
