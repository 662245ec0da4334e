"""Event files, read back with TensorBoard's own reader: the right tags, and each step once after a resume."""

import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from imagenet_cls.report.tensorboard import TensorBoard

FULL = {"images_per_sec": 100.0, "data_wait_pct": 3.0, "memory_mib": 12.0}


def train_record(step: int, loss: float = 0.5, **more: float) -> dict:
    return {"kind": "train", "step": step, "epoch": 1, "loss": loss, "lr": 0.1, "grad_norm": 2.0, **more}


def eval_record(step: int, weights: str) -> dict:
    return {
        "kind": "eval",
        "step": step,
        "epoch": 1,
        "weights": weights,
        "top1_pct": 90.0 if weights == "raw" else 91.0,
        "top5_pct": 99.0,
        "loss": 0.3,
        "images": 10,
        "seconds": 1.0,
    }


def wait_for_the_next_second() -> None:
    """Event files are read in the order of their names, which hold the second. No process is resumed within one."""
    time.sleep(1.01 - time.time() % 1)


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def test_all_tags_are_there_with_their_values(tmp_path):
    board = TensorBoard(tmp_path, None)
    board.config_text("model:\n  name: resnet18")
    board.first_batch(np.full((3, 3, 8, 8), 200, np.uint8), ["tench", "goldfish", "great white shark"])
    board.write(train_record(1))
    board.write(train_record(2, **FULL))
    board.write(eval_record(2, "raw"))
    board.write(eval_record(2, "ema"))
    board.write({"kind": "event", "step": 2, "message": "said"})
    board.close()
    board.close()
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == {
        *(f"train/{name}" for name in ("loss", "lr", "grad_norm", "images_per_sec", "data_wait_pct", "memory_mib")),
        *(f"{group}/{name}" for group in ("val", "val_ema") for name in ("top1_pct", "top5_pct", "loss")),
    }
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.5)]
    assert [event.step for event in events.Scalars("train/images_per_sec")] == [2]
    assert events.Scalars("val/top1_pct")[0].value == 90.0
    assert events.Scalars("val_ema/top1_pct")[0].value == 91.0
    assert events.Tags()["images"] == ["train/first_batch"]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "      name: resnet18" in texts["config/text_summary"]
    assert "3. great white shark" in texts["train/first_batch_labels/text_summary"]


@pytest.mark.parametrize("resume_step", [None, 4])
def test_steps_are_unique_after_a_resume(tmp_path, resume_step):
    done = resume_step or 0
    for first_step, loss in ((1, 1.0), (done + 1, 2.0), (done + 1, 3.0)):
        board = TensorBoard(tmp_path, None if first_step == 1 else resume_step)
        board.config_text("seed: 0")
        board.first_batch(np.zeros((1, 3, 8, 8), np.uint8), ["zero"])
        for step in range(first_step, 8):
            board.write(train_record(step, loss))
        board.close()
        wait_for_the_next_second()
    events = read(tmp_path)
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(step, 1.0 if step <= done else 3.0) for step in range(1, 8)]
    assert [event.step for event in events.Images("train/first_batch")] == sorted({1, done + 1})
