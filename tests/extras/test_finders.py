"""find_batch.py and find_lr.py: real steps of the config; they print and change nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import REPOSITORY, arguments, call, fails, losses, plain, succeeds, train_here
from PIL import Image
from torch import Tensor, nn

from imagenet_cls.extras.before_training import lr_range
from imagenet_cls.extras.before_training.find_batch import find_batch_command
from imagenet_cls.extras.before_training.find_lr import find_lr_command
from imagenet_cls.extras.before_training.lr_range import LrRange

SEEN: list[int] = []  # sizes of training batches


class Limited(nn.Module):
    """Runs out of memory with more than `most` images."""

    def __init__(self, num_classes: int, most: int):
        super().__init__()
        self.network, self.most = plain(num_classes), most

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            SEEN.append(len(images))
            if len(images) > self.most:
                if images.is_cuda:
                    torch.empty(1 << 45, device=images.device)
                raise torch.OutOfMemoryError("out of memory")
        return self.network(images)


def limited(num_classes: int, most: int = 10**9) -> nn.Module:
    return Limited(num_classes, most)


def words(digits: Path, **changes: object) -> list[str]:
    return arguments(digits, "unused", **changes)[:-2]


def limited_words(digits: Path, **changes: object) -> list[str]:
    return words(digits, model__name=f"{__name__}:limited", **changes)


def sizes(out: str) -> dict[int, bool]:
    """The sizes in the table, in order, and whether they fit."""
    rows = re.findall(r"^ *([\d,]+) +(-|[\d.]+) ", out, re.M)
    return {int(size.replace(",", "")): speed != "-" for size, speed in rows}


def search_with_a_limit(digits: Path, device: str) -> None:
    changes = {"model.kwargs": "{most: 40}", "device": device}
    out = succeeds(find_batch_command, *limited_words(digits, **changes), "--gpus", 2)
    small = {2: True, 4: True} if device == "cpu" else {}
    assert sizes(out) == {**small, 8: True, 16: True, 32: True, 64: False, 48: False, 40: True}
    line = "micro_batch_size=40  # train.global_batch_size=128 on 2 devices: 2 micro-batches of 32 "
    assert line in out.splitlines()[-1]


def test_search_continues_below_a_size_that_is_out_of_memory(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    search_with_a_limit(digits, "cpu")
    assert list(tmp_path.iterdir()) == []


def test_whole_share_fits_and_needs_no_limit(digits: Path) -> None:
    SEEN.clear()
    line = limited_words(digits, train__global_batch_size=8)
    out = succeeds(find_batch_command, *line, "--max", 16)
    assert sizes(out) == dict.fromkeys((2, 4, 8, 16), True)
    # One warm-up step and two others, with accumulation below the share of 8 images.
    assert [size for size in SEEN if size > 1] == [2] * 6 + [4] * 6 + [8] * 3 + [16] * 3
    assert out.splitlines()[-1].startswith("train.micro_batch_size=null ")


def test_default_limit_on_a_cpu_is_the_share_of_a_device(digits: Path) -> None:
    changed = words(digits, train__global_batch_size=32)
    out = succeeds(find_batch_command, *changed, "--gpus", 2)
    assert sizes(out) == dict.fromkeys((2, 4, 8, 16), True)


def test_nothing_fits_exits_5(digits: Path) -> None:
    changed = limited_words(digits, **{"model.kwargs": "{most: 0}"})
    code, out, _ = call(find_batch_command, *changed)
    assert code == 5 and sizes(out) == {2: False, 1: False}


@pytest.mark.parametrize(
    "changes",
    [
        {"mix__mixup_alpha": 0.8, "mix__mode": "pair", "augment__erasing__prob": 1.0},
        {"train__sam_rho": 0.1, "train__sam_every_steps": 3, "loss__class_weights": "balanced"},
        {"ema__decay": 0.9, "ema__every_steps": 20, "augment__splits": 2, "loss__name": "jsd"},
        {"augment__progressive": "{epochs: [0, 1], sizes_px: [8, 16], multiple_px: 8}"},
        {"distill__kind": "soft", "distill__teacher__name": "helpers:plain"},
    ],
)
def test_batches_of_other_recipes(digits: Path, changes: dict[str, object]) -> None:
    out = succeeds(find_batch_command, *words(digits, **changes), "--max", 4)
    assert sizes(out) == {2: True, 4: True}


def test_data_is_needed_for_the_number_of_classes_only(tmp_path: Path) -> None:
    line = [*words(tmp_path / "none", data__name="folder"), "--max", 2]
    for command in (find_batch_command, find_lr_command):
        assert "none" in fails(3, command, *line[:-2])
    assert sizes(succeeds(find_batch_command, *line, "model.num_classes=3")) == {2: True}


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


@pytest.mark.parametrize(
    ("command", "more", "expected"),
    [
        (find_batch_command, ["optimizer.rl=1"], "optimizer.rl"),  # stage 1
        (find_lr_command, ["optimizer.name=sdg"], "optimizer.name"),  # stage 2
        (find_lr_command, ["--from", 1, "--to", 1], "--from"),
        (find_lr_command, ["--steps", 3], "--steps"),
    ],
)
def test_bad_command_line_exits_2(
    digits: Path, command: Callable, more: list[object], expected: str
) -> None:
    assert expected in fails(2, command, *words(digits), *more)


def test_one_of_several_ranks_exits_2(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2" if "SIZE" in name else "0")
    for command in (find_batch_command, find_lr_command):
        assert "WORLD_SIZE" in fails(2, command, *words(digits))


def test_multilabel(tmp_path: Path) -> None:
    recipe = [REPOSITORY / "configs/quick/resnet_multilabel.yaml", "data.num_workers=0"]
    out = succeeds(find_batch_command, *recipe, "--max", 6, "mix.mixup_alpha=0.2")
    assert "largest that fits: 6;" in out  # the limit is tried
    succeeds(find_lr_command, *recipe, "--steps", 20, "--out", tmp_path / "lr.png")
