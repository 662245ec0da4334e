"""The number of data workers of a rank, and the warning if the loop waits for them."""

import os
from pathlib import Path

import pytest
from helpers import arguments, records, single_rank, train_here

from imagenet_cls.commands.train import train_command
from imagenet_cls.config.schema import DataConfig, TrainConfig
from imagenet_cls.engine import loaders
from imagenet_cls.engine.loaders import DataWaitCheck, auto_workers
from imagenet_cls.engine.plan import plan_run


@pytest.mark.parametrize(
    ("cpus", "num_batches", "devices", "expected"),
    [
        (0.5, 100, 1, 1),
        (3.9, 100, 1, 3),
        (4, 100, 1, 3),  # one is left to the process that trains
        (128, 100, 1, 16),
        (128, 1000, 4, 64),
        (8, 5, 1, 5),
    ],
)
def test_auto_workers_of_a_rank(cpus: float, num_batches: int, devices: int, expected: int) -> None:
    assert auto_workers(cpus, num_batches, devices) == expected


@pytest.mark.parametrize(
    ("workers", "shown"), [("auto", "4 per rank"), ("null", "4 per rank"), ("3", "3 per rank\n")]
)
def test_startup_table_shows_the_data_workers(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workers: str,
    shown: str,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    words = arguments(digits, tmp_path / "run", data__num_workers=workers)
    assert train_command([*words, "--dry-run"]) == 0
    assert shown in capsys.readouterr().out


def test_synthetic_data_has_no_workers_and_no_prefetched_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # of images from files, such batches would not fit into shared memory
    changes = {"data__num_workers": 4, "data__prefetch_batches": 10**8, "train__epochs": 10**5}
    argv = arguments(tmp_path, tmp_path / "run", data__name="synthetic", **changes)
    argv = [word for word in argv if not word.startswith("data.root=")] + ["--dry-run"]
    assert train_command(argv) == 0
    assert "data workers" not in capsys.readouterr().out


def warnings_of(name: str, intervals: list[tuple[int, float]]) -> list[int]:
    """The intervals, counted from 0, that get a warning. intervals: epoch and share of the time
    spent waiting.
    """
    plan = plan_run(TrainConfig(), 10_000, 1, 1)
    check = DataWaitCheck(DataConfig(name, num_workers=1), plan, single_rank())
    return [
        number
        for number, (epoch, wait) in enumerate(intervals)
        if check.add_interval([{"epoch": epoch}, {"epoch": epoch, "data_wait_pct": wait}])
    ]


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(0, 50.0)] * 20, [5]),  # once; the first interval does not count
        ([(0, 20.0)] * 20, []),
        ([(0, 50.0), *[(0, 50.0)] * 4, (0, 10.0), *[(0, 50.0)] * 5], [10]),  # consecutive ones
        ([(epoch, 50.0) for epoch in range(20)], []),  # epochs of one interval
        ([(0, 0.0), (0, 30.0), (0, 30.0), (1, 0.0), (1, 30.0), (1, 30.0), (1, 30.0)], [6]),
    ],
)
def test_data_wait_warning_after_five_consecutive_intervals(
    intervals: list[tuple[int, float]], expected: list[int]
) -> None:
    assert warnings_of("folder", intervals) == expected
    assert warnings_of("synthetic", intervals) == []


def test_data_wait_warning_is_an_event_of_the_run(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loaders, "_MAX_WAIT_PCT", -1.0)  # every interval counts
    train_here(arguments(digits, tmp_path / "run", train__max_steps=8))
    events = records(tmp_path / "run", "event")
    (event,) = [event for event in events if "waited for data" in event["message"]]
    assert event["step"] == 6
    assert capsys.readouterr().out.count(event["message"]) == 1
