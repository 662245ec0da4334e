"""Schedules in runs: the reported learning rates against torch's schedulers; plateau after a
resume.
"""

from pathlib import Path

import pytest
from helpers import assert_resumes, records

PER_EPOCH = 11


def rates(work_dir: Path) -> list[float]:
    """The learning rate of every step."""
    return [record["lr"] for record in records(work_dir, "train")]


PLATEAU = {"schedule.name": "plateau", "schedule.warmup_epochs": 0}
# Nothing is good enough, so each evaluation but the first counts.
PLATEAU |= {"schedule.kwargs.patience": 0, "schedule.kwargs.threshold": 9}


def test_plateau_resumes_with_the_same_rates_and_bits(digits: Path, tmp_path: Path) -> None:
    """The stop within an epoch adds an evaluation, which the schedule must ignore."""
    settings = PLATEAU | {"train.epochs": 3, "train.max_steps": 2 * PER_EPOCH + 1}
    assert_resumes(digits, tmp_path, PER_EPOCH + 4, **settings)
    expected = [0.03] * (2 * PER_EPOCH) + [0.003]
    assert rates(tmp_path / "whole") == rates(tmp_path / "parts") == pytest.approx(expected)
