"""The table of a sweep: which runs are of one setting, and the order of the settings."""

from pathlib import Path

import pytest

from imagenet_cls.commands import sweep_results
from imagenet_cls.commands.sweep_plan import plan_grid, write_runs
from imagenet_cls.commands.sweep_results import read_table


def test_runs_with_other_arguments_are_of_another_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = plan_grid(["demo"], ["optimizer.lr=0.1,0.2", "seed=0,1", "train.epochs=5"], None, [])
    runs += plan_grid(["demo"], ["optimizer.lr=0.1", "seed=2", "train.epochs=9"], None, runs)
    write_runs(tmp_path, runs)
    top1 = dict(zip([run.name for run in runs], [60.0, 62.0, 70.0, 72.0, 99.0], strict=True))
    monkeypatch.setattr(
        sweep_results, "best_result", lambda folder: ("top1_pct", top1[folder.name])
    )
    metric, rows = read_table(tmp_path)
    assert metric == "top1_pct"
    assert [(row.setting, row.results) for row in rows] == [
        ({"optimizer.lr": "0.2", "others": "train.epochs=5"}, [70.0, 72.0]),
        ({"optimizer.lr": "0.1", "others": "train.epochs=5"}, [60.0, 62.0]),
        ({"optimizer.lr": "0.1", "others": "train.epochs=9"}, [99.0]),  # of one run
    ]


def test_other_numbers_of_folds_are_other_settings(tmp_path: Path) -> None:
    runs = plan_grid(["demo"], ["seed=0"], 2, [])
    write_runs(tmp_path, runs)
    _, (row,) = read_table(tmp_path)
    assert row.setting == {} and len(row.runs) == 2
    write_runs(tmp_path, [*runs, *plan_grid(["demo"], ["seed=0"], 3, runs)])
    assert sorted(len(row.runs) for row in read_table(tmp_path)[1]) == [2, 3]


def test_whole_numbers_below_zero_are_a_range() -> None:
    runs = plan_grid(["demo"], ["augment.pad_px=-1..+1"], None, [])
    assert [run.values["augment.pad_px"] for run in runs] == ["-1", "0", "1"]
