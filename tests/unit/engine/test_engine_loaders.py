"""The number of data workers of a rank, and the warning if the loop waits for them."""

import os
from pathlib import Path

import pytest
from helpers import arguments

from imagenet_cls.commands.train import train_command
from imagenet_cls.engine.loaders import auto_workers


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


def test_synthetic_data_has_no_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = arguments(tmp_path, tmp_path / "run", data__name="synthetic", data__num_workers=4)
    argv = [word for word in argv if not word.startswith("data.root=")] + ["--dry-run"]
    assert train_command(argv) == 0
    assert "data workers" not in capsys.readouterr().out
