"""sweep.py: values, names, folds, checks before anything starts, the table; with its runs: two at
once, failed, stopped.
"""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import Mock

import pytest
from helpers import (
    REPOSITORY,
    arguments,
    call,
    environment,
    evaluations,
    fails,
    run,
    steps_done,
    succeeds,
    wait_for,
)

from imagenet_cls.checkpoint.folders import read_state
from imagenet_cls.errors import ConfigError
from imagenet_cls.extras.sweep import results
from imagenet_cls.extras.sweep.command import sweep_command
from imagenet_cls.extras.sweep.plan import load_grid, split_values


def table(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "table.csv").read_text().splitlines()))


def test_grid_has_each_combination() -> None:
    runs = load_grid(["demo"], ["optimizer.lr=0.1,0.2", "train.epochs=3", "seed=2,0,1"], None)
    assert len({run.name for run in runs}) == 6
    assert runs[4].name == "optimizer.lr=0.2,seed=0"
    assert runs[4].best_arguments == ["demo", "train.epochs=3", "optimizer.lr=0.2"]
    assert runs[4].arguments == [*runs[4].best_arguments, "seed=0"]
    assert [run.name for run in load_grid(["demo"], ["train.epochs=3"], None)] == ["run"]


def test_commas_in_brackets_and_quotes_belong_to_a_value() -> None:
    for text in ("1,true", "1,'1'", "{a: 1, b: 2},null"):
        assert len(split_values(text)) == 2
    for text in ("[0.5, 0.5]", "'a,b'", "train-{0000..0003}.tar", "[1,2"):
        assert split_values(text) == [text]


def test_names_are_paths_of_one_part() -> None:
    values = ["model.name=hf-hub:a/b,c", "data.mean=[0.5,0.5,0.5],[0.1,0.2,0.3]"]
    names = [run.name for run in load_grid(["demo"], values, None)]
    assert names[0] == "data.mean=0.5,0.5,0.5,model.name=hf-hub:a%2Fb"
    assert len(set(names)) == 4 and not any("/" in name for name in names)


def test_folds_are_stratified_unless_the_user_decides(digits: Path) -> None:
    for given in ([], ["data.stratify=false"], [r"data.group=\d+"]):
        runs = load_grid([str(digits)], given, 2)
        assert [run.name for run in runs] == ["data.fold=0,2", "data.fold=1,2"]
        assert {run.config.data.stratify for run in runs} == {not given}
        assert {run.config.data.val_fraction for run in runs} == {None}


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        load_grid(["demo"], ["seed=0,1,-1", "optimizr.lr=1,2", "train.precision=fp32,fp33"], None)
    keys = [line.split(": ")[1] for line in raised.value.lines]  # of each wrong value one
    assert sorted(keys) == ["optimizr", "optimizr", "seed", "train.precision"]


@pytest.mark.parametrize(
    "words",
    [
        "--table",  # without a run
        "--table --dry-run",
        "--launcher slurm",
        "--folds 1",
        "data.fold=[0,5] --folds 2",
        "checkpoint.best=top1,loss",
        "seed=0,1 --gpus-per-run 2 --parallel 2",
        "seed=0,-1",
    ],
)
def test_wrong_arguments_are_errors_and_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    fails(2, sweep_command, "demo", *words.split(), "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_settings_with_the_most_finished_runs_are_first_and_of_these_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = load_grid(["demo"], ["optimizer.lr=1,2,3", "seed=0,1"], None)
    found = [{"best": {"raw": {"top1_pct": top1}}} for top1 in (60.0, 62.0, 70.0, 74.0, 99.0)]
    found.append({"best": {}})  # a run without a finite loss has no result
    monkeypatch.setattr(results, "finished_progress", Mock(side_effect=found))
    results.show_results(tmp_path, runs)
    rows = [list(row.values()) for row in table(tmp_path)]
    assert [row[:2] + row[3:] for row in rows] == [
        ["2", "72.0", "2", "2"],
        ["1", "61.0", "2", "2"],
        ["3", "99.0", "1", "2"],
    ]
    assert float(rows[0][2]) == pytest.approx(8**0.5) and rows[2][2] == ""
    assert f"--work-dir {tmp_path}/best demo optimizer.lr=2\n" in capsys.readouterr().out


# ---- with runs


def words(digits: Path, out: Path, **changes: Any) -> list[str]:
    """Arguments of sweep.py for runs of two steps."""
    changes = {"train__max_steps": 2, "eval__batch_size": 512} | changes
    return [*arguments(digits, out, **changes)[:-2], "--out", str(out)]


def best_top1(folder: Path) -> float:
    return max(record["top1_pct"] for record in evaluations(folder))


def test_two_runs_at_once_of_which_one_fails(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of the environment, which are not there, and the CPUs are divided."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.delenv("OMP_NUM_THREADS")
    out = tmp_path / "out"
    argv = words(digits, out, model__checkpoint="null,missing.pth")
    code, printed, err = call(sweep_command, *argv, "--parallel", 2)
    good, bad = "model.checkpoint=null", "model.checkpoint=missing.pth"
    assert code == 7 and bad in err and good not in err
    assert f"{out / bad}.log" in printed
    assert "missing.pth" in (out / f"{bad}.log").read_text()
    assert [row["finished"] for row in table(out)] == ["1", "0"]
    assert float(table(out)[0]["mean top1_pct"]) == best_top1(out / good)
    assert '"CUDA_VISIBLE_DEVICES": "5"' in (out / good / "env.json").read_text()
    assert read_state(out / good)["cpu_threads"] == max(1, len(os.sched_getaffinity(0)) // 2)

    command = f"--work-dir {out / bad} --resume\n"
    unfinished = succeeds(sweep_command, *argv, "--dry-run")
    assert unfinished.endswith(command) and good not in unfinished
    # `train --resume` reports that the config of the finished run is another one now
    assert good in succeeds(sweep_command, *argv, "optimizer.lr=0.01", "--dry-run")
    assert "the best setting" in succeeds(sweep_command, *argv, "data.num_workers=1", "--table")
    kept = table(out)
    succeeds(sweep_command, *argv, "optimizer.lr=0.01", "--table")  # of another sweep
    assert table(out) == kept


@pytest.mark.nightly
def test_sweep_that_is_stopped_continues(digits: Path, tmp_path: Path) -> None:
    """A finished run is kept, and an interrupted one resumes."""
    slow = {"model": "noisy", "model__kwargs": "{pause_sec: 0.1}", "train__max_steps": 14}
    tool = [sys.executable, str(REPOSITORY / "tools" / "sweep.py")]
    out = tmp_path / "out"
    command = [*tool, *words(digits, out, **slow, checkpoint__every_steps=2, seed="0,1")]
    first, second = out / "seed=0", out / "seed=1"
    with subprocess.Popen(command, env=environment(), start_new_session=True) as process:
        wait_for(lambda: steps_done(second) >= 4, "the second run")
        process.send_signal(signal.SIGINT)
        process.wait(240)
    assert process.returncode == 130
    log = Path(f"{first}.log").read_text()
    assert run(command).returncode == 0
    assert Path(f"{first}.log").read_text() == log
    assert "resumed from" in Path(f"{second}.log").read_text()
    (row,) = table(out)
    found = [best_top1(first), best_top1(second)]
    assert list(map(float, row.values())) == [fmean(found), stdev(found), 2, 2]


@pytest.mark.nightly
def test_search_of_the_example_continues(digits: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    config, *overrides = arguments(digits, tmp_path / "run", train__max_steps=2)[:-2]
    for trials in (2, 1):
        command = [sys.executable, REPOSITORY / "examples" / "search.py", config, tmp_path, trials]
        done = run([*map(str, command), *overrides])
        assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("trial-*/config.yaml"))) == 3
