"""A run that is resumed in the middle of an epoch reads only what is left of it, and keeps its progress.

With another number of ranks: tests/faults/test_other_ranks.py.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import arguments, losses, newest, state_digest, train_here
from recording_dataset import read_until_now

from imagenet_cls.checkpoint.format import read_checkpoint, write_checkpoint
from imagenet_cls.data.samplers import EpochSampler

STEPS_PER_EPOCH, LATE = 5004, 4900  # those of ImageNet at 256 images each


def progress_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())["progress"]


def test_resume_late_in_an_epoch_replays_nothing(tmp_path: Path) -> None:
    """An epoch of as many steps as ImageNet's, of one image each. A checkpoint at step 1 is made one at step 4,900."""
    notes, folder = tmp_path / "notes", tmp_path / "run"

    def train_to(step: int, *more: str) -> None:
        settings = {
            "data__name": "recording_dataset:open_set", "data__val": "val", "data__val_fraction": "null",
            "data__kwargs": f"{{images: {STEPS_PER_EPOCH}}}", "train__global_batch_size": 1, "train__max_steps": step,
        }  # fmt: skip
        train_here([*arguments(notes, folder, **settings), *more])

    whole = EpochSampler(STEPS_PER_EPOCH, 1, 0, 1, seed=0)
    whole.set_epoch(0)
    order = [index for _, index, _ in whole]

    train_to(1)
    assert list(read_until_now(notes)) == order[:1]
    snapshot = read_checkpoint(newest(folder))
    progress = snapshot.state["progress"] | {"step": LATE, "evaluated_step": LATE}
    late = dataclasses.replace(snapshot, state=snapshot.state | {"step": LATE, "progress": progress})
    write_checkpoint(folder / "checkpoints", late)

    train_to(LATE + 3, "--resume")
    assert progress_of(newest(folder))["step"] == LATE + 3
    read = read_until_now(notes)
    assert list(read) == order[LATE : LATE + 3] and set(read.values()) == {1}


def test_resume_with_other_data_workers_ends_in_the_same_bits(digits: Path, tmp_path: Path) -> None:
    def words(folder: str, **more: object) -> list[str]:
        return arguments(
            digits, tmp_path / folder, "noisy", ema__decay=0.9, train__micro_batch_size=64,
            augment__policy="torchvision:rand_augment", checkpoint__every_steps=15, checkpoint__every_epochs="null",
            **more,
        )  # fmt: skip

    train_here(words("whole"))
    # max_steps ends a run with an evaluation, which the whole run does not have at this step: resume from before.
    train_here(words("parts", train__max_steps=16))
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-0000016")
    train_here([*words("parts", data__num_workers=3, data__prefetch_batches=4), "--resume"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert state_digest(tmp_path / "parts") == state_digest(tmp_path / "whole")


def test_resume_keeps_best_evaluations_and_ema_warmup(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best so far, the evaluations that `plateau` reads, and the number of EMA updates, which the warm-up reads.

    Resumed between two evaluations, with a changed key that is not recipe.
    """
    folder = tmp_path / "run"
    settings = {
        "schedule__name": "plateau", "schedule__kwargs": "{patience: 0}", "ema__decay": 0.999, "ema__warmup": "true",
        "eval__every_epochs": 1, "checkpoint__every_steps": 12,
    }  # fmt: skip
    train_here(arguments(digits, folder, train__max_steps=11, **settings))
    known = progress_of(newest(folder))
    train_here([*arguments(digits, folder, train__max_steps=13, log__every_steps=2, **settings), "--resume"])
    output = capsys.readouterr().out
    assert "changed since the checkpoint: log.every_steps: 1 -> 2" in output
    later = progress_of(folder / "checkpoints" / "step-0000012")
    assert known["best"]["raw"]["step"] == known["best"]["ema"]["step"] == 11 and len(known["evaluations"]) == 1
    assert {**later, "step": 11} == known

    whole = tmp_path / "whole"
    train_here(arguments(digits, whole, train__max_steps=13, **settings))
    for name in ("model.safetensors", "ema.safetensors"):
        assert (newest(folder) / name).read_bytes() == (newest(whole) / name).read_bytes(), name
