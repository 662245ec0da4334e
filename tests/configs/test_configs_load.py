"""Every config that is shipped loads, says what it claims, and is built on shared bases."""

import re
from pathlib import Path

import pytest

from imagenet_cls.config.load import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RUNNABLE = sorted(path for path in CONFIGS.rglob("*.yaml") if "_base_" not in path.relative_to(CONFIGS).parts)
BASES = sorted((CONFIGS / "_base_").rglob("*.yaml"))


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_config_loads_and_opens_with_a_comment_that_tells_how_to_run_it(path: Path) -> None:
    config = load_config(path).config
    head = re.match(r"(#.*\n)+", path.read_text())
    assert head, "no comment at the top"
    assert f"configs/{path.relative_to(CONFIGS)}" in head.group(), "no command at the top"
    claim = config.expect.claimed_top1_pct
    if claim is not None:
        assert config.expect.source
        assert f"{claim:.3f}".rstrip("0") in head.group()
        assert config.expect.note


def test_every_base_is_used() -> None:
    used = {origin.file.resolve() for path in RUNNABLE for origin in load_config(path).origins.values() if origin.file}
    assert {path.resolve() for path in BASES} <= used


@pytest.mark.parametrize(("name", "top1_pct"), [("resnet18", 69.758), ("resnet50", 76.130)])
def test_the_torchvision_recipe(name: str, top1_pct: float) -> None:
    config = load_config(CONFIGS / f"{name}.yaml").config
    assert config.model.name == f"{name}.tv_in1k"
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("sgd", 0.1, 1e-4)
    assert config.optimizer.kwargs == {"momentum": 0.9}
    kinds = ("norm", "bias", "token", "scale")
    assert [getattr(config.optimizer, f"{kind}_weight_decay") for kind in kinds] == [None] * 4  # all parameters alike
    assert (config.schedule.name, config.schedule.kwargs) == ("step", {"every_epochs": 30, "gamma": 0.1})
    assert (config.train.epochs, config.train.global_batch_size) == (90, 256)
    assert (config.augment.scale, config.augment.ratio, config.augment.hflip_prob) == ([0.08, 1.0], [3 / 4, 4 / 3], 0.5)
    assert (config.augment.interpolation, config.eval.interpolation) == ("bilinear", "bilinear")
    assert (config.augment.size_px, config.eval.crop_px, config.eval.resize_px) == (224, 224, 256)
    assert config.expect.claimed_top1_pct == top1_pct
    assert (config.data.name, config.data.root, config.data.train, config.data.val) == (
        "folder",
        "data/imagenet",
        "train",
        "val",
    )


def test_the_claims_are_those_of_the_published_weights() -> None:
    """Against torchvision's own metadata and timm's entry of the weights that the model's tag names."""
    from timm.models import get_pretrained_cfg
    from torchvision import models

    for name in ("ResNet18", "ResNet50"):
        config = load_config(CONFIGS / f"{name.lower()}.yaml").config
        weights = getattr(models, f"{name}_Weights").IMAGENET1K_V1
        assert config.expect.claimed_top1_pct == weights.meta["_metrics"]["ImageNet-1K"]["acc@1"]
        preprocess, published = weights.transforms(), get_pretrained_cfg(config.model.name)
        assert ([config.eval.resize_px], [config.eval.crop_px]) == (preprocess.resize_size, preprocess.crop_size)
        assert preprocess.interpolation.value == config.eval.interpolation == published.interpolation
        assert config.data.mean == preprocess.mean == list(published.mean)
        assert config.data.std == preprocess.std == list(published.std)
