"""Each quick recipe trains to its band, and together they train through every part that a recipe here is made of."""

import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY
from quick_runs import BANDS, QUICK, SEEDS, STARTS_FROM, TEACHER, Top1s, in_band, train_ours, train_plain

from imagenet_cls.config import keys
from imagenet_cls.config.load import Loaded, load_config
from imagenet_cls.config.schema import Config

CONFIGS = REPOSITORY / "configs"
PAGE = REPOSITORY / "docs" / "quick.md"
NAMES = sorted(path.stem for path in QUICK.glob("*.yaml"))
RECIPES = [path for path in CONFIGS.rglob("*.yaml") if not {"_base_", "quick"}.intersection(path.parts)]

# Sections whose every key is set by some quick recipe, but for those below.
SECTIONS = ("augment", "mix", "loss", "distill", "optimizer", "schedule", "train", "ema", "eval")
NOT_TRAINED = {
    "augment.vflip_prob": "digits are not mirrored, and no recipe does it",
    "mix.cutmix_minmax": "in place of cutmix_alpha",
    "mix.switch_prob": "its default, a half, is in use",
    "distill.temperature": "of soft distillation, which no recipe uses; test_mixing_and_losses trains it",
    "distill.teacher.pretrained": "needs a download",
    "optimizer.lr_scaling": "its default, linear, is in use",
    "train.max_steps": "ends a run before its recipe does",
    "train.precision": "auto; bf16 and fp16 are for GPUs",
    "train.channels_last": "its default, true, is in use",
    "train.compile": "takes longer than all of these runs",
    "train.deterministic": "for GPUs",
    "train.max_nonfinite_steps": "for runs that go wrong",
    "eval.batch_size": "changes nothing but memory",
}
# Arguments of the components in these sections that recipes give, and quick ones don't.
KWARGS_NOT_TRAINED: dict[str, str] = {}
# Settings whose every value in a recipe is trained with in a quick one, too; of a policy its family.
CHOICES = (
    *("augment.interpolation", "augment.policy", "augment.erasing.mode", "mix.mode", "loss.name", "distill.kind"),
    *("optimizer.name", "schedule.name"),
)
CHOICES_NOT_TRAINED: dict[tuple[str, str], str] = {}


@pytest.fixture(scope="module")
def runs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> "Runs":
    return Runs(digits, tmp_path_factory.mktemp("quick"))


class Runs:
    """Each recipe's run, made when it is first asked for: some start from another one's."""

    def __init__(self, digits: Path, folder: Path):
        self.digits, self.folder = digits, folder
        self.done: dict[str, Top1s] = {}

    def __getitem__(self, name: str) -> Top1s:
        if name not in self.done:
            if name in STARTS_FROM:
                assert self[TEACHER]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's, about channels-last gradients of small nets
                self.done[name] = train_ours(name, self.digits, self.folder / name, 0, self.folder / TEACHER)
        return self.done[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_recipe_trains_to_its_band(name: str, runs: Runs) -> None:
    assert in_band(name, runs[name]), (runs[name], BANDS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_plain_loop_lands_in_the_same_band(name: str, digits: Path) -> None:
    for seed in SEEDS:
        top1s = train_plain(name, digits, seed)
        assert in_band(name, top1s), (seed, top1s, BANDS[name])


@cache
def loaded(path: Path) -> Loaded:
    """A config, read once for all tests."""
    return load_config(path)


def keys_of(path: Path) -> set[str]:
    """The keys that a config and its bases set; of a component's arguments each."""
    found = {key for key, origin in loaded(path).origins.items() if origin.file is not None}
    return {key for key in found if key.partition(".")[0] in SECTIONS}


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def choice(config: Config, key: str) -> str:
    value = str(value_of(config, key))
    return value.partition("-")[0] if key == "augment.policy" else value


def test_every_key_is_trained_through() -> None:
    leaves = {".".join(path) for path in keys.leaves()}
    wanted = {key for key in leaves if key.partition(".")[0] in SECTIONS}
    trained = set().union(*(keys_of(path) for path in QUICK.glob("*.yaml")))
    # A leaf that holds a component's arguments counts as set where one of them is.
    trained |= {leaf for leaf in wanted if any(key.startswith(f"{leaf}.") for key in trained)}
    assert wanted - trained == NOT_TRAINED.keys()
    by_recipes = set().union(*(keys_of(path) for path in RECIPES)) - wanted
    assert {key for key in by_recipes if key not in trained} == KWARGS_NOT_TRAINED.keys()


@pytest.mark.parametrize("key", CHOICES)
def test_every_choice_of_a_recipe_is_trained_through(key: str) -> None:
    chosen = {choice(loaded(path).config, key) for path in RECIPES}
    trained = {choice(loaded(path).config, key) for path in QUICK.glob("*.yaml")}
    assert chosen - trained == {value for of, value in CHOICES_NOT_TRAINED if of == key}


def test_the_page_has_the_figures_of_every_recipe_and_they_are_in_their_bands() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if "](../" in line
    ]
    found: dict[str, list[str]] = {}
    for cells in rows:
        name = re.search(r"quick/(\w+)\.yaml", cells[0])
        assert name is not None
        kind = "ema" if "average" in cells[0] else "raw"
        found.setdefault(name.group(1), []).append(kind)
        low, high = BANDS[name.group(1)][kind]
        assert cells[1] == f"{low:g} to {high:g}"
        for figures in (cells[2], cells[4]):
            top1s = [float(figure) for figure in figures.split(", ")]
            assert len(top1s) == len(SEEDS)
            assert all(low <= top1 <= high for top1 in top1s), cells
    assert {name: sorted(kinds) for name, kinds in found.items()} == {
        name: sorted(bands) for name, bands in BANDS.items()
    }
    assert sorted(BANDS) == NAMES
