"""Quick recipes: the page, and that together they use every part and setting of the other recipes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY
from quick_runs import QUICK, measured

from imagenet_cls.config import keys
from imagenet_cls.config.load import LoadedConfig, load_config
from imagenet_cls.config.schema import Config

CONFIGS = REPOSITORY / "configs"
RECIPES = [path for path in CONFIGS.rglob("*.yaml") if not {"_base_", "quick"}.intersection(path.parts)]

# Sections in which quick recipes set every key, except these.
SECTIONS = ("augment", "mix", "loss", "distill", "optimizer", "schedule", "train", "ema", "eval")
NOT_TRAINED = {
    "augment.vflip_prob": "digits must not be mirrored, and no recipe does it",
    "mix.cutmix_minmax": "an alternative to cutmix_alpha",
    "mix.switch_prob": "the default is used",
    "distill.temperature": "for soft distillation; test_mixing_and_losses trains it",
    "distill.teacher.pretrained": "needs a download",
    "optimizer.lr_scaling": "the default, linear, is used",
    "train.max_steps": "stops a run early",
    "train.precision": "auto; bf16 and fp16 are for GPUs",
    "train.channels_last": "the default, true, is used",
    "train.compile": "takes longer than all of these runs",
    "train.deterministic": "for GPUs",
    "train.max_nonfinite_steps": "for runs that diverge",
    "train.profile": "changes no weights; test_step_profiles",
    "train.early_stop.patience_evals": "ends a run early",
    "train.early_stop.metric": "likewise",
    "train.early_stop.min_delta": "likewise",
    "eval.batch_size": "only changes memory",
    "eval.metrics": "your own code; test_extending reports some",
    "eval.mode": "the default, crop, is used; test_image_geometry evaluates with the others",
    "eval.classes": "for data with some of the classes",
    "eval.real_labels": "for ImageNet",
    "loss.effective_beta": "for class weights of this kind; test_class_imbalance trains with the other",
}
# Settings of which quick recipes use every value that a recipe uses; for a policy, its family.
CHOICES = (
    *("augment.interpolation", "augment.policy", "augment.erasing.mode", "mix.mode", "loss.name", "distill.kind"),
    *("optimizer.name", "schedule.name"),
)


@cache
def loaded(path: Path) -> LoadedConfig:
    return load_config(path)


def keys_of(path: Path) -> set[str]:
    """The keys that a config and its bases set, including each component argument."""
    return {key for key, origin in loaded(path).origins.items() if origin and key.partition(".")[0] in SECTIONS}


def choice(config: Config, key: str) -> str:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return str(value).partition("-")[0] if key == "augment.policy" else str(value)


def test_quick_recipes_set_every_key() -> None:
    expected = {key for key in keys.value_types() if key.partition(".")[0] in SECTIONS}
    trained = set().union(*(keys_of(path) for path in QUICK.glob("*.yaml")))
    # A key that holds component arguments counts as set if one of them is.
    trained |= {leaf for leaf in expected if any(key.startswith(f"{leaf}.") for key in trained)}
    assert expected - trained == NOT_TRAINED.keys()
    assert set().union(*(keys_of(path) for path in RECIPES)) - expected - trained == set()


@pytest.mark.parametrize("key", CHOICES)
def test_quick_recipes_use_every_choice(key: str) -> None:
    chosen = {choice(loaded(path).config, key) for path in RECIPES}
    assert chosen <= {choice(loaded(path).config, key) for path in QUICK.glob("*.yaml")}


def test_bounds_follow_from_the_measured_figures() -> None:
    assert {name for name, _ in measured()} == {path.stem for path in QUICK.glob("*.yaml")}
    for key, (bound, mean, deviation) in measured().items():
        assert bound == max(30, 5 * int((mean - max(20, 5 * deviation)) // 5)), key
