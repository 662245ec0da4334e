"""find_lr.py: real steps of the config; it prints and draws, and changes nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import arguments, losses, succeeds, train_here
from PIL import Image

from imagenet_cls.extras.before_training import lr_range
from imagenet_cls.extras.before_training.find_lr import find_lr_command
from imagenet_cls.extras.before_training.lr_range import LrRange


def words(digits: Path, **changes: object) -> list[str]:
    return arguments(digits, "unused", **changes)[:-2]


def geometric(
    base_lr: float, total_steps: int, steps_per_epoch: int, last: float = 1.0
) -> Callable[[int], float]:
    return lambda step: base_lr * (last / base_lr) ** (step / (total_steps - 1))


def test_range_test_is_a_training_with_that_schedule(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default epochs of 11 steps; the batch is accumulated; the layers have their own
    factors.
    """
    found: list[LrRange] = []
    original = lr_range.lr_range
    monkeypatch.setattr(
        lr_range, "lr_range", lambda *given: found.append(original(*given)) or found[-1]
    )
    changes = {
        "train__micro_batch_size": 64,
        "optimizer__lr_scales": "{'0.*': 0.5}",
        "mix__mixup_alpha": 0.2,
    }
    line = words(digits, **changes, schedule__warmup_epochs=1, train__epochs=1)
    options = ["--from", 1e-3, "--to", 0.5, "--steps", 22, "--out", tmp_path / "lr.png"]
    out = succeeds(find_lr_command, *line, *options)
    assert "suggestion: optimizer.lr=" in out and len(found[0].losses) == 22
    assert np.asarray(Image.open(tmp_path / "lr.png")).std() > 10
    schedule = {"schedule__name": f"{__name__}:geometric", "schedule__kwargs": "{last: 0.5}"}
    more = {"optimizer__lr": 1e-3, "train__epochs": 2, "schedule__warmup_epochs": 0}
    train_here(arguments(digits, tmp_path / "run", **changes, **schedule, **more))
    assert losses(tmp_path / "run") == found[0].losses
    assert found[0].lrs[0] == 1e-3 and found[0].lrs[-1] == pytest.approx(0.5)


def test_suggestion_is_divided_by_the_factor_of_lr_base_batch(digits: Path, tmp_path: Path) -> None:
    def suggested(*more: str) -> float:
        path = tmp_path / f"{len(more)}.png"
        line = [*words(digits), *more, "--from", 1e-3, "--to", 0.5, "--steps", 20, "--out", path]
        out = succeeds(find_lr_command, *line)
        return float(re.findall(r"suggestion: optimizer\.lr=([\d.e-]+)", out)[0])

    # two digits
    assert suggested("optimizer.lr_base_batch=32") == pytest.approx(suggested() / 4, rel=0.05)


def test_range_test_ends_once_the_loss_diverges(digits: Path, tmp_path: Path) -> None:
    line = [*words(digits), "--to", 1e9, "--out", tmp_path / "lr.png"]
    out = succeeds(find_lr_command, *line, "--from", 1e8)
    assert "no suggestion" in out and not list(tmp_path.iterdir())
    out = succeeds(find_lr_command, *line, "--from", 1e-3, "--steps", 60)
    assert re.search("ended at lr .* where the (smoothed )?loss is", out)
