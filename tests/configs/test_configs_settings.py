"""Every recipe states its source and claim; those of torchvision equal its published weights."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from golden import CONFIGS, loaded, meta_model
from torchvision import models

from imagenet_cls.config.schema import Config

PATHS = {
    path.stem: path for path in CONFIGS.rglob("*.yaml") if not {"_base_", "quick"} & {*path.parts}
}
RECIPES = sorted(
    PATHS.keys() - {"demo", "fast", "mnist", "own_dataset", "resnet50_imagenette", "multilabel"}
)


def recipe(stem: str) -> Config:
    return loaded(PATHS[stem])


def torchvision_weights() -> Iterator[Any]:
    """(config, published weights) of each recipe whose source names some."""
    for stem in RECIPES:
        named = re.search(r"(\w+_Weights)\.(IMAGENET1K_V\d)", recipe(stem).expect.source or "")
        if named:
            yield pytest.param(stem, getattr(models, named[1])[named[2]], id=stem)


@pytest.mark.parametrize(("stem", "weights"), torchvision_weights())
def test_claim_network_and_evaluation_equal_those_of_torchvision(stem: str, weights: Any) -> None:
    config, preprocess = recipe(stem), weights.transforms()
    assert config.expect.claimed_top1_pct == weights.meta["_metrics"]["ImageNet-1K"]["acc@1"]
    assert sum(p.numel() for p in meta_model(config).parameters()) == weights.meta["num_params"]
    assert [config.eval.resize_px] == preprocess.resize_size
    assert [config.eval.crop_px] == preprocess.crop_size
    assert config.eval.interpolation == preprocess.interpolation.value
    assert config.data.mean == preprocess.mean and config.data.std == preprocess.std


@pytest.mark.parametrize("stem", RECIPES)
def test_recipe_states_paper_source_and_claim(stem: str) -> None:
    comment, expect = PATHS[stem].read_text().partition("\n_base_")[0], recipe(stem).expect
    for word in ("Paper: ", "Source: "):
        assert f"\n# {word}" in comment, word
    assert expect.source and expect.hardware
    assert expect.claimed_top1_pct is not None or "claimed are" in (expect.note or "")
