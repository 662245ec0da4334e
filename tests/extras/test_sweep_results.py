"""The table of a sweep: which runs are of one setting, and the order of the settings."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from helpers import arguments, edit_state, fails, newest, succeeds, train_here

from imagenet_cls.config.metrics import BY_NAME
from imagenet_cls.extras.sweep import results as sweep_results
from imagenet_cls.extras.sweep.command import sweep_command
from imagenet_cls.extras.sweep.plan import plan_grid, write_runs
from imagenet_cls.extras.sweep.results import read_table, show_results


def test_runs_with_other_arguments_are_of_another_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = plan_grid(["demo"], ["optimizer.lr=0.1,0.2", "seed=0,1", "train.epochs=5"], None, [])
    runs += plan_grid(["demo"], ["optimizer.lr=0.1", "seed=2", "train.epochs=9"], None, runs)
    write_runs(tmp_path, runs)
    results = [(BY_NAME["top1"], value) for value in (60.0, 62.0, 70.0, 72.0, 99.0)]
    monkeypatch.setattr(sweep_results, "best_result", Mock(side_effect=results))
    metric, rows = read_table(tmp_path)
    assert metric == BY_NAME["top1"]
    assert [(row.setting, row.results) for row in rows] == [
        ({"optimizer.lr": "0.2", "others": "train.epochs=5"}, [70.0, 72.0]),
        ({"optimizer.lr": "0.1", "others": "train.epochs=5"}, [60.0, 62.0]),
        ({"optimizer.lr": "0.1", "others": "train.epochs=9"}, [99.0]),  # of one run
    ]


@pytest.mark.filterwarnings("error")
def test_best_setting_is_compared_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_runs(tmp_path, plan_grid(["demo"], ["optimizer.lr=1,2", "seed=0,1"], None, []))
    for note, *results in (
        ("setting:", 80.0, 80.0, 90.0, 91.0),
        ("1 other", 60.0, 62.0, 62.0, 64.0),
        ("1 other", 80.0, 80.0, 90.0, 90.0),  # a test needs a variance
        ("1 other", 60.0, 62.0, 99.0, None),
        ("one run", 60.0, None, 70.0, None),
        ("setting:", 60.0, None, None, None),
    ):
        found = [value and (BY_NAME["top1"], value) for value in results]
        monkeypatch.setattr(sweep_results, "best_result", Mock(side_effect=found))
        show_results(tmp_path)
        assert note in capsys.readouterr().out.splitlines()[-1]


def test_other_numbers_of_folds_are_other_settings(tmp_path: Path) -> None:
    runs = plan_grid(["demo"], ["seed=0"], 2, [])
    write_runs(tmp_path, [*runs, *plan_grid(["demo"], ["seed=0"], 3, runs)])
    assert sorted(len(row.runs) for row in read_table(tmp_path)[1]) == [2, 3]


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Arguments of a run of one step without its seed, of which a config file sets some, and its
    folder.
    """
    folder = tmp_path_factory.mktemp("trained")
    demo, *overrides = arguments(digits, folder / "seed=0")[:-2]
    (folder / "base.yaml").write_text("train: {max_steps: 1}")
    (folder / "sweep.yaml").write_text(f"_base_: [{demo}, base.yaml]")
    words = [str(folder / "sweep.yaml"), *overrides]
    train_here([*words, "seed=0", "--work-dir", str(folder / "seed=0")])
    return words, folder / "seed=0"


def copy_runs(
    trained: tuple[list[str], Path], out: Path, seeds: str, edit: Callable[[Any, int], object]
) -> None:
    """Write a sweep of copies of a run. edit: changes the `state.json` of a seed."""
    (source, *overrides), folder = trained
    runs = plan_grid([source], [*overrides, f"seed={seeds}"], None, [])
    for seed, run in enumerate(runs):
        copy = Path(shutil.copytree(folder, out / run.name))

        def edit_seed(state: dict[str, Any], seed: int = seed, copy: Path = copy) -> None:
            state["config"]["seed"] = seed
            edit(state, seed)
            (copy / "config.yaml").write_text(yaml.safe_dump(state["config"]))

        edit_state(newest(copy), edit_seed)
    write_runs(out, runs)


@pytest.mark.parametrize(
    ("place", "value", "of_seeds", "is_comparable"),
    [
        ("config.train.max_steps", 9, (1,), False),
        ("config.train.max_steps", 9, (0, 1), True),  # the file was changed after both
        ("config.model.pretrained", True, (1,), False),
        ("config.checkpoint.best", "loss", (1,), False),
        ("config.seed", 9, (0, 1), False),  # not what the arguments say
        ("val_digest", "other", (1,), False),
        ("val_digest", "other", (0, 1), True),
        ("data_sizes", "other", (1,), False),
        ("config.data.root", "moved", (1,), True),
        ("config.log.every_steps", 7, (1,), True),
    ],
)
def test_runs_of_one_setting_with_other_configs_or_data_are_an_error(
    trained: tuple[list[str], Path],
    tmp_path: Path,
    place: str,
    value: Any,
    of_seeds: tuple[int, ...],
    is_comparable: bool,
) -> None:
    *sections, name = place.split(".")

    def edit(state: dict[str, Any], seed: int) -> None:
        for section in sections:
            state = state[section]
        if seed in of_seeds:
            state[name] = value

    copy_runs(trained, tmp_path, "0,1", edit)
    if is_comparable:
        assert "the best setting" in succeeds(sweep_command, "--table", "--out", tmp_path)
    else:
        key = {"val_digest": "validation images", "data_sizes": "training files"}.get(name, name)
        assert key in fails(2, sweep_command, "--table", "--out", tmp_path)


def test_changed_config_file_is_an_error_before_another_run_starts(
    trained: tuple[list[str], Path], tmp_path: Path
) -> None:
    copy_runs(trained, tmp_path, "0", lambda state, seed: None)
    words, folder = trained
    base = folder.with_name("base.yaml")
    before = base.read_text()
    base.write_text("train: {max_steps: 2}")
    words = [*words, "seed=1", "--out", str(tmp_path)]
    assert "train.max_steps" in fails(2, sweep_command, *words)
    assert not (tmp_path / "seed=1.log").exists()
    base.write_text(before)
    for other in ("train.max_steps=2", "train.max_steps=1"):  # another setting, and the same one
        succeeds(sweep_command, *words, other, "--dry-run")
