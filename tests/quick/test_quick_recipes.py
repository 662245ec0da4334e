"""Quick recipes: the page, and that together they use every choice of the other recipes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY
from quick_runs import QUICK, measured

from imagenet_cls.config.load import LoadedConfig, load_config
from imagenet_cls.config.schema import Config

CONFIGS = REPOSITORY / "configs"
RECIPES = [
    path for path in CONFIGS.rglob("*.yaml") if not {"_base_", "quick"}.intersection(path.parts)
]

# Settings of which quick recipes use every value that a recipe uses; for a policy, its family.
CHOICES = (
    *(
        "augment.interpolation",
        "augment.policy",
        "augment.erasing.mode",
        "mix.mode",
        "loss.name",
        "distill.kind",
    ),
    *("optimizer.name", "schedule.name"),
)


@cache
def loaded(path: Path) -> LoadedConfig:
    return load_config(path)


def choice(config: Config, key: str) -> str:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return str(value).partition("-")[0] if key == "augment.policy" else str(value)


@pytest.mark.parametrize("key", CHOICES)
def test_quick_recipes_use_every_choice(key: str) -> None:
    chosen = {choice(loaded(path).config, key) for path in RECIPES}
    assert chosen <= {choice(loaded(path).config, key) for path in QUICK.glob("*.yaml")}


def test_page_has_a_row_for_each_recipe() -> None:
    assert {name for name, _ in measured()} == {path.stem for path in QUICK.glob("*.yaml")}
