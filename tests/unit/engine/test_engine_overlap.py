"""A warning about images that are both trained on and held out."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import arguments
from PIL import Image

from imagenet_cls.commands.train import train_command
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.engine.overlap import same_images_warning


class Numbered:
    """Images of five classes in turn, whose targets are known or not."""

    classes = ("a", "b", "c", "d", "e")

    def __init__(self, count: int, known: bool = True):
        self.count = count
        if known:
            self.targets = [i % 5 for i in range(count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return Image.new("RGB", (16, 16), (i, 0, 0)), i % 5


def ignores_part(root: str, part: str, known: bool = True) -> Numbered:
    return Numbered(128, known)


def uses_part(root: str, part: str) -> Numbered:
    return Numbered(128 if part == "train" else 32)


def write_images(folder: Path, value: int, size: int = 8) -> None:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng(value + number).integers(
                0, 255, (size, size, 3), dtype=np.uint8
            )
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def test_same_folder_or_a_copy_of_it_as_validation_part_warns(tmp_path: Path) -> None:
    write_images(tmp_path / "train", 0)
    shutil.copytree(tmp_path / "train", tmp_path / "copy")
    write_images(tmp_path / "other", 10, size=9)  # the same names
    found = {}
    for val in ("train", "copy", "other"):
        data = DataConfig(root=str(tmp_path), val=val)
        found[val] = same_images_warning(data, open_datasets(data)) is not None
    assert found == {"train": True, "copy": True, "other": False}
    split = DataConfig(root=str(tmp_path), val=None, val_fraction=0.5)
    assert same_images_warning(split, open_datasets(split)) is None


def test_list_with_images_of_the_training_list_warns(tmp_path: Path) -> None:
    write_images(tmp_path, 0)
    (tmp_path / "train.txt").write_text("cat/0.png cat\ndog/0.png dog\n")
    data = DataConfig("list", str(tmp_path), train="train.txt", val="val.txt")
    for lines, count in (("./dog/0.png dog\ncat/1.png cat\n", "1 of the 2"), ("cat/1.png cat", "")):
        (tmp_path / "val.txt").write_text(lines)
        warning = same_images_warning(data, open_datasets(data, allow_missing=True))
        assert count in warning if count else warning is None


@pytest.mark.parametrize(
    ("data", "warns"),
    [
        (DataConfig("test_engine_overlap:ignores_part"), True),
        (DataConfig("test_engine_overlap:ignores_part", kwargs={"known": False}), True),
        (DataConfig("test_engine_overlap:ignores_part", val=None, val_fraction=0.5), False),
        (DataConfig("test_engine_overlap:uses_part"), False),
    ],
)
def test_factory_that_ignores_its_part_warns(data: DataConfig, warns: bool) -> None:
    assert (same_images_warning(data, open_datasets(data)) is not None) is warns


def test_dry_run_prints_the_warning(call: Callable, digits: Path, tmp_path: Path) -> None:
    factory = "test_engine_overlap:ignores_part"
    words = arguments(digits, tmp_path / "run", data__name=factory, augment__size_px=16)
    code, out, _ = call(train_command, *words, "--dry-run")
    (line,) = [line for line in out.splitlines() if "have the same number" in line]
    assert code == 0 and line.startswith("warning: ") and factory in line
