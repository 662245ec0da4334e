"""Every shipped config loads, passes all checks, and gives the settings, networks, groups and rates
in golden.json.

After an intended change: `python tests/configs/golden.py --write`; the diff has one line for each
changed config.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from golden import CONFIGS, GOLDEN, golden_of, loaded, names

from imagenet_cls.config.load import dump_yaml, load_config
from imagenet_cls.engine.component_checks import config_problems, rank_problems
from imagenet_cls.engine.plan import part_sizes, plan_run

BEFORE: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())
# One config of each family in the default run, all with `-m nightly`.
FAST = {
    *(
        "demo",
        "own_dataset",
        "resnet50",
        "resnet50_rsb_a1",
        "resnet18_ffcv_16e",
        "resnet50_mosaic_hot",
        "resnet_sgd_step",
    ),
    *(
        "mobilenet_v2_tv_v1",
        "efficientnet_b0_nvidia",
        "regnet_y_400mf_tv_v1",
        "deit_small_paper",
        "deit_distilled",
    ),
}
RUNNABLE = sorted(
    path for path in CONFIGS.rglob("*.yaml") if "_base_" not in path.relative_to(CONFIGS).parts
)


def by_speed(paths: Iterable[str]) -> list[Any]:
    """Parameters of a test: the paths of configs, all but the fast ones nightly."""
    return [
        pytest.param(path, marks=[] if Path(path).stem in FAST else pytest.mark.nightly)
        for path in paths
    ]


@pytest.mark.parametrize("name", by_speed(names()))
def test_config_gives_golden_values(name: str) -> None:
    before, now = BEFORE[name], golden_of(loaded(CONFIGS / name))
    for key in ("settings", "parameters", "groups", "steps_per_epoch"):
        assert now[key] == before[key], key
    assert now["ema_decay"] == pytest.approx(before["ema_decay"], rel=1e-12)
    # The last digit may depend on the machine's mathematics library.
    assert now["rates"] == pytest.approx(before["rates"], rel=1e-12, abs=1e-15)
    assert len(now["rates"]) == 10


def test_golden_values_have_no_other_config() -> None:
    assert list(BEFORE) == names()


def test_shipped_configs_load_without_warnings_and_use_every_base() -> None:
    used = set()
    for path in RUNNABLE:
        found = load_config(path)
        assert found.warnings == [], path
        used |= {
            Path(origin.rpartition(":")[0]).resolve() for origin in found.origins.values() if origin
        }
        head = path.read_text().partition("\n_base_")[0]
        assert f"configs/{path.relative_to(CONFIGS).as_posix()}" in head, (
            "no command in the comment at the top"
        )
    assert {path.resolve() for path in (CONFIGS / "_base_").rglob("*.yaml")} <= used
    assert len({path.stem for path in RUNNABLE}) == len(RUNNABLE)  # the name of the run folder


@pytest.mark.parametrize("path", by_speed(map(str, RUNNABLE)))
def test_shipped_config_passes_all_checks(path: str) -> None:
    assert config_problems(loaded(Path(path)), world_size=8) == []


def test_shipped_configs_divide_their_batch_on_any_number_of_ranks() -> None:
    for path in RUNNABLE:
        config = loaded(path)
        train = config.train
        for ranks in (*range(1, 9), 12, 24):
            assert rank_problems(config, ranks) == [], path
            plan = plan_run(train, train.global_batch_size, ranks)
            assert (
                0
                < part_sizes(train.global_batch_size, plan.forward_passes)[-1]
                == plan.device_micro_batch
            ), path
            assert plan.device_micro_batch <= (train.micro_batch_size or train.global_batch_size), (
                path
            )


# Each switches off something that makes other keys of a recipe ineffective.
OFF = [
    *(
        "mix.mixup_alpha=0",
        "mix.cutmix_alpha=0",
        "ema.decay=null",
        "ema.half_life_images=null",
        "train.sam_rho=null",
    ),
    *(
        "augment.erasing.prob=0",
        "augment.progressive.epochs=null",
        "augment.progressive.sizes_px=null",
    ),
    *(f"augment.color_jitter.{name}=0" for name in ("brightness", "contrast", "saturation", "hue")),
    *(
        "data.repeats=1",
        "distill.kind=none",
        "optimizer.lr_base_batch=null",
        "schedule.warmup_epochs=0",
    ),
]


@pytest.mark.parametrize(
    "stem", ["resnet50_rsb_a1", "resnet50_mosaic_hot", "deit_small_distilled_paper", "demo"]
)
def test_parts_of_a_recipe_can_be_switched_off_by_overrides(stem: str, tmp_path: Path) -> None:
    (path,) = (path for path in RUNNABLE if path.stem == stem)
    off = load_config(path, OFF)
    assert config_problems(off.config, world_size=8) == []
    (tmp_path / "dump.yaml").write_text(dump_yaml(off.config))
    assert load_config(tmp_path / "dump.yaml").config == off.config
