"""Opening every kind of dataset, and the problems of its config."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets
from helpers import datasets_in, write_files
from PIL import Image

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.builtin import write_digits
from imagenet_cls.data.datasets import data_problems, open_datasets
from imagenet_cls.data.files import has_training_part
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.map_style import classes_of_dataset, image_set_of, targets_of_dataset
from imagenet_cls.errors import DataError, UserError

# ---- a user's own datasets


class Own:
    """A map-style dataset of one item."""

    def __init__(self, item: Any, length: int = 4, **attributes: Any):
        self.item = item
        self.length = length
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.item


def gray(root: str, part: str, size: int = 8) -> Own:
    assert root.endswith("somewhere")
    image = Image.new("L", (size, size), 15)
    return Own((image, 1), 10 if part == "fit" else 4, classes=["even", "odd"])


def tensors(root: str, part: str) -> Own:
    return Own((torch.full((1, 5, 6), 7, dtype=torch.uint8), torch.tensor(1)), num_classes=3)


def no_part(root: str) -> None: ...


RGB = Image.new("RGB", (8, 8))
WRONG = {
    "generator": (i for i in range(3)),
    "floats": Own((torch.rand(3, 4, 4), 0), num_classes=2),
    "not_a_pair": Own({"image": 1}, num_classes=2),
    "fraction": Own((RGB, 0.7), num_classes=2),
    "out_of_range": Own((RGB, 2), num_classes=2),
    "other_target_in_its_list": Own((RGB, 1), num_classes=2, labels=[0] * 4),
    "without_classes": Own((RGB, 2)),
    "out_of_range_in_its_list": Own((RGB, 0), classes=["a", "b"], targets=[0, 1, 0, -1]),
}


def wrong(root: str, part: str, kind: str) -> Any:
    return WRONG[kind]


def test_open_factory_returns_train_and_val() -> None:
    data = DataConfig("test_data_datasets:gray", "somewhere", train="fit", kwargs={"size": 6})
    assert data_problems(data) == []
    opened = open_datasets(data)
    assert (len(opened.train), len(opened.val), opened.classes) == (10, 4, ("even", "odd"))
    image, target = opened.train.load(5)
    assert torch.equal(image, torch.full((3, 6, 6), 15)) and target == 1
    of_tensors = open_datasets(DataConfig(name="test_data_datasets:tensors"))
    image, target = of_tensors.train.load(0)
    assert of_tensors.classes == ("0", "1", "2") and image.shape == (3, 5, 6) and target == 1


@pytest.mark.parametrize("kind", WRONG)
def test_open_factory_with_a_wrong_data_set_raises(kind: str) -> None:
    data = DataConfig(name="test_data_datasets:wrong", kwargs={"kind": kind})
    if kind == "out_of_range_in_its_list":
        data = replace(data, classes=["b", "a"])
    with pytest.raises(UserError):
        open_datasets(data).train.load(0)


def test_known_targets_of_a_dataset_are_whole_numbers() -> None:
    found = targets_of_dataset(Own((None, 0), targets=[1.0, 0.0, 2.0, 1.0]), "single")
    assert found.dtype == np.int64 and found.tolist() == [1, 0, 2, 1]
    assert targets_of_dataset(Own((None, 0), targets=[0.7] * 4), "single") is None
    rows = targets_of_dataset(Own((None, 0), targets=np.eye(4, 3)), "multi")
    assert classes_of_dataset(None, "own", rows) == ("0", "1", "2")


def test_dataset_that_holds_an_open_file_is_noted() -> None:
    with Path(__file__).open("rb") as file:
        own = Own((RGB, 0), num_classes=2, opened=file)
        for dataset in (own, Own((RGB, 0), num_classes=2, dataset=own)):
            notes = [
                image_set_of(dataset, DataConfig("own", num_workers=workers), "train").note
                for workers in ("auto", 0)
            ]
            assert "'opened'" in str(notes[0]) and notes[1] is None


# ---- files


def names(source: ImageSet | None) -> list[str]:
    return [source.name(i) for i in range(len(source))]


@pytest.mark.parametrize("parts", [("train", "val"), ("val",)])
def test_open_folder_with_other_validation_classes_raises(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    names = ("train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/c/1.jpg")
    write_files(tmp_path, dict.fromkeys(names, "x"))
    with pytest.raises(DataError):
        datasets_in(tmp_path, parts)


@pytest.mark.parametrize("parts", [("train", "val"), ("val",)])
def test_classes_of_a_validation_list_are_those_of_the_training_list(
    image_folder: Path, tmp_path: Path, parts: tuple[str, ...]
) -> None:
    texts = {"train.txt": "train/dog/000.JPEG woof\ntrain/cat/000.JPEG meow\n"}
    write_files(tmp_path, texts | {"val.csv": "path,label\nval/dog/000.JPEG,woof\n"})
    lists = {"train": str(tmp_path / "train.txt"), "val": str(tmp_path / "val.csv")}
    opened = datasets_in(image_folder, parts, name="list", **lists)
    assert opened.classes == ("meow", "woof") and opened.val.load(0)[1] == 1


@pytest.mark.parametrize(
    ("name", "train"),
    [("folder", "shards-{0..2}.tar"), ("folder", "x" * 300), ("list", "gone")],
)
def test_training_part_may_be_missing(name: str, train: str, tmp_path: Path) -> None:
    write_files(tmp_path, {"val/cat/0.jpg": "x", "val.txt": "val/cat/0.jpg cat\n"})
    data = DataConfig(name, str(tmp_path), train, "val" if name == "folder" else "val.txt")
    assert not has_training_part(data) and has_training_part(replace(data, train=data.val))
    assert open_datasets(data, ("val",)).classes == ("cat",)


def test_open_digits_returns_train_and_val(tmp_path: Path) -> None:
    data = DataConfig(name="digits", root=str(tmp_path), val=None, val_fraction=0.2)
    opened = open_datasets(data)
    assert opened.classes == tuple("0123456789") and len(opened.train) + len(opened.val) == 1797
    image, target = opened.train.load(500)
    assert image.shape == (3, 32, 32) and opened.train.name(500).startswith(f"{target}/")
    next(tmp_path.glob("train/3/*.jpg")).unlink()
    with pytest.raises(DataError):
        open_datasets(data)


def test_write_digits_by_several_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        pool.starmap(write_digits, [(tmp_path, "train")] * 2, chunksize=1)
    assert [path.name for path in tmp_path.iterdir()] == ["train"]
    write_digits(tmp_path, "train")  # finds all of them


# ---- torchvision's sets


class WithTrainFlag(Own):
    """As CIFAR10: raises where its files are missing, and downloads them."""

    def __init__(self, root: str, train: bool = True, download: bool = False):
        if not download:
            raise RuntimeError("Dataset not found or corrupted.")
        super().__init__((RGB, 1), 20 if train else 10, targets=[0, 1] * (10 if train else 5))


class WithSplit(Own):
    """As Flowers102, without a download."""

    def __init__(self, root: str, split: str = "train"):
        if split not in ("train", "test"):
            raise ValueError(f"Unknown value '{split}' for argument split.")
        if root == "nowhere":
            raise RuntimeError("Dataset not found or corrupted.")
        super().__init__((RGB, 1), 20 if split == "train" else 10, num_classes=2)


@pytest.mark.parametrize("factory", [WithTrainFlag, WithSplit])
def test_open_torchvision_part_by_flag_or_split(
    monkeypatch: pytest.MonkeyPatch, factory: type
) -> None:
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", factory)
    data = DataConfig(name="torchvision:CIFAR10", root="somewhere")
    for val in ("val", "test"):
        opened = open_datasets(replace(data, val=val))
        assert (len(opened.train), len(opened.val), opened.classes) == (20, 10, ("0", "1"))


@pytest.mark.parametrize(
    ("factory", "change"),
    [
        (WithSplit, {"root": "nowhere"}),
        (WithSplit, {"train": "unknown"}),
        (WithTrainFlag, {"train": "training"}),
    ],
)
def test_open_torchvision_without_files_or_part_raises(
    monkeypatch: pytest.MonkeyPatch, factory: type, change: dict
) -> None:
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", factory)
    with pytest.raises(DataError):
        open_datasets(DataConfig(name="torchvision:CIFAR10", **change))


# ---- problems of a config


@pytest.mark.parametrize(
    ("name", "kwargs", "key"),
    [
        ("torchvision:VOCDetection", {}, "name"),
        ("torchvision:CIFAR10", {"download": True}, "kwargs.download"),
        ("torchvision:EMNIST", {"split": "letters", "splt": 1}, "kwargs.splt"),
        ("torchvision:FakeData", {}, "val"),
        ("synthetic", {"num_classes": 0}, "kwargs.num_classes"),
        ("digits", {}, "val"),
        ("hf:user/name", {"lable": "y"}, "kwargs.lable"),
        ("hfds/user/name", {}, "name"),
        ("no_such_sets:f", {}, "name"),
        ("test_data_datasets:no_part", {}, "name"),
        ("test_data_datasets:gray", {"sise": 3}, "kwargs.sise"),
    ],
)
def test_data_problems_name_the_key(name: str, kwargs: dict, key: str) -> None:
    problems = data_problems(DataConfig(name=name, kwargs=kwargs))
    assert [problem.key for problem in problems] == [f"data.{key}"]


def test_classes_of_one_name_get_two() -> None:
    names = classes_of_dataset(Own((None, 0), classes=["crane", ("a", "b"), "crane"]), "own", None)
    assert names == ("crane, 0", "a, b", "crane, 2")
