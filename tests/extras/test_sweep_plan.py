"""The runs of a sweep: values, names, folds, checks before anything starts."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import arguments, fails, succeeds

from imagenet_cls.commands import cli
from imagenet_cls.commands.train import load_for_training, train_parser
from imagenet_cls.data.datasets import DataSets, open_datasets
from imagenet_cls.errors import ConfigError
from imagenet_cls.extras.sweep.command import run_sweep, sweep_command, sweep_parser, visible_gpus
from imagenet_cls.extras.sweep.plan import SweepRun, plan_grid


def words(root: Any, **changes: Any) -> list[str]:
    """Arguments of sweep.py: those of train.py without the run folder."""
    return arguments(root, "", **changes)[:-2]


def grid(*overrides: str, folds: int | None = None, known: list[SweepRun] | None = None) -> Any:
    return plan_grid(["demo"], overrides, folds, known or [])


def test_grid_has_each_combination() -> None:
    runs = grid("optimizer.lr=0.1,0.2", "train.epochs=3", "seed=-1,0,1")
    assert len({run.name for run in runs}) == 6
    assert runs[4].name == "optimizer.lr=0.2,seed=0"
    assert runs[4].best_arguments == ["demo", "train.epochs=3", "optimizer.lr=0.2"]
    assert runs[4].arguments == [*runs[4].best_arguments, "seed=0"]
    same = grid("seed=0,-1,1", "train.epochs=3", "optimizer.lr=0.2,0.1")
    assert {run.name for run in same} == {run.name for run in runs}


def test_single_value_of_a_key_that_the_sweep_has_adds_a_run() -> None:
    known = grid("optimizer.lr=0.1,0.2", "seed=0,1")
    (run,) = grid("optimizer.lr=0.3", "seed=2", known=known)
    assert run.name == "optimizer.lr=0.3,seed=2"
    assert [run.name for run in grid("optimizer.lr=0.3")] == ["run"]


def test_other_values_are_other_settings() -> None:
    for text in ("1,true", "1,'1'", "01,1", "{a: 1, b: 2},null", "/a,/b #1"):
        assert len(grid(f"model.kwargs.size={text}")) == 2
    for text in ("[0.5, 0.5]", "'a,b'", "train-{0000..0003}.tar", "[1,2"):
        (run,) = grid(f"model.kwargs.size={text}")
        assert run.arguments == ["demo", f"model.kwargs.size={text}"]


def test_names_are_paths_of_one_part() -> None:
    names = [run.name for run in grid("model.name=hf-hub:a/b,c", "data.mean=[0.5,0.5],[0.1, 0.2]")]
    assert names[0] == "data.mean=0.5,0.5,model.name=hf-hub:a%2Fb"
    assert len(set(names)) == 4 and all(len(Path(name).parts) == 1 for name in names)


def dry_run(*argv: Any) -> list[list[str]]:
    """The arguments of train.py in the lines that a dry run prints."""
    lines = succeeds(sweep_command, *argv, "--dry-run").splitlines()
    commands = list(map(shlex.split, lines))
    assert all(command[:2] == ["python", "tools/train.py"] for command in commands)
    return [command[2:] for command in commands]


def opened(words: list[str]) -> DataSets:
    return open_datasets(load_for_training(cli.parse(train_parser(), words)).config.data)


def test_dry_run_prints_commands_and_writes_nothing(tmp_path: Path) -> None:
    argv = [*words("nowhere"), "seed=0,1", "--out", tmp_path / "out", "--gpus-per-run", 2]
    ends = [command[-5:] for command in dry_run(*argv)]
    folders = [str(tmp_path / "out" / name) for name in ("seed=0", "seed=1")]
    assert ends == [["--gpus", "2", "--work-dir", folder, "--resume"] for folder in folders]
    assert list(tmp_path.iterdir()) == []


def test_data_set_in_place_of_a_config_has_stratified_folds(digits: Path, tmp_path: Path) -> None:
    commands = dry_run(digits, "model=resnet10t", "--folds", 2, "--out", tmp_path / "out")
    one, other = (opened(command) for command in commands)
    assert len(one.val) + len(other.val) == len(one.train) + len(one.val)
    counts = np.array([np.bincount(fold.val.required_targets("")) for fold in (one, other)])
    assert (np.ptp(counts, axis=0) <= 1).all()


def test_folds_are_not_stratified_where_the_user_decides(tmp_path: Path) -> None:
    argv = [*words("nowhere", data__name="folder"), "--folds", 2, "--out", tmp_path]
    for given in ("data.stratify=false", r"data.group=\d+"):
        assert not any("data.stratify=true" in command for command in dry_run(*argv, given))


def test_all_mistakes_are_reported_at_once_and_nothing_starts(tmp_path: Path) -> None:
    wrong = [*words("nowhere"), "seed=0,1,-1", "optimizr.lr=1,2", "train.precision=fp32,fp33"]
    with pytest.raises(ConfigError) as raised:
        run_sweep(cli.parse(sweep_parser(), [*wrong, "--out", str(tmp_path / "out")]))
    keys = [line.split(": ")[1] for line in raised.value.lines]  # of each wrong value one
    assert keys == ["optimizr", "seed", "train.precision", "optimizr"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        "--table",  # without a sweep
        "--table --dry-run",
        "--launcher slurm",
        "--folds 1",
        "data.fold=[0,5] --folds 2",
        "checkpoint.best=top1,loss",
        "seed=0,1 --gpus-per-run 2 --parallel 2",
        "seed=0..2",  # a range of earlier versions
    ],
)
def test_arguments_without_sense_are_errors_and_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    fails(2, sweep_command, "demo", *words.split(), "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_gpus_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = sweep_parser().parse_args(["--parallel=2", "--out=sweep"])
    for visible, gpus in (("", []), ("-1", []), ("GPU-a,1", ["GPU-a", "1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus(arguments, {"auto"}) == gpus


_RUN = {"name": "seed=0", "values": {"seed": "0"}, "fixed": ["demo"]}


@pytest.mark.parametrize(
    "content",
    [
        {"name": 1},
        *([_RUN | {key: [None]}] for key in ("name", "values", "fixed", "of_folds")),
    ],
)
def test_other_content_of_sweep_json_is_an_error_that_names_it(
    tmp_path: Path, content: Any
) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    for argv in (["--table"], ["demo", "seed=1", "--dry-run"]):
        assert "sweep.json" in fails(4, sweep_command, *argv, "--out", tmp_path)
