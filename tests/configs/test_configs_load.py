"""Every config that is shipped loads, passes all checks, says what it claims, and is built on shared bases."""

import re
from pathlib import Path

import pytest
from golden import CONFIGS, loaded

from imagenet_cls.config import recipes
from imagenet_cls.config.load import dump_yaml, load_config
from imagenet_cls.config.schema import DistillConfig, EmaConfig, MixConfig
from imagenet_cls.engine.check import config_problems

RUNNABLE = sorted(path for path in CONFIGS.rglob("*.yaml") if "_base_" not in path.relative_to(CONFIGS).parts)
BASES = sorted((CONFIGS / "_base_").rglob("*.yaml"))
RECIPES = [path for path in RUNNABLE if loaded(path).expect.source is not None]


def name(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def head(path: Path) -> str:
    """The comment that a config opens with."""
    found = re.match(r"(#.*\n)+", path.read_text())
    assert found, "no comment at the top"
    return found.group()


@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_a_config_passes_all_checks_and_opens_with_a_comment_that_tells_how_to_run_it(path: Path) -> None:
    assert config_problems(loaded(path), world_size=8) == []  # and stage 1, or it would not have loaded
    assert f"configs/{name(path)}" in head(path), "no command at the top"


# Each switches off what recipes set other keys for.
OFF = [
    *("mix.mixup_alpha=0", "mix.cutmix_alpha=0", "ema.decay=null", "ema.half_life_images=null", "train.sam_rho=null"),
    *("augment.erasing.prob=0", "augment.progressive.epochs=null", "augment.progressive.sizes_px=null"),
    *(f"augment.color_jitter.{name}=0" for name in ("brightness", "contrast", "saturation", "hue")),
    *("data.repeats=1", "distill.kind=none", "optimizer.lr_base_batch=null", "schedule.warmup_epochs=0"),
]


@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_what_a_config_has_switched_on_can_be_switched_off_by_words(path: Path, tmp_path: Path) -> None:
    off = load_config(path, OFF).config
    assert (off.mix, off.distill.alpha, off.ema) == (MixConfig(), DistillConfig.alpha, EmaConfig())
    (tmp_path / "dump.yaml").write_text(dump_yaml(off))
    assert load_config(tmp_path / "dump.yaml").config == off


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_a_recipe_says_where_it_is_from_what_it_claims_and_what_is_uncertain(path: Path) -> None:
    comment, expect = head(path), loaded(path).expect
    assert len(path.read_text().splitlines()) < 30
    for word in ("Paper: ", "Source: ", "Claimed: ", "Uncertain: "):
        assert f"\n# {word}" in comment, word
    assert f"\n#   bash scripts/dist_train.sh configs/{name(path)} " in comment
    assert expect.hardware
    claimed = re.search(r"# Claimed: (.*(\n#  .*)?)", comment)
    assert claimed and re.search(r"hours|minutes|days", claimed[1]), "for how long did the source train?"
    if expect.claimed_top1_pct is None:
        assert "claimed are" in (expect.note or "")
    else:
        assert f"{expect.claimed_top1_pct:g}" in claimed[1]
    assert ("Not run here" in comment) == (expect.ours_top1_pct is None)
    if "uncertain:" in (expect.note or ""):
        assert "# Uncertain: nothing." not in comment


@pytest.mark.parametrize("recipe", ["rsb_a1", "rsb_a2", "rsb_a3", "tv_v2"])
def test_a_recipe_that_rests_on_memory_says_so(recipe: str) -> None:
    note = loaded(CONFIGS / "resnet" / f"resnet50_{recipe}.yaml").expect.note
    assert note is not None and "uncertain:" in note


def test_there_are_recipes_of_every_family_and_names_are_unique() -> None:
    """The name of a config names its run folder."""
    assert len(RECIPES) >= 55
    assert len({path.stem for path in RUNNABLE}) == len(RUNNABLE)
    assert {path.parent.name for path in RECIPES} == {"configs", *recipes.FAMILIES}


def test_every_base_is_used() -> None:
    used = {origin.file.resolve() for path in RUNNABLE for origin in load_config(path).origins.values() if origin.file}
    assert {path.resolve() for path in BASES} <= used


def test_the_page_of_recipes_is_that_of_the_configs() -> None:
    page = (CONFIGS.parent / "docs" / "recipes.md").read_text()
    assert page == recipes.page(), "python -m imagenet_cls.config.recipes > docs/recipes.md"
    for path in RECIPES:
        row = re.search(rf"^\| \[`{path.stem}`\].*$", page, re.M)
        assert row and row[0].count("|") == 10
        assert " |  | not run | " in row[0], "nothing was run on ImageNet"


@pytest.mark.parametrize(("stem", "top1_pct"), [("resnet18", 69.758), ("resnet50", 76.130)])
def test_the_torchvision_recipe(stem: str, top1_pct: float) -> None:
    config = loaded(CONFIGS / f"{stem}.yaml")
    assert config.model.name == f"{stem}.tv_in1k"
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
