"""Wrong options, missing files and NaN: the exit code, an error that names the cause, and no work
lost. Wrong configs are in test_bad_recipes.py.
"""

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    DEMO,
    arguments,
    call,
    evaluations,
    fails,
    losses,
    newest,
    records,
    state_of,
    train_here,
)
from torch import Tensor
from torch.nn import functional

from imagenet_cls.commands.train import train_command
from imagenet_cls.data.samplers import EpochSampler


def contents(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes, except the lock and the logs, which every attempt writes to."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock" and path.parent.name != "logs"
    }


@pytest.fixture(scope="module")
def finished(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_here(arguments(digits, folder))
    return folder


@pytest.mark.parametrize(
    ("code", "place", "options", "named"),
    [
        (2, "new", "train.global_batch_size=1 device=cpu --gpus 2", "train.global_batch_size: "),
        (3, "new", "train.global_batch_size=5000", "1438"),
        (4, "new", f"model.checkpoint={DEMO}", "demo.yaml"),
        (2, "finished", "", "step 22"),
        (2, "finished", "--resume --allow-change optimzer.lr", "'optimzer.lr'"),
        (4, "finished", "--resume optimizer.lr=0.5", "optimizer.lr: 0.03 -> 0.5"),
        (3, "finished", "--overwrite data.name=folder data.root=nowhere", "nowhere"),
        (4, "finished", "--overwrite --resume-from nowhere", "nowhere"),
        (0, "new", "--dry-run", "dry run: step 1 has loss "),
        (0, "finished", "--dry-run --resume", "step 22"),
        (0, "damaged", "--dry-run", "already holds a run"),
        (4, "damaged", "--dry-run --resume", "damaged"),
        (5, "/proc/run", "--dry-run", "/proc/run"),
    ],
)
def test_dry_run_or_run_that_cannot_begin_changes_no_file(
    digits: Path, finished: Path, tmp_path: Path, code: int, place: str, options: str, named: str
) -> None:
    shutil.copytree(finished, tmp_path / "finished")
    shutil.copytree(finished, tmp_path / "damaged")
    for state in (tmp_path / "damaged" / "checkpoints").glob("step-*/state.json"):
        state.write_text("")
    before = contents(tmp_path)
    words = [*arguments(digits, tmp_path / place), *options.split()]
    found, out, err = call(train_command, *words)
    assert found == code and named in out + err, err
    assert contents(tmp_path) == before and not (tmp_path / "new").exists()
    assert code != 0 or ("1438 images" in out and "359 images" in out)


# ---- NaN


def nan_after(steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy that is NaN after a number of training steps."""
    calls = 0

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return functional.cross_entropy(logits, targets) * (1.0 if calls <= steps else float("nan"))

    return loss


def with_nan_after(steps: int, **changes: Any) -> dict[str, Any]:
    """Changes of a config: 22 steps on synthetic images, with the loss above."""
    return {
        "data.name": "synthetic",
        "data.kwargs": "{train_images: 88, val_images: 20, num_classes: 10, size_px: 16}",
        "train.global_batch_size": 8,
        "loss.name": f"{__name__}:nan_after",
        "loss.kwargs": f"{{steps: {steps}}}",
    } | changes


def test_loss_that_turns_nan_exits_with_6_and_keeps_the_last_checkpoint(
    digits: Path, tmp_path: Path
) -> None:
    train_here(arguments(digits, tmp_path / "good", **with_nan_after(1000)))
    words = arguments(digits, tmp_path / "run", **with_nan_after(13), train__max_nonfinite_steps=4)
    err = fails(6, train_command, *words)
    sampler = EpochSampler(88, 8, rank=0, world_size=1, seed=0)
    sampler.set_epoch(1, start_step=5)  # the 17th step of all, counted from 1
    samples = [f"synthetic/train[{index}]" for _, index, _ in islice(sampler, 8)]
    assert all(text in err for text in ("step 17", "rank 0", ", ".join(samples[:3])))
    assert ", ".join(samples) in (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert newest(tmp_path / "run").name == "step-0000011"
    steps = records(tmp_path / "run", "train")
    assert [record["step"] for record in steps if record.get("skipped")] == [14, 15, 16, 17]
    # With the loss corrected, it resumes and ends as the undisturbed run.
    corrected = arguments(digits, tmp_path / "run", **with_nan_after(1000))
    train_here([*corrected, "--resume", "--allow-change", "loss.kwargs"])
    assert losses(tmp_path / "run") == losses(tmp_path / "good")
    assert evaluations(tmp_path / "run")[-1]["loss"] == evaluations(tmp_path / "good")[-1]["loss"]


def test_few_nan_steps_are_skipped_and_reported(digits: Path, tmp_path: Path) -> None:
    changes = with_nan_after(18, train__max_nonfinite_steps=10, log__every_steps=3)
    code, out, _ = call(train_command, *arguments(digits, tmp_path / "run", **changes))
    out = " ".join(out.split())
    assert code == 0 and "3 steps from 19 to 21" in out and "step 22: " in out
    assert all(record["loss"] < 3 for record in evaluations(tmp_path / "run"))


@pytest.mark.parametrize(("good", "code"), [(0, 6), (1, 0)])
def test_run_without_any_applied_step_exits_with_6(
    digits: Path, tmp_path: Path, good: int, code: int
) -> None:
    changes = with_nan_after(good, train__max_steps=3, train__max_nonfinite_steps=10)
    assert call(train_command, *arguments(digits, tmp_path / "run", **changes))[0] == code
    assert state_of(tmp_path / "run")["progress"]["step"] == 3
