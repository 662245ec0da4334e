"""The number of data workers of a rank."""

import os
from pathlib import Path

import pytest
from helpers import arguments

from imagenet_cls.commands.train import train_command
from imagenet_cls.engine.loaders import auto_workers


@pytest.mark.parametrize(
    ("cpus", "num_batches", "expected"),
    [
        (0.5, 100, 1),
        (1, 100, 1),
        (2, 100, 2),
        (3.9, 100, 3),
        (4, 100, 3),  # one is left to the process that trains
        (7.5, 100, 6),
        (17, 100, 16),
        (128, 100, 16),
        (8, 5, 5),
        (8, 1, 1),
    ],
)
def test_auto_workers_of_a_rank(cpus: float, num_batches: int, expected: int) -> None:
    assert auto_workers(cpus, num_batches) == expected


@pytest.mark.parametrize(
    ("workers", "shown"),
    [
        ("auto", "4 per rank (data.num_workers=auto: 5 CPUs per rank)"),
        ("null", "4 per rank (data.num_workers=auto: 5 CPUs per rank)"),
        ("3", "3 per rank\n"),
    ],
)
def test_startup_table_shows_the_data_workers(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: str,
    shown: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    assert train_command([*arguments(digits, tmp_path / "run", data__num_workers=workers), "--dry-run"]) == 0
    assert shown in capsys.readouterr().out
