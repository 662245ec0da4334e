"""Runs of one rank: the result depends on the config and the data, and on nothing else. A resumed
run ends in the same bits, reads only what is left of its epoch, and keeps its progress.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    arguments,
    edit_state,
    evaluations,
    losses,
    newest,
    records,
    saved_bytes,
    state_digest,
    state_of,
    succeeds,
    train_here,
)
from recording_dataset import read_until_now

from imagenet_cls.commands import evaluation
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.optim.schedule import build_schedule

STEPS_PER_EPOCH, LATE = 5004, 4900  # those of ImageNet at 256 images each


def noisy_words(digits: Path, folder: Path, **more: Any) -> list[str]:
    """With BatchNorm, dropout, EMA, RandAugment and accumulation."""
    common = {
        "ema.decay": 0.9,
        "train.micro_batch_size": 64,
        "augment.policy": "torchvision:rand_augment",
    }
    return arguments(digits, folder, "noisy", **common, **more)


def test_same_bits_for_any_number_of_workers_and_decoder(digits: Path, tmp_path: Path) -> None:
    """Another seed gives other bits, otherwise the comparison shows nothing."""

    def digest(name: str, **changes: Any) -> str:
        train_here(noisy_words(digits, tmp_path / name, train__epochs=1, **changes))
        return state_digest(tmp_path / name)

    expected = digest("here")
    assert digest("whole", data__decode="whole") == expected
    assert digest("workers", data__num_workers=3) == expected
    assert digest("both", data__num_workers="auto", data__decode="whole") == expected
    assert digest("other", seed=1) != expected


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_of_a_checkpoint_chooses_kernels_as_the_run_does(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deterministic: bool,
) -> None:
    train_here(
        arguments(digits, tmp_path / "run", train__max_steps=1, train__deterministic=deterministic)
    )
    chosen: list[tuple[bool, torch.device]] = []
    # has the same effect for both values on a CPU
    monkeypatch.setattr(evaluation, "set_deterministic", lambda *values: chosen.append(values))
    succeeds(evaluate_command, tmp_path / "run", "device=cpu", "--allow-import", "helpers:plain")
    assert chosen == [(deterministic, torch.device("cpu"))]


def test_losses_do_not_depend_on_accumulation(digits: Path, tmp_path: Path) -> None:
    for micro in (128, 64, 32):
        train_here(arguments(digits, tmp_path / str(micro), train__micro_batch_size=micro))
    curve = losses(tmp_path / "128")
    # it learns, so the comparison is about something
    assert len(curve) == 22 and curve[-1] < 0.95 * curve[0]
    assert losses(tmp_path / "64") == pytest.approx(curve, rel=1e-5)
    assert losses(tmp_path / "32") == pytest.approx(curve, rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "stop_at"),
    [
        ("adamw", 15),
        ("lamb", 11),
        # synchronizes every 6 steps
        pytest.param("timm:lookahead_adamw", 15, marks=pytest.mark.nightly),
    ],
)
def test_run_in_two_parts_ends_in_the_same_bits(
    digits: Path, tmp_path: Path, optimizer: str, stop_at: int
) -> None:
    """Stopped in the second epoch, and between the two; fused and other optimizers; other
    workers, decoder.
    """
    common = {"optimizer.name": optimizer, "optimizer.lr": 0.01}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_here(noisy_words(digits, whole, **common))
    train_here(noisy_words(digits, parts, train__max_steps=stop_at, **common))
    others = {"data.num_workers": 2, "data.decode": "whole"}
    train_here([*noisy_words(digits, parts, **common, **others), "--resume"])
    assert losses(parts) == losses(whole)
    assert saved_bytes(parts) == saved_bytes(whole)


def test_resume_late_in_an_epoch_replays_nothing(tmp_path: Path) -> None:
    """An epoch of as many steps as ImageNet's, of one image each. A checkpoint at step 1 is made
    one at step 4,900.
    """
    notes, folder = tmp_path / "notes", tmp_path / "run"

    def train_to(step: int, *more: str) -> None:
        settings = {
            "data__name": "recording_dataset:open_set",
            "data__val": "val",
            "data__val_fraction": "null",
            "data__kwargs": f"{{images: {STEPS_PER_EPOCH}}}",
            "train__global_batch_size": 1,
            "train__max_steps": step,
        }
        train_here([*arguments(notes, folder, **settings), *more])

    whole = EpochSampler(STEPS_PER_EPOCH, 1, 0, 1, seed=0)
    whole.set_epoch(0)
    order = [index for _, index, _ in whole]

    train_to(1)
    assert list(read_until_now(notes)) == order[:1]

    def make_late(state: dict[str, Any]) -> None:
        state["step"] = LATE
        state["progress"] |= {"step": LATE, "evaluated_step": LATE}

    checkpoint = newest(folder)
    edit_state(checkpoint, make_late)
    checkpoint.rename(folder / "checkpoints" / f"step-{LATE:07}")
    train_to(LATE + 3, "--resume")
    assert state_of(folder)["progress"]["step"] == LATE + 3
    read = read_until_now(notes)
    assert list(read) == order[LATE : LATE + 3] and set(read.values()) == {1}


def test_resume_keeps_best_evaluations_and_ema_warmup(digits: Path, tmp_path: Path) -> None:
    """The best so far, and the number of EMA updates, which the warm-up reads.

    Resumed between two evaluations, with a changed key that is not recipe.
    """
    folder, whole = tmp_path / "run", tmp_path / "whole"
    settings = {
        "model__name": "torchvision:mnasnet0_5",  # its modules have versions
        "ema__decay": 0.999,
        "ema__warmup": "true",
        "checkpoint__every_steps": 12,
    }
    train_here(arguments(digits, folder, train__max_steps=11, **settings))
    known = state_of(folder)["progress"]
    assert {best["step"] for best in known["best"].values()} == {11}
    assert known["best"].keys() == {"raw", "ema"} and len(known["history"]) == 1
    words = arguments(digits, folder, train__max_steps=13, log__every_steps=2, **settings)
    train_here([*words, "--resume"])
    later = json.loads((folder / "checkpoints" / "step-0000012" / "state.json").read_text())
    assert {**later["progress"], "step": 11} == known

    train_here(arguments(digits, whole, train__max_steps=13, **settings))
    assert saved_bytes(folder) == saved_bytes(whole)


def epochs_of(work_dir: Path) -> list[tuple[int, int]]:
    """(epoch, steps in it) of a run, in the order of its steps."""
    epochs = [record["epoch"] for record in records(work_dir, "train")]
    return [(epoch, len(list(steps))) for epoch, steps in itertools.groupby(epochs)]


@pytest.mark.parametrize("schedule", [{}, {"schedule__by_epoch": "true"}])
def test_resume_with_other_batches_goes_on_in_the_same_epoch(
    digits: Path, tmp_path: Path, schedule: dict[str, str]
) -> None:
    """Epochs of 11, 5 and 22 steps, changed after 4 of 11, and after all 5. Stopped and resumed
    without a change, such a run ends in the same bits.
    """
    settings = {"train__epochs": 4, "train__early_stop__patience_evals": 9} | schedule

    def resume(batch: int, name: str = "run", **more: Any) -> None:
        changes = settings | more | {"train__global_batch_size": batch}
        words = arguments(digits, tmp_path / name, **changes)
        train_here([*words, "--resume", "--allow-change", "train.global_batch_size"])

    train_here(arguments(digits, tmp_path / "run", train__max_steps=15, **settings))
    resume(256, train__max_steps=18)
    assert epochs_of(tmp_path / "run") == [(0, 11), (1, 4 + 3)]
    shutil.copytree(tmp_path / "run", tmp_path / "parts", symlinks=True)
    resume(64)
    assert epochs_of(tmp_path / "run") == [(0, 11), (1, 7), (2, 22), (3, 22)]
    # the first run evaluates where it ends, in the second epoch
    assert [record["epoch"] for record in evaluations(tmp_path / "run")] == [0, 1, 1, 2, 3]
    assert len(state_of(tmp_path / "run")["progress"]["history"]) == 4
    config = load_config(tmp_path / "run" / "config.yaml").config
    curve = build_schedule(config.schedule, config.optimizer.lr, 22, 4)
    rates = [record["lr"] for record in records(tmp_path / "run", "train")]
    assert rates[18:] == [curve(step) for step in range(44, 88)]

    resume(64, "parts", train__max_steps=30)
    resume(64, "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "run")
    assert state_digest(tmp_path / "parts") == state_digest(tmp_path / "run")


@pytest.mark.parametrize(
    ("stop_at", "changes", "trained", "evaluated"),
    [
        # Less than a batch of the second epoch is done: the first one is not evaluated again.
        (12, {"train__global_batch_size": 256}, [(1, 5)], [1]),
        # The first epoch is done with fewer samples, and was not evaluated.
        (10, {"data__repeats_multiple": 1000}, [(1, 7)], [0, 1]),
    ],
)
def test_resume_in_an_epoch_of_other_steps_evaluates_each_epoch_once(
    digits: Path,
    tmp_path: Path,
    stop_at: int,
    changes: dict[str, int],
    trained: list[tuple[int, int]],
    evaluated: list[int],
) -> None:
    """From a checkpoint of an older version, which states no offset."""
    run, later = tmp_path / "run", tmp_path / "later"
    saves = {"checkpoint__every_steps": stop_at}
    train_here(arguments(digits, run, train__max_steps=stop_at + 1, **saves))
    checkpoint = run / "checkpoints" / f"step-{stop_at:07}"
    edit_state(checkpoint, lambda state: state["plan"].pop("offset"))
    allowed = [f"--allow-change={name.replace('__', '.')}" for name in changes]
    words = arguments(digits, later, **saves, **changes)
    train_here([*words, "--resume-from", str(checkpoint), *allowed])
    assert epochs_of(later) == trained
    assert [record["epoch"] for record in evaluations(later)] == evaluated
