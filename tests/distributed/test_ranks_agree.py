"""The batch is global. One rank or two, however they were started: the same steps, samples and
losses.
"""

import csv
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import RankServer
from helpers import REPOSITORY, arguments, evaluations, losses, newest, run, train_here
from safetensors.torch import load_file
from torch import Tensor, nn


def test_resume_with_another_batch_is_the_same_on_two_ranks(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    """After 4 of 11 steps of the second epoch, which then takes 3 steps more. The ranks meet at a
    file, which is removed.
    """
    store = tmp_path / "store"
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        common = {"parallel__init_method": f"file://{store}"}
        rank_server.train(arguments(digits, folder, **common, train__max_steps=15), ranks)
        assert not store.exists()
        words = arguments(digits, folder, **common, train__global_batch_size=256)
        rank_server.train([*words, "--resume", "--allow-change=train.global_batch_size"], ranks)
    assert len(losses(tmp_path / "2")) == 18
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-4)


class SkipsLayer(nn.Module):
    """Uses a layer in the first forward passes, and then in every second one: on both ranks, or on
    rank 0 always.
    """

    def __init__(self, num_classes: int, only_rank: int | None = None, first_passes: int = 4):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, num_classes)
        self.layer = nn.Linear(8, 8)
        self.only_rank, self.first_passes, self.passes = only_rank, first_passes, 0

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.mean((2, 3)))
        self.passes += self.training
        skips = self.only_rank in (None, int(os.environ.get("RANK", "0")))
        if self.passes <= self.first_passes or self.passes % 2 == 1 or not skips:
            hidden = hidden + self.layer(hidden)
        return self.last(hidden)


def skips_layer(digits: Path, folder: Path, **changes: object) -> list[str]:
    name = "test_ranks_agree:SkipsLayer"
    return arguments(digits, folder, model__name=name, train__max_steps=8, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__kwargs": "{only_rank: 1}"},
        {"train__micro_batch_size": 32},
        {"model__kwargs": "{first_passes: 0}"},
    ],
    ids=["all ranks", "one rank", "last micro-batch", "before the first step"],
)
def test_step_without_all_gradients_is_an_error_that_names_the_key(
    rank_server: RankServer, digits: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    output = tmp_path / "output"
    codes = rank_server.run(skips_layer(digits, tmp_path / "run", **changes), output, 2)
    assert 2 in codes and set(codes) <= {2, 5}
    assert "parallel.find_unused_parameters" in output.read_text()


def test_layer_that_some_steps_skip_trains_on_ranks_that_look_for_it(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    """With the layer in the first of two micro-batches only, in every step after the second."""
    for ranks in (1, 2):
        words = skips_layer(
            digits,
            tmp_path / str(ranks),
            train__micro_batch_size=64 // ranks,
            parallel__find_unused_parameters="true",
            parallel__check_every_steps=1,
        )
        rank_server.train(words, ranks)
    means = [losses(tmp_path / str(ranks)) for ranks in (1, 2)]
    assert len(means[1]) == 8 and means[1] == pytest.approx(means[0], rel=1e-4)


def test_other_buffers_may_differ_between_ranks(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    """Ranks see other images, so they remember other means: no drift. The checkpoint has those of
    rank 0.
    """
    common = {
        "model.name": "helpers:with_image_sum",
        "ema.decay": 0.5,
        "parallel.check_every_steps": 1,
    }
    words = arguments(digits, tmp_path / "run", **common)
    rank_server.train([*words, "train.max_steps=3"], 2)
    rank_server.train([*words, "train.max_steps=6", "--resume"], 2)
    means = [
        load_file(newest(tmp_path / "run") / f"{name}.safetensors")["0.seen"].item()
        for name in ("model", "ema")
    ]
    assert means[0] != 0 and means[0] != means[1]


def soft_cross_entropy() -> Any:
    """A loss that takes mixed targets only."""
    return lambda logits, targets: -(targets * logits.log_softmax(1)).sum(1).mean()


class Drawing(nn.Linear):
    """Draws in each forward pass, as dropout does, and appends the draw to a file of the rank."""

    def __init__(self, num_classes: int, folder: str):
        super().__init__(3, num_classes)
        self.file = Path(folder) / f"draws{os.environ['RANK']}"

    def forward(self, images: Tensor) -> Tensor:
        with self.file.open("a") as file:
            file.write(f"{torch.rand(()).item()}\n")
        return super().forward(images.mean((2, 3)))


def test_ranks_and_steps_draw_differently(
    rank_server: RankServer, digits: Path, tmp_path: Path
) -> None:
    """With a loss that gets mixed targets, also in the passes before the first step."""
    changes = {
        "model.name": "test_ranks_agree:Drawing",
        "model.kwargs.folder": tmp_path,
        "loss.name": "test_ranks_agree:soft_cross_entropy",
        "mix.mixup_alpha": 0.2,
    }
    words = arguments(digits, tmp_path / "run", **changes, train__max_steps=2, eval__batch_size=512)
    rank_server.train(words, 2)
    files = [tmp_path / f"draws{rank}" for rank in (0, 1)]
    # the last pass of each is the evaluation
    draws = [draw for file in files for draw in file.read_text().splitlines()[-3:-1]]
    assert len(set(draws)) == 4


def rename(folder: Path) -> None:
    folder.rename(folder.parent / "three")


def change_size(folder: Path) -> None:
    for image in folder.iterdir():
        image.write_bytes(b"another image")


@pytest.mark.parametrize("change", [None, rename, change_size])
def test_ranks_with_different_config_or_data_exit(
    rank_server: RankServer, digits: Path, tmp_path: Path, change: Callable[[Path], None] | None
) -> None:
    """As on two machines that were not set up alike. One rank says so."""
    common: dict[str, object] = {
        "data.name": "folder",
        "data.val": "null",
        "data.val_fraction": 0.2,
    }
    changes: dict[str, object] = {"optimizer.lr": 0.5}
    code, named = 2, "optimizer.lr: rank 1"
    if change is not None:
        other = shutil.copytree(digits, tmp_path / "other")
        change(other / "train" / "3")
        changes, code, named = {"data.root": other}, 3, "raining images"
    of_0, of_1 = (arguments(digits, tmp_path / "run", **common | own) for own in ({}, changes))
    output = tmp_path / "output.txt"
    codes = rank_server.run(of_0, output, 2, arguments_of_rank_1=of_1)
    printed = output.read_text()
    assert codes == [code, code] and printed.count(named) == 1, printed
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_ranks_of_dist_test_count_every_image_once(digits: Path, tmp_path: Path) -> None:
    """Two ranks do not divide the number of images. The table of the classes is of the better
    weights, and equals a count of the rows that are written.
    """
    folder, rows = tmp_path / "run", tmp_path / "rows.csv"
    config, *changes = arguments(digits, folder, "noisy", ema__decay=0.5)[:-2]
    train_here([config, *changes, "--work-dir", str(folder)])
    script = str(REPOSITORY / "scripts" / "dist_test.sh")
    done = run(["bash", script, config, str(folder), "2", *changes, "--out", str(rows)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("over 359 images") == 2
    with rows.open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == len({row["image"] for row in read}) == 359

    best = max(evaluations(folder), key=lambda record: record["top1_pct"])["weights"]
    hits = sum(row["class_1"] == row["target"] for row in read)
    assert f"{best}: top-1 {100 * hits / 359:.3f} %" in done.stdout
    header, *lines = done.stdout.partition("class (")[2].splitlines()[:11]
    assert header.split() == [f"{best})", "images", "accuracy", "precision"]
    for name, line in zip("0123456789", lines, strict=True):
        predicted = [row["class_1"] for row in read if row["target"] == name]
        targets = [row["target"] for row in read if row["class_1"] == name]
        recall = f"{100 * predicted.count(name) / len(predicted):.2f} %"
        precision = f"{100 * targets.count(name) / len(targets):.2f} %" if targets else "-"
        assert " ".join(line.split()) == f"{name} {len(predicted)} {recall} {precision}"
