"""Schedules in runs: the reported learning rates against torch's schedulers; plateau after a
resume.
"""

import json
from pathlib import Path

import pytest
import torch
from helpers import arguments, assert_resumes, newest, records, train_here
from torch.optim import lr_scheduler

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


def test_one_cycle_changes_the_momentum(digits: Path, tmp_path: Path) -> None:
    kwargs = {"min_momentum": 0.5, "max_momentum": 0.95, "pct_start": 0.4}
    settings = {"schedule.name": "one_cycle", "schedule.warmup_epochs": 0}
    settings |= {f"schedule.kwargs.{key}": value for key, value in kwargs.items()}
    train_here(arguments(digits, tmp_path / "run", **settings, train__max_steps=9))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.03, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(
        optimizer,
        0.03,
        total_steps=2 * PER_EPOCH,
        pct_start=0.4,
        base_momentum=0.5,
        max_momentum=0.95,
    )
    groups = []
    for _ in range(9):
        groups.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    assert rates(tmp_path / "run") == pytest.approx([lr for lr, _ in groups])
    saved = json.loads((newest(tmp_path / "run") / "optimizer.json").read_text())
    assert [group["values"]["momentum"] for group in saved["groups"]] == pytest.approx(
        [groups[-1][1]]
    )


@pytest.mark.nightly
def test_plateau_ignores_the_evaluation_at_max_steps(digits: Path, tmp_path: Path) -> None:
    """At the end of an epoch without a scheduled evaluation."""
    plateau = PLATEAU | {"eval.every_epochs": 2, "train.epochs": 5}
    train_here(arguments(digits, tmp_path / "whole", **plateau))
    train_here(arguments(digits, tmp_path / "parts", **plateau, train__max_steps=3 * PER_EPOCH))
    train_here([*arguments(digits, tmp_path / "parts", **plateau), "--resume"])
    assert (
        rates(tmp_path / "parts") == rates(tmp_path / "whole")
        and len(set(rates(tmp_path / "whole"))) == 2
    )
