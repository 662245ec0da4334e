"""Several labels for an image (`data.labels` multi): lists, shards, datasets of one's own, and what
splits and subsets do with rows of zeros and ones.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archive_writers import write_tar
from helpers import datasets_in, write_files
from test_data_datasets import Own

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.builtin import ComposedDigits
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.image_set import ImageSet, target_at
from imagenet_cls.data.lists import index_list
from imagenet_cls.data.map_style import image_set_of
from imagenet_cls.data.targets import class_sizes
from imagenet_cls.errors import DataError

IMAGE = b"\xff\xd8 some image"
ROWS = [[0, 0], [1, 1], [1, 0]]  # of cat and dog


def test_images_of_a_class_are_counted_beyond_what_a_byte_holds() -> None:
    assert class_sizes(np.ones((300, 1), np.uint8), 1).tolist() == [300]


# ---- lists


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path / "images", dict.fromkeys(("a 1.jpg", "b.jpg", "c.jpg"), "x"))
    return tmp_path


LISTS = {
    "lines.txt": "images/a 1.jpg\nimages/b.jpg dog;cat\n\nimages/c.jpg\tcat\n",
    "short.csv": "images/a 1.jpg\nimages/b.jpg,dog; cat\nimages/c.jpg, cat ;\n",
    "columns.csv": "id,tags,file\n1,,images/a 1.jpg\n2,dog;cat,images/b.jpg\n3,cat,images/c.jpg\n",
    "last.csv": "cat,dog,PATH\n0, 0 ,images/a 1.jpg\n1,1,images/b.jpg\n1,0,images/c.jpg\n",
    "pandas.csv": ",path,cat,dog\n0,images/a 1.jpg,0.0,0.0\n1,images/b.jpg,1.0,1.0\n"
    "2,images/c.jpg,1.0,0.0\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_list_has_the_rows_of_its_labels(folder: Path, name: str) -> None:
    (folder / name).write_text(LISTS[name])
    index = index_list(folder / name, folder, None, multilabel=True)
    assert index.classes == ("cat", "dog") and index.targets.tolist() == ROWS
    assert target_at(index.targets, 0).dtype == torch.float32
    assert [index.name(i)[7:] for i in range(3)] == ["a 1.jpg", "b.jpg", "c.jpg"]


@pytest.mark.parametrize(
    ("text", "given", "classes", "rows"),
    [
        ("images/b.jpg,0;2\nimages/c.jpg,1\n", "", "0 1 2", [[1, 0, 1], [0, 1, 0]]),
        ("images/b.jpg,0;2\n", "cat dog eel", "cat dog eel", [[1, 0, 1]]),
        ("dog,path,cat\n1,images/b.jpg,0\n", "eel cat dog", "eel cat dog", [[0, 0, 1]]),
        ("path,2,1\nimages/b.jpg,1,0\n", "", "2 1", [[1, 0]]),
    ],
)
def test_labels_and_columns_are_names_or_numbers_of_classes(
    folder: Path, text: str, given: str, classes: str, rows: list[list[int]]
) -> None:
    (folder / "t.csv").write_text(text)
    index = index_list(folder / "t.csv", folder, given.split() or None, multilabel=True)
    assert index.classes == tuple(classes.split()) and index.targets.tolist() == rows


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("t.csv", "path,cat,dog\nimages/b.jpg,0,1\nimages/c.jpg,0,2\n", "t.csv:3: .*'dog'"),
        ("t.csv", "path,cat,cat\nimages/b.jpg,1,0\n", "t.csv:1: .*'cat'"),
        ("t.csv", "path,cat,a;b\nimages/b.jpg,1,0\n", "t.csv:1: .*'a;b'"),
        ("t.csv", "path,labels\nimages/b.jpg,cat,dog\n", "t.csv:2: "),
        ("t.csv", "path,labels\nimages/b.jpg,\n", "t.csv: "),  # no image has a label
        ("t.csv", "path,labels\nimages/b.jpg,cat|dog\n", "t.csv: "),
        ("t.csv", "images/b.jpg,x\nimages/c.jpg,x;fox\n", "t.csv:2: "),
        ("t.txt", "images/b.jpg x; y\n", "t.txt:1: "),
        ("t.txt", "images/b.jpg x\nimages/nothing\n", "t.txt:2: "),
    ],
)
def test_bad_row_is_an_error_with_its_line(
    folder: Path, name: str, text: str, expected: str
) -> None:
    (folder / name).write_text(text)
    classes = None if "path," in text else ["x", "y"]
    with pytest.raises(DataError, match=expected):
        index_list(folder / name, folder, classes, multilabel=True)


# ---- shards


def shard(path: Path, labels: list[str | None]) -> None:
    """A sample for each label: an image and its .cls, except for None."""
    files = []
    for i, label in enumerate(labels):
        files.append((f"x/{i}.jpg", IMAGE))
        if label is not None:
            files.append((f"x/{i}.cls", label.encode()))
    write_tar(path, files)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(["cat", None], "has no label x/1"), (["0;1", "0;9"], "'9'"), (["", ""], "no image")],
)
def test_bad_labels_of_shards_are_errors(
    tmp_path: Path, labels: list[str | None], expected: str
) -> None:
    shard(tmp_path / "train" / "a.tar", labels)
    if "0;1" in labels:
        (tmp_path / "train" / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=expected):
        datasets_in(tmp_path, val="train", labels="multi")
    shard(tmp_path / "train" / "a.tar", ["cat", ""])
    with pytest.raises(DataError):  # with one label for each image
        datasets_in(tmp_path, val="train")


def test_class_folders_with_multilabel_are_an_error(tmp_path: Path) -> None:
    write_files(tmp_path / "train", {"cat/0.jpg": "x", "dog/0.jpg": "x"})
    with pytest.raises(DataError, match=r"data\.name=list"):
        datasets_in(tmp_path, val="train", labels="multi")


# ---- datasets of one's own


def source_of(target: Any, **attributes: Any) -> ImageSet:
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    own = Own((image, target), 2, classes=["cat", "dog"], **attributes)
    return image_set_of(own, DataConfig("own", labels="multi"), "train")


@pytest.mark.parametrize("target", [1, [0, 1, 0], [0, 2], [-1, 0], [0.0, math.nan], "ab"])
def test_bad_row_of_a_dataset_is_an_error_with_its_number(target: Any) -> None:
    row = source_of((True, False)).load(1)[1]
    assert row.dtype == torch.float32 and row.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"train\[1\]"):
        source_of(target).load(1)


@pytest.mark.parametrize(
    "other",
    [
        [[0.6, 0], [0, 1]],
        [[0, 1, 0], [0, 1, 0]],  # of three classes
        [[0, 1]],  # of one image
    ],
)
def test_only_listed_rows_of_zeros_and_ones_are_known(other: Any) -> None:
    found = source_of([1, 0], targets=[[1.0, 0.0], [0.0, 0.0]]).targets
    assert found.dtype == np.uint8 and found.tolist() == [[1, 0], [0, 0]]
    with pytest.raises(DataError, match="key"):
        source_of([1, 0], targets=other).required_targets("key")


# ---- splits and subsets


def rows_of(source: ImageSet) -> dict[int, list[int]]:
    """The target by the number of the image; asserts that both ways to it agree."""
    rows = [source.load(i)[1].tolist() for i in range(len(source))]
    assert rows == source.required_targets("").tolist()
    return dict(zip(source.numbers.tolist(), rows, strict=True))


@pytest.mark.parametrize(
    ("changes", "held_out"),
    [
        ({"fold": [1, 2], "stratify": True}, 1200),
        ({"val_fraction": 0.2, "group": r"\d(?=\]?$)"}, 480),
        ({"val_fraction": 0.2, "classes": ["7", "0"]}, 480),
    ],
)
def test_all_images_are_split_and_keep_their_labels(changes: dict[str, Any], held_out: int) -> None:
    """All are of one stratum, and stay without a label of the chosen classes."""
    name = "imagenet_cls.data.builtin:ComposedDigits"
    config = DataConfig(name, val=None, labels="multi", **changes)
    data = open_datasets(config)
    classes = changes.get("classes", [*"0123456789"])
    assert data.classes == data.train.classes == tuple(classes)
    train, val = rows_of(data.train), rows_of(data.val)
    assert (len(train), len(val)) == (2400 - held_out, held_out)
    expected = ComposedDigits("", "train").targets[:, [*map(int, classes)]]
    assert train | val == dict(enumerate(expected.tolist()))
    half = open_datasets(replace(config, fraction=0.5))
    assert rows_of(half.val) == val
    assert len(half.train) == len(train) // 2 and rows_of(half.train).items() <= train.items()
