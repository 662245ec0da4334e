"""Every setting and claim of every recipe is the one that its source publishes."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from golden import CONFIGS, loaded, meta_model
from published_settings import ROWS, Settings, settings
from torchvision import models

from imagenet_cls.config.schema import Config

PATHS = {path.stem: path for path in CONFIGS.rglob("*.yaml") if not {"_base_", "quick"} & {*path.parts}}
RECIPES = sorted(PATHS.keys() - {"demo", "mnist", "own_dataset", "resnet50_imagenette"})
# Mosaic's baseline, which claims no accuracy; timm's RegNetY-3.2GF, whose settings are not in timm's repository.
WITHOUT_CONFIG = {20, 37}


def recipe(stem: str) -> Config:
    return loaded(PATHS[stem])


def differences(found: Settings, published: Settings) -> list[str]:
    """A line for each setting that differs; averages may differ by the rounding of half-lives to whole images."""
    lines = []
    for column in sorted(found.keys() | published.keys()):
        ours, theirs = found.get(column), published.get(column)
        if isinstance(theirs, float):
            theirs = pytest.approx(theirs, rel=1e-9 if column != "ema" else 1e-6 * (1 - theirs))
        if ours != theirs:
            lines.append(f"{column}: {ours} (published: {theirs})")
    return lines


@pytest.mark.parametrize(("stem", "published"), [pytest.param(*row[1:], id=row[1]) for row in ROWS])
def test_settings_equal_published_ones(stem: str, published: Settings) -> None:
    assert differences(settings(recipe(stem)), published) == []


def test_every_recipe_has_a_row_and_every_row_a_recipe() -> None:
    assert sorted(stem for _, stem, _ in ROWS) == RECIPES
    assert {number for number, *_ in ROWS} == {*range(1, 39), None} - WITHOUT_CONFIG


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
def test_recipe_states_source_claim_and_uncertainty(stem: str) -> None:
    comment, expect = PATHS[stem].read_text().partition("\n_base_")[0], recipe(stem).expect
    for word in ("Paper: ", "Source: ", "Claimed: ", "Uncertain: "):
        assert f"\n# {word}" in comment, word
    claimed = re.search(r"# Claimed: (.*(\n#  .*)?)", comment)
    assert expect.source and expect.hardware and claimed
    if expect.claimed_top1_pct is None:
        assert "claimed are" in (expect.note or "")
    else:
        assert f"{expect.claimed_top1_pct:g}" in claimed[1]
    assert ("Not run here" in comment) == (expect.ours_top1_pct is None)
    if "uncertain:" in (expect.note or ""):
        assert "# Uncertain: nothing." not in comment
