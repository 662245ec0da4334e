"""Schedules in runs: the reported learning rates against torch's schedulers; plateau after a resume."""

import json
from pathlib import Path

import pytest
import torch
from helpers import arguments, evaluations, losses, newest, train_here
from torch.optim import lr_scheduler

PER_EPOCH = 11


def rates(work_dir: Path) -> list[float]:
    """The learning rate of every step."""
    records = [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["lr"] for record in records if record["kind"] == "train"]


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.03, momentum=0.9)


def test_plateau_resumes_with_the_same_rates_and_bits(digits: Path, tmp_path: Path) -> None:
    """The stop within an epoch adds an evaluation, which the schedule must ignore."""

    def words(folder: str, **more: object) -> list[str]:
        plateau = {"schedule.name": "plateau", "schedule.warmup_epochs": 0, "train.epochs": 3}
        # Nothing is good enough, so each evaluation but the first counts.
        plateau |= {f"schedule.kwargs.{key}": value for key, value in {"patience": 0, "threshold": 9}.items()}
        return arguments(digits, tmp_path / folder, **plateau, **more)

    train_here(words("whole"))
    top1s = [record["top1_pct"] for record in evaluations(tmp_path / "whole")]
    optimizer = sgd()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=9)
    expected = []
    for top1 in top1s:
        expected += [optimizer.param_groups[0]["lr"]] * PER_EPOCH
        scheduler.step(top1)
    assert rates(tmp_path / "whole") == pytest.approx(expected)
    assert len(set(expected)) == 2

    train_here(words("parts", train__max_steps=PER_EPOCH + 4))
    train_here([*words("parts"), "--resume"])
    assert rates(tmp_path / "parts") == rates(tmp_path / "whole")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json"):
        whole, parts = newest(tmp_path / "whole") / name, newest(tmp_path / "parts") / name
        assert parts.read_bytes() == whole.read_bytes(), name


def test_one_cycle_changes_the_momentum(digits: Path, tmp_path: Path) -> None:
    kwargs = {"min_momentum": 0.5, "max_momentum": 0.95, "pct_start": 0.4}
    settings = {"schedule.name": "one_cycle", "schedule.warmup_epochs": 0}
    settings |= {f"schedule.kwargs.{key}": value for key, value in kwargs.items()}
    train_here(arguments(digits, tmp_path / "run", **settings, train__max_steps=9))
    optimizer = sgd()
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, 0.03, total_steps=2 * PER_EPOCH, pct_start=0.4, base_momentum=0.5, max_momentum=0.95
    )
    groups = []
    for _ in range(9):
        groups.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    assert rates(tmp_path / "run") == pytest.approx([lr for lr, _ in groups])
    saved = json.loads((newest(tmp_path / "run") / "optimizer.json").read_text())
    assert [group["values"]["momentum"] for group in saved["groups"]] == pytest.approx([groups[-1][1]])


@pytest.mark.nightly
def test_by_epoch_changes_the_rate_between_epochs_only(digits: Path, tmp_path: Path) -> None:
    settings = {"schedule.name": "cosine", "schedule.warmup_epochs": 1, "schedule.warmup_start_factor": 0.01}
    train_here(arguments(digits, tmp_path / "run", **settings, schedule__by_epoch="true", train__epochs=3))
    by_epoch = [0.03 * 0.01, 0.03, 0.03 / 2]
    assert rates(tmp_path / "run") == pytest.approx([rate for rate in by_epoch for _ in range(PER_EPOCH)])


@pytest.mark.nightly
def test_plateau_ignores_the_evaluation_at_max_steps(digits: Path, tmp_path: Path) -> None:
    """At the end of an epoch without a scheduled evaluation."""
    plateau = {"schedule.name": "plateau", "schedule.warmup_epochs": 0, "eval.every_epochs": 2, "train.epochs": 5}
    plateau |= {"schedule.kwargs.patience": 0, "schedule.kwargs.threshold": 9}
    train_here(arguments(digits, tmp_path / "whole", **plateau))
    train_here(arguments(digits, tmp_path / "parts", **plateau, train__max_steps=3 * PER_EPOCH))
    train_here([*arguments(digits, tmp_path / "parts", **plateau), "--resume"])
    assert rates(tmp_path / "parts") == rates(tmp_path / "whole") and len(set(rates(tmp_path / "whole"))) == 2
