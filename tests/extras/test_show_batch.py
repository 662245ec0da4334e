"""show_batch.py draws what the model gets, for any epoch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import arguments, succeeds
from matplotlib.figure import Figure
from PIL import Image

from imagenet_cls.extras.before_training import show_batch


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was last drawn: images, labels."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(
        show_batch,
        "images_figure",
        lambda images, labels: found.update(images=images, labels=labels) or Figure(),
    )
    return found


def test_picture_of_mixed_images_is_not_among_the_run_folders(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = arguments(digits, tmp_path, mix__mixup_alpha=0.8, augment__erasing__prob=1.0)
    succeeds(show_batch.show_batch_command, *words[:-2])
    (picture,) = tmp_path.glob("**/*.png")
    assert picture.parent.name == "reports" and np.asarray(Image.open(picture)).std() > 10


def test_images_are_those_of_the_epoch(digits: Path, tmp_path: Path, drawn: dict[str, Any]) -> None:
    words = arguments(digits, tmp_path)[:-2]

    def images(*more: object) -> np.ndarray:
        succeeds(show_batch.show_batch_command, *words, *more)
        assert len(drawn["labels"]) == len(drawn["images"]) == 32
        assert set(drawn["labels"]) <= set("0123456789")
        return drawn["images"]

    alone, again, later = images(), images(), images("--epoch", 1)
    assert np.array_equal(alone, again) and not np.array_equal(alone, later)


def test_target_as_text() -> None:
    assert show_batch.describe_target(torch.tensor(1), "ab") == "b"
    assert show_batch.describe_target(torch.tensor([0.0, 1.0]), "ab") == "b"
    assert show_batch.describe_target(torch.tensor([0.3, 0.7]), "ab") == "0.70 b\n0.30 a"
    mixed = torch.tensor([1.0, 0.25, 0.0])
    assert show_batch.describe_target(mixed, "abc", True) == "a; 0.25 b"
