"""Datasets of the Hugging Face Hub: parts, columns, classes and digests of local folders, bad rows,
and errors without a network. `test_hub_on_ranks.py` downloads.

Runs end in the bits of a run from class folders, on one rank and on two, also after a kill and a
resume.
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
from forked_ranks import KillPoint, RankServer
from helpers import (
    arguments,
    datasets_in,
    digits_as_rows,
    fails,
    losses,
    newest,
    saved_bytes,
    state_digest,
    succeeds,
    train_here,
)
from PIL import Image as PillowImage

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.config.rules import unused_values
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

DIGITS = ClassLabel(names=[str(digit) for digit in range(10)])


@pytest.fixture(scope="module")
def folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`folder/saved` and `folder/parquet` have the digits as rows, and every ninth of them as
    `validation`; `folder/one` has no parts.
    """
    folder = tmp_path_factory.mktemp("hub")
    train = digits_as_rows(digits)
    parts = {"train": train, "validation": train.select(range(0, len(train), 9))}
    DatasetDict(parts).save_to_disk(folder / "saved")
    train.save_to_disk(folder / "one")
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


@pytest.mark.parametrize("kind", ["saved", "parquet", "one"])
def test_rows_are_the_files_of_class_folders(folder: Path, digits: Path, kind: str) -> None:
    """Also in a worker that is not forked; the images are not in the message to it. The part `val`
    is also `validation`. A dataset that was saved without parts is any.
    """
    files = indexed_images(index_folder(digits / "train"))
    data = DataConfig(name=f"hf:{folder / kind}")
    rows = opened(data)
    message = pickle.dumps(rows.images)
    rows = replace(rows, images=pickle.loads(message))
    assert len(message) < 1000
    assert rows.classes == files.classes and len(rows) == len(files)

    for i in (0, 99, 100, 1000, len(files) - 1):
        image, target = rows.load(i)
        expected, expected_target = files.load(i)
        assert torch.equal(image, expected) and target == expected_target
    if kind != "one":
        assert len(open_datasets(data).val) == 200
        with pytest.raises(DataError):
            open_datasets(replace(data, val="test"))


def test_digest_is_that_of_the_content(folder: Path, tmp_path: Path) -> None:
    """Of saved rows, of Parquet files, and of a copy with other times; the fingerprints of the
    library differ.
    """
    shutil.copytree(folder / "parquet", tmp_path / "copy")
    for file in (tmp_path / "copy").iterdir():
        os.utime(file, (1, 1))
    places = (folder / "saved", folder / "parquet", tmp_path / "copy")
    assert len({opened(DataConfig(name=f"hf:{place}")).digest for place in places}) == 1


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


@pytest.mark.parametrize(
    ("kind", "values", "classes", "targets"),
    [
        ("uint8", [2, 0, 2], "0 1 2", [2, 0, 2]),
        ("float64", [2.0, 0.0, 2.0], "0 1 2", [2, 0, 2]),
        ("large_string", ["b", "a", "ä"], "a b ä", [1, 0, 2]),
        ("string", ["10.0", "2", "9.0"], "2 9 10", [2, 0, 1]),
    ],
)
def test_values_of_a_named_column_are_classes(
    tmp_path: Path, kind: str, values: list[Any], classes: str, targets: list[int]
) -> None:
    data = save(tmp_path, values, Value(kind))
    with pytest.raises(DataError, match="label"):  # no column is a ClassLabel
        opened(data)
    data.kwargs["label"] = "label"
    source = opened(data)
    assert source.classes == tuple(classes.split())
    assert [source.load(i)[1] for i in range(3)] == targets


@pytest.mark.parametrize(
    ("labels", "feature", "classes", "targets"),
    [
        ([[1, 0], [], [1]], List(Value("int64")), ("0", "1"), [[1, 1], [0, 0], [0, 1]]),
        ([["b", "a"], None], List(Value("string")), ("a", "b"), [[1, 1], [0, 0]]),
        ([[0, 1], []], List(ClassLabel(names=["b", "a"])), ("b", "a"), [[1, 1], [0, 0]]),
        (["b; a", "", "b"], Value("string"), ("a", "b"), [[1, 1], [0, 0], [0, 1]]),
    ],
)
def test_several_labels_of_a_row(
    labels: list[Any], feature: Any, classes: tuple[str, ...], targets: list[Any], tmp_path: Path
) -> None:
    found = opened(with_labels(save(tmp_path, labels, feature)))
    assert found.classes == classes and found.required_targets("").tolist() == targets


def with_labels(data: DataConfig) -> DataConfig:
    return replace(data, labels="multi", kwargs={"label": "label"})


@pytest.mark.parametrize("labels", [[[1, 0, 0], [0, 1, 0]], [[1, 0], [0, 1]], [1, 0]])
def test_a_number_for_each_class_or_one_label_is_an_error(
    labels: list[Any], tmp_path: Path
) -> None:
    feature = Value("int64") if labels == [1, 0] else List(Value("int64"))
    with pytest.raises(DataError):
        opened(with_labels(save(tmp_path, labels, feature)))


def test_parts_that_are_not_used_are_noted(folder: Path) -> None:
    data = DataConfig(name=f"hf:{folder / 'saved'}", val=None, val_fraction=0.2)
    assert "validation" in (open_datasets(data).note or "")
    assert open_datasets(replace(data, val="val", val_fraction=None)).note is None


def test_rows_of_one_image_are_on_one_side(tmp_path: Path) -> None:
    files = [{"bytes": encoded(), "path": f"{i // 3}.png"} for i in range(30)]
    files[3]["bytes"] = encoded("bmp")  # another image of the same name
    data = save(tmp_path, [i % 2 for i in range(30)], images=files)
    parts: Any = open_datasets(replace(data, val=None, val_fraction=0.5))
    sides = [
        {int(row) // 3 for row in part.numbers if row != 3} for part in (parts.train, parts.val)
    ]
    assert sides[0].isdisjoint(sides[1]) and len(parts.train) + len(parts.val) == 30


@pytest.mark.parametrize(
    ("feature", "labels"),
    [
        (DIGITS, [1, -1]),
        (Value("int64"), [None, None]),
        (Value("string"), ["a", None]),
        (Value("string"), ["01", "1"]),
        (Value("string"), ["a", "nan"]),
        (Value("float32"), [0.0, 1.5]),
        (Value("bool"), [False, True]),
        (Value("int64"), [10**12, 0]),
    ],
)
def test_rows_without_a_class_raise(tmp_path: Path, feature: Any, labels: list[Any]) -> None:
    data = replace(save(tmp_path, labels, feature), kwargs={"label": "label"})
    with pytest.raises(DataError, match="column 'label'"):
        opened(data)


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


@pytest.mark.parametrize("content", [b"", b"text", encoded("jpeg", (64, 64))[:400], None])
def test_bad_row_raises_with_its_name(tmp_path: Path, content: bytes | None) -> None:
    good = {"bytes": encoded(), "path": None}
    bad = None if content is None else {"bytes": content, "path": "bad.jpg"}
    source = opened(save(tmp_path, [0, 1], images=[good, bad]))
    source.load(0)
    name = "" if content is None else r" \(bad.jpg\)"
    with pytest.raises(DataError, match=rf"^hf:{tmp_path}/train\[1\]{name}"):
        source.load(1)


def test_exif_orientation_is_applied_if_asked_for(tmp_path: Path) -> None:
    exif = PillowImage.Exif()
    exif[0x0112] = 6
    data = save(tmp_path, [0], images=[encoded("jpeg", (8, 16), exif=exif)])
    assert opened(replace(data, exif="apply")).load(0)[0].shape == (3, 8, 16)
    config = load_config("resnet50", [f"data.name={data.name}", "data.exif=apply"]).config
    assert "data.exif" not in [problem.key for problem in unused_values(config)]


@pytest.mark.parametrize(
    ("name", "kwargs", "kind"),
    [
        ("hf:photos", {}, UsageError),
        ("hf:user/name", {"revision": 1234567}, UsageError),
        ("hf:nobody/nothing", {}, ResourceError),
        ("hf:a/b/c", {}, DataError),
        ("hf:./nothing", {}, DataError),
        ("hf:{folder}/parquet", {"subset": "other"}, DataError),
        ("hf:{folder}/parquet", {"revision": "main"}, DataError),
        ("hf:{folder}/broken", {}, DataError),
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


# ---- runs

SETTINGS = {"data__val": "train", "data__val_fraction": "null", "train__epochs": 1}


def words(place: Path, work_dir: Path, **changes: Any) -> list[str]:
    settings = {"data__name": f"hf:{place}"} | SETTINGS | changes
    return arguments(".", work_dir, "noisy", **settings)


@pytest.fixture(scope="module")
def folder_run(train_on_digits: Callable[..., Path]) -> Path:
    return train_on_digits("noisy", data__name="folder", **SETTINGS)


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_resumed_run_ends_in_the_bits_of_class_folders(
    kind: str, folder: Path, tmp_path: Path, folder_run: Path
) -> None:
    changes = {"data__num_workers": 2}
    train_here([*words(folder / kind, tmp_path / "run", **changes), "train.max_steps=5"])
    train_here([*words(folder / kind, tmp_path / "run", **changes), "--resume"])
    assert losses(tmp_path / "run") == losses(folder_run)
    assert saved_bytes(tmp_path / "run") == saved_bytes(folder_run)


@pytest.mark.nightly
def test_two_ranks_resume_after_a_kill(
    folder: Path, digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    """From Parquet files, which the ranks convert at the start of the first run."""
    every = {"checkpoint__every_steps": 4}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = SETTINGS | every
    rank_server.train(arguments(digits, whole, "noisy", data__name="folder", **settings), 2)
    output = tmp_path / "output.txt"
    start = words(folder / "parquet", parts, **every)
    env = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    kill = KillPoint("in_forward", 9, rank=1)
    codes = rank_server.run(start, output, 2, [kill], **env)
    assert codes[1] == -9, output.read_text()
    assert newest(parts).name.endswith(("4", "8"))
    codes = rank_server.run([*start, "--resume"], output, 2, **env)
    assert codes == [0, 0], output.read_text()
    assert losses(parts) == losses(whole)
    assert state_digest(parts) == state_digest(whole)


def test_validation_rows_may_lack_a_label(tmp_path: Path) -> None:
    features = Features(image=Image(), label=List(Value("string")))
    for part, labels in (("train", [["a"], ["b", "c"]]), ("validation", [["c"], ["a"]])):
        rows = Dataset.from_dict({"image": [encoded()] * 2, "label": labels}, features=features)
        rows.to_parquet(tmp_path / "rows" / f"{part}.parquet")
    several = {
        "data__labels": "multi",
        "data__kwargs": "{label: label}",
        "model__name": "resnet20_cifar",
        "data__val": "val",
        "loss__name": "bce",
        "checkpoint__best": "map",
        "train__global_batch_size": 2,
    }
    train_here(words(tmp_path / "rows", tmp_path / "run", **several))
    assert "2 images of 2 classes" in succeeds(evaluate_command, tmp_path / "run")


def test_commands_read_the_rows(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    held_out = {"data__val": "null", "data__val_fraction": 0.2, "model__name": "resnet20_cifar"}
    line = words(folder / "saved", run, **held_out)
    train_here([*line, "train.max_steps=2"])
    assert "359 images of 10 classes" in succeeds(evaluate_command, run)
    config, *overrides = line[:-2]
    fails(2, verify_command, config, *overrides)
    succeeds(pack_command, config, tmp_path / "packed", *overrides)
    assert len(datasets_in(tmp_path / "packed").train) == 1438
