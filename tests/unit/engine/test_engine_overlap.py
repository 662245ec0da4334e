"""Warnings about images that are both trained on and held out."""

import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import arguments, newest, train_here
from PIL import Image

from imagenet_cls.commands.train import train_command
from imagenet_cls.config.schema import Config, DataConfig, ModelConfig
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.engine.overlap import initial_weights_warning, same_images_warning


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


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the class folders of the digits, with val_fraction 0.2."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    data = {"data.name": "folder", "data.val": "null", "data.val_fraction": 0.2}
    train_here(arguments(digits, folder, train__max_steps=1, **data))
    return folder


def names(data: DataConfig, part: str) -> set[str]:
    source = getattr(open_datasets(data), part)
    return {source.name(i) for i in range(len(source))}


@pytest.mark.parametrize(
    "changes",
    [
        {"val_fraction": 0.2},
        {"val_fraction": 0.1},
        {"val_fraction": 0.4},
        {"val_fraction": None, "fold": [1, 5]},
    ],
)
def test_initial_weights_warn_of_images_that_were_trained_on(
    digits: Path, trained: Path, changes: dict[str, Any]
) -> None:
    before = DataConfig(root=str(digits), val=None, val_fraction=0.2)
    data = replace(before, **changes)
    held_out = names(data, "val")
    common = len(names(before, "train") & held_out)
    for checkpoint in (trained, newest(trained), newest(trained) / "model.safetensors"):
        config = Config(model=ModelConfig(checkpoint=str(checkpoint)), data=data)
        warning = initial_weights_warning(config, open_datasets(data))
        assert (warning is not None) is (common > 0)
        if warning is not None:
            assert f" {common} of the {len(held_out)} images " in warning
            given = dict(word.split("=") for word in shlex.split(warning.rpartition(" is ")[2]))
            assert given["data.val_fraction"] == "0.2"


def test_initial_weights_of_other_images_do_not_warn(
    digits: Path, trained: Path, tmp_path: Path
) -> None:
    smaller = tmp_path / "smaller"
    shutil.copytree(digits / "train", smaller / "train")
    next((smaller / "train" / "0").glob("*.jpg")).unlink()
    data = DataConfig(root=str(smaller), val=None, val_fraction=0.4)
    config = Config(model=ModelConfig(checkpoint=str(trained)), data=data)
    assert initial_weights_warning(config, open_datasets(data)) is None
    for file in (tmp_path / "weights.pth", tmp_path / "missing"):
        other = replace(config, model=ModelConfig(checkpoint=str(file)))
        assert initial_weights_warning(other, open_datasets(data)) is None
