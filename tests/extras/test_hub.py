"""Datasets of the Hugging Face Hub: parts, columns, classes and digests of local folders, bad rows,
runs, and errors without a network. `test_hub_on_ranks.py` downloads.
"""

import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    arguments,
    datasets_in,
    digits_as_rows,
    fails,
    losses,
    saved_bytes,
    succeeds,
    train_here,
)
from PIL import Image as PillowImage

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.image_set import ImageSet, indexed_images
from imagenet_cls.data.index import index_folder
from imagenet_cls.errors import DataError, ResourceError, UsageError, UserError
from imagenet_cls.extras.datasets.pack import pack_command
from imagenet_cls.extras.datasets.verify_data import verify_command

pytest.importorskip("datasets")
import datasets
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value

KINDS = ("saved", "parquet")
DIGITS = ClassLabel(names=[str(digit) for digit in range(10)])


@pytest.fixture(scope="module")
def folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`folder/saved` and `folder/parquet` have the digits as rows, and every ninth of them as
    `validation`.
    """
    folder = tmp_path_factory.mktemp("hub")
    train = digits_as_rows(digits)
    parts = {"train": train, "validation": train.select(range(0, len(train), 9))}
    DatasetDict(parts).save_to_disk(folder / "saved")
    parts["validation"].to_parquet(folder / "parquet/validation-00000-of-00001.parquet")
    for number in range(2):
        shard = train.shard(2, number)
        shard.to_parquet(folder / "parquet" / f"train-{number:05d}-of-00002.parquet")
    return folder


@pytest.fixture(autouse=True)
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")


def save(
    folder: Path, labels: list[Any], feature: Any = DIGITS, images: list[Any] | None = None
) -> DataConfig:
    """A config of a dataset with these columns. Its validation part is the training part."""
    columns = {"image": images or [encoded()] * len(labels), "label": labels}
    return save_rows(folder, columns, image=Image(), label=feature)


def save_rows(folder: Path, columns: dict[str, list[Any]], **features: Any) -> DataConfig:
    rows = Dataset.from_dict(columns, features=Features(features))
    DatasetDict({"train": rows}).save_to_disk(folder)
    return DataConfig(name=f"hf:{folder}", val="train")


def encoded(format_: str = "png", size: tuple[int, int] = (4, 6), **options: Any) -> bytes:
    file = io.BytesIO()
    PillowImage.new("RGB", size, (10, 20, 30)).save(file, format_, **options)
    return file.getvalue()


def opened(data: DataConfig) -> ImageSet:
    source = open_datasets(data, ("train",)).train
    assert source is not None
    return source


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_files_of_class_folders(folder: Path, digits: Path, kind: str) -> None:
    """Also in a worker that is not forked; the images are not in the message to it. The part `val`
    is also `validation`; `test` is not there.
    """
    files = indexed_images(index_folder(digits / "train"))
    data = DataConfig(name=f"hf:{folder / kind}")
    rows = opened(data)
    assert rows.classes == files.classes and len(rows) == len(files)
    images: Any = rows.images
    message = pickle.dumps(images.rows)
    assert len(message) < 10_000
    rows = replace(rows, images=replace(images, rows=pickle.loads(message)))
    for i in (0, 99, 100, 1000, len(files) - 1):
        image, target = rows.load(i)
        expected, expected_target = files.load(i)
        assert torch.equal(image, expected) and target == expected_target
    assert len(open_datasets(data).val) == 200
    with pytest.raises(DataError):
        open_datasets(replace(data, val="test"))


def test_digest_is_that_of_the_content(folder: Path) -> None:
    """Of saved rows and of Parquet files; the fingerprints of the library differ."""
    saved, parquet = (opened(DataConfig(name=f"hf:{folder / kind}")) for kind in KINDS)
    assert saved.digest == parquet.digest


def test_digest_changes_with_the_rows(tmp_path: Path) -> None:
    one, two, three = encoded(), encoded("jpeg"), encoded("bmp")
    rows: list[tuple[Any, ...]] = [
        ([0, 1], DIGITS, [one, two]),
        ([0, 2], DIGITS, [one, two]),
        ([0, 1], DIGITS, [one, three]),
        ([0, 1], ClassLabel(names=list("abcdefghij")), [one, two]),
    ]
    digests = {opened(save(tmp_path / str(i), *columns)).digest for i, columns in enumerate(rows)}
    assert len(digests) == len(rows)


TEXTS = Value("string")


@pytest.mark.parametrize(
    ("labels", "feature", "classes", "targets"),
    [
        (["b", "a", "ä"], Value("large_string"), "a b ä", [1, 0, 2]),
        ([["b", "a"], None], List(TEXTS), "a b", [[1, 1], [0, 0]]),
        ([[0, 1], []], List(ClassLabel(names=["b", "a"])), "b a", [[1, 1], [0, 0]]),
        (["b; a", "", "b"], TEXTS, "a b", [[1, 1], [0, 0], [0, 1]]),
    ],
)
def test_labels_of_a_named_column(
    labels: list[Any], feature: Any, classes: str, targets: list[Any], tmp_path: Path
) -> None:
    data = save(tmp_path, labels, feature)
    data = replace(data, labels="multi" if isinstance(targets[0], list) else "single")
    if not isinstance(feature, List):
        with pytest.raises(DataError, match="label"):  # no column is a ClassLabel
            opened(data)
    data.kwargs["label"] = "label"
    found = opened(data)
    assert found.classes == tuple(classes.split())
    assert found.required_targets("").tolist() == targets


@pytest.mark.parametrize(
    ("labels", "feature", "kind"),
    [
        ([1, -1], DIGITS, "single"),
        (["a", None], TEXTS, "single"),
        (["a", "nan"], TEXTS, "single"),
        ([0, 1], Value("int64"), "single"),
        ([["a"], ["b"]], List(TEXTS), "single"),
        ([[1, 0], [0, 1]], List(Value("int64")), "multi"),
        ([["a", None], ["b"]], List(TEXTS), "multi"),
        ([1, 0], DIGITS, "multi"),
    ],
)
def test_labels_without_a_class_raise(
    tmp_path: Path, labels: list[Any], feature: Any, kind: str
) -> None:
    data = save(tmp_path, labels, feature)
    with pytest.raises(DataError, match="column 'label'"):
        opened(replace(data, labels=kind, kwargs={"label": "label"}))


def test_parts_that_are_not_used_are_noted(folder: Path) -> None:
    data = DataConfig(name=f"hf:{folder / 'saved'}", val=None, val_fraction=0.2)
    assert "validation" in (open_datasets(data).note or "")
    assert open_datasets(replace(data, val="val", val_fraction=None)).note is None


def test_columns_of_images(tmp_path: Path) -> None:
    """Bytes without a type are images if the column is named. Two columns of images must be
    chosen from.
    """
    larger = [encoded(size=(8, 9))]
    columns = {"one": [encoded()], "two": larger, "label": [3], "raw": larger}
    features = {"one": Image(), "two": Image(), "label": DIGITS, "raw": Value("binary")}
    data = save_rows(tmp_path, columns, **features)
    for column in ("two", "raw"):
        data.kwargs["image"] = column
        assert opened(data).load(0)[0].shape == (3, 9, 8)
    for other in ("label", "three", None):
        data.kwargs["image"] = other
        with pytest.raises(DataError):
            opened(data)


def test_row_may_name_a_file(tmp_path: Path) -> None:
    """As the rows of a folder of images, which `datasets` loads, too."""
    files = [tmp_path / "train" / name / "1.png" for name in ("cat", "dog")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(encoded())
    source = opened(DataConfig(name=f"hf:{tmp_path}", val="train"))
    image, target = source.load(1)
    assert source.classes[target] == "dog" and image[:, 5, 3].tolist() == [10, 20, 30]
    files[1].unlink()
    with pytest.raises(DataError, match=r"train\[1\] \(.*dog/1.png\)"):
        source.load(1)


@pytest.mark.parametrize("content", [b"text", None])
def test_bad_row_raises_with_its_name(tmp_path: Path, content: bytes | None) -> None:
    good = {"bytes": encoded(), "path": None}
    bad = None if content is None else {"bytes": content, "path": "bad.jpg"}
    source = opened(save(tmp_path, [0, 1], images=[good, bad]))
    source.load(0)
    name = "" if content is None else r" \(bad.jpg\)"
    with pytest.raises(DataError, match=rf"^hf:{tmp_path}/train\[1\]{name}"):
        source.load(1)


@pytest.mark.parametrize(
    ("name", "kwargs", "kind"),
    [
        ("hf:nobody/nothing", {}, ResourceError),
        ("hf:a/b/c", {}, DataError),
        ("hf:{folder}/nothing", {}, DataError),
        ("hf:{folder}/parquet", {"subset": "other"}, DataError),
        ("hf:{folder}/broken", {}, ResourceError),
    ],
)
def test_dataset_that_cannot_be_opened_raises(
    tmp_path: Path, folder: Path, name: str, kwargs: dict[str, Any], kind: type[UserError]
) -> None:
    """Tests are offline: HF_HUB_OFFLINE, set in conftest.py."""
    shutil.copytree(folder / "parquet", tmp_path / "parquet")
    shutil.copytree(folder / "saved", tmp_path / "broken")
    os.truncate(next((tmp_path / "broken").glob("train/*.arrow")), 5000)
    with pytest.raises(kind):
        opened(DataConfig(name=name.format(folder=tmp_path), kwargs=kwargs))


def test_without_the_library_the_error_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets"):
        opened(DataConfig(name=f"hf:{folder / 'saved'}"))


def test_run_ends_in_the_bits_of_class_folders_and_commands_read_its_rows(
    folder: Path, tmp_path: Path, train_on_digits: Callable[..., Path]
) -> None:
    """The run is stopped and resumed, with data workers."""
    settings = {"data__val_fraction": "null", "train__epochs": 1, "model__name": "resnet20_cifar"}
    files = train_on_digits(data__name="folder", data__val="train", **settings)
    run = tmp_path / "run"
    settings |= {"data__name": f"hf:{folder / 'saved'}", "data__val": "val"}
    words = arguments(".", run, data__num_workers=2, **settings)
    train_here([*words, "train.max_steps=5"])
    train_here([*words, "--resume"])
    assert losses(run) == losses(files) and saved_bytes(run) == saved_bytes(files)
    assert "200 images of 10 classes" in succeeds(evaluate_command, run)
    config, *overrides = words[:-2]
    fails(2, verify_command, config, *overrides)
    succeeds(pack_command, config, tmp_path / "packed", *overrides)
    assert len(datasets_in(tmp_path / "packed").train) == 1797
