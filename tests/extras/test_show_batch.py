"""show_batch.py draws what the model gets, for any epoch."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import arguments, fails, succeeds
from PIL import Image

from imagenet_cls.extras.before_training import show_batch


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was last drawn: images, labels."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(
        "imagenet_cls.extras.before_training.show_batch.plot_images",
        lambda path, images, labels: found.update(path=path, images=images, labels=labels),
    )
    return found


def test_picture_of_mixed_images(digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path, mix__mixup_alpha=0.8, augment__erasing__prob=1.0)
    succeeds(
        show_batch.show_batch_command, *without_work_dir(words), "--out", tmp_path / "batch.png"
    )
    assert np.asarray(Image.open(tmp_path / "batch.png")).std() > 10


def test_picture_is_not_among_the_run_folders(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    succeeds(show_batch.show_batch_command, *without_work_dir(arguments(digits, tmp_path)))
    assert [path.parent.name for path in tmp_path.glob("**/*.png")] == ["reports"]


def test_images_are_those_of_the_epoch(digits: Path, tmp_path: Path, drawn: dict[str, Any]) -> None:
    words = without_work_dir(arguments(digits, tmp_path))

    def images(*more: object) -> np.ndarray:
        succeeds(show_batch.show_batch_command, *words, "--images", 8, *more)
        assert len(drawn["labels"]) == len(drawn["images"]) == 8 and set(drawn["labels"]) <= set(
            "0123456789"
        )
        return drawn["images"]

    alone, again, later = images(), images(), images("--epoch", 1)
    assert np.array_equal(alone, again) and not np.array_equal(alone, later)


def test_class_name_with_an_undecodable_byte(digits: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff")
    for folder in (name, "good"):
        shutil.copytree(digits / "train" / "3", tmp_path / "train" / folder)
    words = without_work_dir(arguments(tmp_path, tmp_path, data__name="folder", data__val="train"))
    succeeds(show_batch.show_batch_command, *words, "--out", tmp_path / "batch.png")


@pytest.mark.parametrize("words", [["--out", "batch.jpg"], ["optimizer.rl=1"]])
def test_bad_arguments_exit_2(digits: Path, tmp_path: Path, words: list[object]) -> None:
    err = fails(
        2, show_batch.show_batch_command, *without_work_dir(arguments(digits, tmp_path)), *words
    )
    assert len(err.splitlines()) <= 3


def test_target_as_text() -> None:
    assert show_batch.describe_target(torch.tensor(1), "ab") == "b"
    assert show_batch.describe_target(torch.tensor([0.0, 1.0]), "ab") == "b"
    assert show_batch.describe_target(torch.tensor([0.3, 0.7]), "ab") == "0.70 b\n0.30 a"


def without_work_dir(words: list[str]) -> list[str]:
    at = words.index("--work-dir")
    return words[:at] + words[at + 2 :]
