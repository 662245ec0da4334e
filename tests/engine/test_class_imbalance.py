"""Training on classes of different sizes: balanced sampling and class weights."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import arguments, saved_bytes, train_here
from PIL import Image

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
from imagenet_cls.data.builtin import write_digits

RARE = "8"
SETTINGS = {
    "plain": "seed=0",
    "balance": "data.balance=1",
    "weights": "loss.class_weights=balanced",
}


@pytest.fixture(scope="module")
def imbalanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits in train and val, four to one; of one class, train has 5 %."""
    root = tmp_path_factory.mktemp("imbalanced")
    write_digits(root, "train")
    for folder in sorted((root / "train").iterdir()):
        files = sorted(folder.iterdir())
        (root / "val" / folder.name).mkdir(parents=True)
        for file in files[::5]:
            shutil.move(file, root / "val" / folder.name)
        kept = [file for number, file in enumerate(files) if number % 5]
        for file in kept[round(0.05 * len(kept)) :] if folder.name == RARE else []:
            file.unlink()
    return root


def words(root: Path, work_dir: Path, **changes: object) -> list[str]:
    return arguments(
        root, work_dir, data__name="folder", data__val="val", data__val_fraction="null", **changes
    )


def recall(root: Path, work_dir: Path, setting: str, seed: int) -> tuple[float, float]:
    """Of a run: the recall of the rare class and the accuracy, in percent."""
    key, value = SETTINGS[setting].split("=")
    changes = {"train__epochs": 8, "optimizer__lr": 0.05, "seed": seed} | {
        key.replace(".", "__"): value
    }
    changes["seed"] = seed
    train_here(words(root, work_dir, **changes))
    table = work_dir / "predictions.csv"
    assert (
        evaluate_command([str(work_dir), "--out", str(table), "--allow-import", "helpers:plain"])
        == 0
    )
    rows = list(csv.DictReader(table.open()))
    hits = [row["class_1"] == row["target"] for row in rows]
    rare = [hit for hit, row in zip(hits, rows, strict=True) if row["target"] == RARE]
    return 100 * sum(rare) / len(rare), 100 * sum(hits) / len(hits)


def test_balanced_run_resumes_and_starts_with_the_class_sizes(
    imbalanced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "data__balance": 1,
        "loss__class_weights": "effective",
        "model": "noisy",
        "data__repeats": 2,
    }
    train_here(words(imbalanced, tmp_path / "whole", **changes))
    assert "7 (8) to 146 (3) per class" in capsys.readouterr().out
    parts = words(imbalanced, tmp_path / "parts", **changes)
    train_here([*parts, "train.max_steps=13"])
    train_here([*parts, "--resume"])
    assert saved_bytes(tmp_path / "parts") == saved_bytes(tmp_path / "whole")


class WithoutTargets:
    classes = ("a", "b")

    def __init__(self, root: str, part: str):
        pass

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (16, 16)), i % 2


@pytest.mark.parametrize("setting", ["data.balance=0.5", "loss.class_weights=effective"])
def test_unknown_targets_are_an_error(tmp_path: Path, call: Callable, setting: str) -> None:
    name = f"data.name={__name__}:WithoutTargets"
    code, _, err = call(
        train_command,
        *arguments(tmp_path, tmp_path / "run", train__global_batch_size=32),
        name,
        setting,
    )
    assert code == 3 and setting.partition("=")[0] in err and "targets" in err


@pytest.mark.nightly
def test_balance_and_class_weights_raise_the_recall_of_a_rare_class(
    imbalanced: Path, tmp_path: Path
) -> None:
    """Means of two seeds. (docs/data.md has those of three.)"""
    means = {}
    for setting in SETTINGS:
        found = [
            recall(imbalanced, tmp_path / f"{setting}{seed}", setting, seed) for seed in range(2)
        ]
        means[setting] = [sum(values) / 2 for values in zip(*found, strict=True)]
        print(f"\n{setting}: {means[setting]} of {found}")
    for setting in ("balance", "weights"):
        assert means[setting][0] > means["plain"][0] + 10, means
        assert means[setting][1] > means["plain"][1], means
