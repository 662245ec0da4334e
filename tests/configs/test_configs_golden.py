"""Every shipped config loads, passes all checks, and gives the networks, parameter groups and rates in golden.json.

After an intended change: `python tests/configs/golden.py --write`; the diff has one line for each changed config.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from golden import CONFIGS, GOLDEN, golden_of, loaded, names

from imagenet_cls.config.load import dump_yaml, load_config
from imagenet_cls.engine.check import config_problems

BEFORE: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())
RUNNABLE = sorted(path for path in CONFIGS.rglob("*.yaml") if "_base_" not in path.relative_to(CONFIGS).parts)


@pytest.mark.parametrize("name", names())
def test_config_gives_golden_values(name: str) -> None:
    before, now = BEFORE[name], golden_of(loaded(CONFIGS / name))
    for key in ("parameters", "groups", "steps_per_epoch"):
        assert now[key] == before[key], key
    assert now["ema_decay"] == pytest.approx(before["ema_decay"], rel=1e-12)
    # The last digit may depend on the machine's mathematics library.
    assert now["rates"] == pytest.approx(before["rates"], rel=1e-12, abs=1e-15)
    assert len(now["rates"]) == 10


def test_golden_values_have_no_other_config() -> None:
    assert list(BEFORE) == names()


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
def test_shipped_config_passes_all_checks_without_warnings(path: Path) -> None:
    found = load_config(path)
    assert found.warnings == []
    assert config_problems(found.config, world_size=8) == []
    head = path.read_text().partition("\n_base_")[0]
    assert f"configs/{path.relative_to(CONFIGS).as_posix()}" in head, "no command in the comment at the top"


def test_names_of_configs_are_unique_and_every_base_is_used() -> None:
    assert len({path.stem for path in RUNNABLE}) == len(RUNNABLE)  # the name of the run folder
    used = {origin.file.resolve() for path in RUNNABLE for origin in load_config(path).origins.values() if origin.file}
    assert {path.resolve() for path in (CONFIGS / "_base_").rglob("*.yaml")} <= used


# Each switches off something that makes other keys of a recipe ineffective.
OFF = [
    *("mix.mixup_alpha=0", "mix.cutmix_alpha=0", "ema.decay=null", "ema.half_life_images=null", "train.sam_rho=null"),
    *("augment.erasing.prob=0", "augment.progressive.epochs=null", "augment.progressive.sizes_px=null"),
    *(f"augment.color_jitter.{name}=0" for name in ("brightness", "contrast", "saturation", "hue")),
    *("data.repeats=1", "distill.kind=none", "optimizer.lr_base_batch=null", "schedule.warmup_epochs=0"),
]


@pytest.mark.parametrize("stem", ["resnet50_rsb_a1", "resnet50_mosaic_hot", "deit_small_distilled_paper", "demo"])
def test_parts_of_a_recipe_can_be_switched_off_by_overrides(stem: str, tmp_path: Path) -> None:
    (path,) = (path for path in RUNNABLE if path.stem == stem)
    off = load_config(path, OFF)
    assert config_problems(off.config, world_size=8) == []
    (tmp_path / "dump.yaml").write_text(dump_yaml(off.config))
    assert load_config(tmp_path / "dump.yaml").config == off.config
