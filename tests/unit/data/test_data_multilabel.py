"""Several labels for an image (`data.labels` multi): lists, shards, datasets of one's own, and what
splits and subsets do with rows of zeros and ones.
"""

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archive_writers import write_tar, write_zip
from helpers import datasets_in, write_files
from test_data_datasets import Own, names

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data import archives
from imagenet_cls.data.datasets import DataSets, open_datasets
from imagenet_cls.data.lists import index_list
from imagenet_cls.data.sources import ImageSource, required_targets, stack_targets, target_at
from imagenet_cls.data.targets import (
    class_sizes,
    classes_at,
    map_targets,
    multi_hot,
    split_labels,
    strata,
    target_bytes,
)
from imagenet_cls.data.test_set import describe_images, locate_test_set, open_test_set
from imagenet_cls.errors import DataError

IMAGE = b"\xff\xd8 some image"
ROWS = [[1, 1], [0, 0], [1, 0]]  # of cat and dog


# ---- rows of zeros and ones


def test_labels_are_split_without_empty_ones() -> None:
    assert split_labels(" cat; a b ;;dog;") == ("cat", "a b", "dog")
    assert split_labels(" ; ") == split_labels("") == ()


def test_rows_of_targets() -> None:
    targets = multi_hot([[1, 0, 1], [], [2]], 3)
    assert targets.dtype == np.uint8 and targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert [classes_at(targets, i) for i in range(3)] == [(0, 1), (), (2,)]
    assert class_sizes(targets, 3).tolist() == [1, 1, 1]
    assert class_sizes(multi_hot([[0]] * 300, 1), 1).tolist() == [300]  # more than a byte holds
    assert len(set(strata(targets).tolist())) == 1
    swapped = map_targets(targets, np.array([1, -1, 0]), 2)
    assert swapped.tolist() == [[0, 1], [0, 0], [1, 0]]
    assert target_bytes(targets) != target_bytes(targets[::-1])
    batch = stack_targets([target_at(targets, i) for i in range(3)])
    assert batch.dtype == torch.float32 and batch.tolist() == targets.tolist()


def test_targets_of_one_class_stay_integers() -> None:
    targets = np.array([2, 0])
    assert classes_at(targets, 0) == (2,) and strata(targets) is targets
    batch = stack_targets([target_at(targets, i) for i in range(2)])
    assert batch.dtype == torch.int64 and batch.tolist() == [2, 0]


# ---- lists


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path / "images", dict.fromkeys(("a 1.jpg", "b.jpg", "c.jpg"), "x"))
    return tmp_path


LISTS = {
    "lines.txt": "images/a 1.jpg dog;cat\nimages/b.jpg\n\nimages/c.jpg\tcat\n",
    "spaces.txt": "images/a 1.jpg dog;cat;\nimages/b.jpg ;\nimages/c.jpg cat;cat\n",
    "plain.csv": "images/a 1.jpg,dog;cat\nimages/b.jpg,\nimages/c.jpg,cat\n",
    "short.csv": "images/a 1.jpg,dog; cat\nimages/b.jpg\nimages/c.jpg, cat ;\n",
    "header.csv": "path,labels\nimages/a 1.jpg,cat;dog\nimages/b.jpg,\nimages/c.jpg,cat\n",
    "columns.csv": "id,tags,file\n1,dog;cat,images/a 1.jpg\n2,,images/b.jpg\n3,cat,images/c.jpg\n",
    "bom.csv": '\ufeffimage,class\r\n"images/a 1.jpg",dog;cat\r\nimages/b.jpg\r\nimages/c.jpg,cat',
    "binary.csv": "image,cat,dog\nimages/a 1.jpg,1,1\nimages/b.jpg,0,0\nimages/c.jpg,1,0\n",
    "last.csv": "cat,dog,PATH\n1,1,images/a 1.jpg\n0, 0 ,images/b.jpg\n1,0,images/c.jpg\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_list_has_the_rows_of_its_labels(folder: Path, name: str) -> None:
    (folder / name).write_text(LISTS[name])
    index = index_list(folder / name, folder, None, multilabel=True)
    assert index.classes == ("cat", "dog") and index.targets.tolist() == ROWS
    assert [index.name(i)[7:] for i in range(3)] == ["a 1.jpg", "b.jpg", "c.jpg"]


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("name", ["label", "Class", "target", "tags"])
def test_class_named_as_a_column_of_labels_is_an_error(
    folder: Path, name: str, multilabel: bool
) -> None:
    rows = "0,images/a 1.jpg,1,0,1.0\n1,images/b.jpg,0,1,0.0\n"  # numbers of pandas
    (folder / "t.csv").write_text(f",image,cat,{name},dog\n{rows}")
    with pytest.raises(DataError, match=name):
        index_list(folder / "t.csv", folder, None, multilabel)
    (folder / "t.csv").write_text(f",image,cat,{name},dog\n{rows}2,images/c.jpg,7,1,0\n")
    if multilabel:
        with pytest.raises(DataError, match=name):
            index_list(folder / "t.csv", folder, None, multilabel)
        rows = "images/a 1.jpg,True,False\nimages/b.jpg,False,True\n"
        (folder / "t.csv").write_text(f"image,{name},dog\n{rows}")
        with pytest.raises(DataError, match=name):
            index_list(folder / "t.csv", folder, None, multilabel)
    else:
        assert index_list(folder / "t.csv", folder, None, multilabel).classes == ("0", "1")


@pytest.mark.parametrize("name", ["binary.csv", "last.csv"])
def test_columns_of_zeros_and_ones_are_not_read_as_single_labels(folder: Path, name: str) -> None:
    (folder / name).write_text(LISTS[name])
    with pytest.raises(DataError, match=f"{name}:1") as error:
        index_list(folder / name, folder)
    assert "data.labels=multi" in str(error.value)


def test_line_of_a_path_with_spaces_has_no_label(folder: Path) -> None:
    (folder / "t.txt").write_text("images/a 1.jpg\nimages/b.jpg cat\n")
    index = index_list(folder / "t.txt", folder, None, multilabel=True)
    assert index.name(0) == "images/a 1.jpg" and index.targets.tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("labels", "listed", "classes", "rows"),
    [
        ("0;2 1 -", None, "0 1 2", [[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
        ("0;2 2 -", "cat dog eel", "cat dog eel", [[1, 0, 1], [0, 0, 1], [0, 0, 0]]),
        ("eel;cat eel -", "cat dog eel", "cat dog eel", [[1, 0, 1], [0, 0, 1], [0, 0, 0]]),
    ],
)
def test_labels_are_names_or_numbers_of_classes(
    folder: Path, labels: str, listed: str | None, classes: str, rows: list[list[int]]
) -> None:
    cells = zip(("a 1", "b", "c"), labels.replace("-", "").split(" "), strict=True)
    (folder / "t.csv").write_text("".join(f"images/{name}.jpg,{own}\n" for name, own in cells))
    if listed:
        given = index_list(folder / "t.csv", folder, listed.split(), multilabel=True)
        assert given.targets.tolist() == rows
        (folder / "classes.txt").write_text(listed.replace(" ", "\n"))
    index = index_list(folder / "t.csv", folder, None, multilabel=True)
    assert index.classes == tuple(classes.split()) and index.targets.tolist() == rows


def test_columns_of_a_validation_list_are_matched_by_name(folder: Path) -> None:
    (folder / "train.csv").write_text("path,eel,cat,dog\nimages/b.jpg,1,0,1\n")
    (folder / "val.csv").write_text("dog,path,eel\n1,images/c.jpg,0\n0,images/b.jpg,1\n")
    config = DataConfig("list", str(folder), "train.csv", "val.csv", labels="multi")
    data = open_datasets(config)
    assert data.classes == data.val.classes == ("eel", "cat", "dog")
    assert data.train.known_targets().tolist() == [[1, 0, 1]]
    assert data.val.known_targets().tolist() == [[0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("t.csv", "path,cat,dog\nimages/b.jpg,0,1\nimages/c.jpg,0,2\n", "t.csv:3: .*'dog'"),
        ("t.csv", "path,cat,dog\nimages/b.jpg,0,1\nimages/c.jpg,0\n", "t.csv:3: .*'dog'"),
        ("t.csv", "path,cat,dog\nimages/b.jpg,yes,0\n", "t.csv:2: .*'cat'"),
        ("t.csv", "path,cat,cat\nimages/b.jpg,1,0\n", "t.csv:1: .*'cat'"),
        ("t.csv", "path,cat,a;b\nimages/b.jpg,1,0\n", "t.csv:1: .*'a;b'"),
        ("t.csv", "path,cat,,dog\nimages/b.jpg,1,0,0\n", "t.csv:1: "),
        ("t.csv", "path,labels\nimages/b.jpg,cat,dog\n", "t.csv:2: "),
        ("t.csv", "images/b.jpg,1,0,1\n", "t.csv:1: "),
        ("t.txt", "images/b.jpg x; y\n", "t.txt:1: "),
        ("t.csv", "path,cat,dog\nimages/b.jpg,1,0\n,1,0\n", "t.csv:3: "),
        ("t.csv", "images/b.jpg,x\nimages/c.jpg,x;fox\n", "t.csv:2: label 'fox'"),
        ("t.txt", "images/b.jpg x;y\nimages/c.jpg fox;x\n", "t.txt:2: label 'fox'"),
        ("t.txt", "images/b.jpg 0\nimages/c.jpg 1;2\n", "t.txt:2: label '2'"),
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


@pytest.mark.parametrize(
    ("text", "listed", "classes", "row"),
    [
        (",path,cat,a_b\n0,images/b.jpg,0.0,1.0\n", "", "cat a_b", [0, 1]),  # as pandas writes it
        ("path,dog,cat\nimages/b.jpg,1,0\n", "cat dog eel", "cat dog eel", [0, 1, 0]),
        ("path,1,2\nimages/b.jpg,1,0\n", "", "1 2", [1, 0]),
    ],
)
def test_names_of_columns(
    folder: Path, text: str, listed: str, classes: str, row: list[int]
) -> None:
    (folder / "t.csv").write_text(text)
    if listed:
        (folder / "classes.txt").write_text(listed.replace(" ", "\n"))
    index = index_list(folder / "t.csv", folder, None, multilabel=True)
    assert index.classes == tuple(classes.split()) and index.targets.tolist() == [row]


def test_list_without_any_label_is_an_error(folder: Path) -> None:
    (folder / "t.txt").write_text("images/b.jpg\n")
    with pytest.raises(DataError, match="no image has a label"):
        index_list(folder / "t.txt", folder, None, multilabel=True)


# ---- shards


def shard(path: Path, labels: list[str | None], suffix: str = ".jpg") -> None:
    """A sample for each label: an image and its .cls, except for None."""
    files = []
    for i, label in enumerate(labels):
        files.append((f"x/{i}{suffix}", IMAGE))
        if label is not None:
            files.append((f"x/{i}.cls", label.encode()))
    write_tar(path, files)


@pytest.mark.parametrize("labels", ["names", "numbers"])
def test_shards_have_the_rows_of_their_labels(
    tmp_path: Path, labels: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with images without labels only in a shard, and from the cache of listed archives."""
    cells = {"names": ["dog; cat", "", "cat\n"], "numbers": ["1;0\n", "", "0"]}[labels]
    shard(tmp_path / "train" / "a.tar", cells)
    shard(tmp_path / "train" / "b.tar", ["", " \n"])
    if labels == "numbers":
        (tmp_path / "train" / "classes.txt").write_text("cat\ndog\n")
    for _ in range(2):
        data = datasets_in(tmp_path, val="train", labels="multi")
        assert data.classes == ("cat", "dog")
        assert data.train.index.targets.tolist() == [*ROWS, [0, 0], [0, 0]]
        assert data.train.index.targets.dtype == np.uint8
        monkeypatch.setattr(archives, "_scan_archives", None)
    assert list(cache.iterdir())
    with pytest.raises(DataError, match="label ''"):
        datasets_in(tmp_path, val="train")


def test_labels_of_validation_shards_are_those_of_training(tmp_path: Path) -> None:
    shard(tmp_path / "train" / "a.tar", ["eel;cat", "dog"])
    shard(tmp_path / "val" / "a.tar", ["", "eel"])
    data = datasets_in(tmp_path, labels="multi")
    assert data.val.classes == ("cat", "dog", "eel")
    assert data.val.known_targets().tolist() == [[0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(["cat", None], "x/1 has no label"), (["0;1", "0;9"], "'9'"), (["", ""], "no image")],
)
def test_bad_labels_of_shards_are_errors(
    tmp_path: Path, labels: list[str | None], expected: str
) -> None:
    shard(tmp_path / "train" / "a.tar", labels)
    if "0;1" in labels:
        (tmp_path / "train" / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=expected):
        datasets_in(tmp_path, val="train", labels="multi")


def test_class_folders_with_multilabel_are_an_error(tmp_path: Path) -> None:
    write_files(tmp_path / "train", {"cat/0.jpg": "x", "dog/0.jpg": "x"})
    write_zip(tmp_path / "train.zip", [("cat/0.jpg", IMAGE), ("dog/0.jpg", IMAGE)])
    for part in ("train", "train.zip"):
        with pytest.raises(DataError, match=r"data\.name=list"):
            datasets_in(tmp_path, train=part, val=part, labels="multi")


# ---- datasets of one's own


def row_of(target: Any, **attributes: Any) -> Any:
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    return Own((image, target), 2, classes=["cat", "dog"], **attributes)


def own(root: str, part: str) -> Any:
    return GIVEN[part]


GIVEN: dict[str, Any] = {}


def open_own(dataset: Any, **changes: Any) -> ImageSource:
    GIVEN["train"] = dataset
    config = DataConfig(f"{__name__}:own", val="train", labels="multi", **changes)
    source = open_datasets(config, ("train",)).train
    assert source is not None
    return source


@pytest.mark.parametrize(
    "target", [[1, 0], (True, False), np.array([1, 0]), torch.tensor([1.0, 0.0])]
)
def test_row_of_a_dataset_is_float32(target: Any) -> None:
    row = open_own(row_of(target)).load(0)[1]
    assert row.dtype == torch.float32 and row.tolist() == [1, 0]


@pytest.mark.parametrize(
    "target",
    [1, [1], [0, 1, 0], [[0, 1]], [0, 2], [-1, 0], [0.0, math.nan], "ab", None, [0, None]],
)
def test_bad_row_of_a_dataset_is_an_error_with_its_number(target: Any) -> None:
    with pytest.raises(DataError, match=r"train\[1\]: its target"):
        open_own(row_of(target)).load(1)


@pytest.mark.parametrize(
    "targets",
    [[[1, 0], [0, 0]], np.array([[1, 0], [0, 0]], bool), torch.tensor([[1.0, 0], [0, 0]])],
)
def test_listed_rows_are_known(targets: Any) -> None:
    source = open_own(row_of([1, 0], targets=targets))
    assert source.known_targets().dtype == np.uint8
    assert required_targets(source, "key").tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize(
    "targets",
    [
        torch.tensor([[0.6, 0], [0, 1]]),
        [[0, 256], [0, 1]],
        [[0, -1], [0, 1]],
        [[math.nan, 0], [0, 1]],
        [[0, 1, 0], [0, 1, 0]],  # of three classes
        [[0, 1]],  # of one image
        [[0, 1], [1]],
        [["a", "b"], ["a", "b"]],
        [1, 0],
    ],
)
def test_other_listed_targets_are_not_known(targets: Any) -> None:
    source = open_own(row_of([1, 0], targets=targets))
    assert source.known_targets() is None
    with pytest.raises(DataError, match="key"):
        required_targets(source, "key")


# ---- splits and subsets

CLASSES = ("ant", "bee", "cat", "dog")
TARGETS = np.array([[i >> bit & 1 for bit in range(4)] for i in range(90)], np.uint8)


class Numbered:
    """A map-style dataset whose targets are the lowest bits of the numbers of the images."""

    classes = CLASSES
    targets = TARGETS

    def __init__(self, root: str, part: str):
        pass

    def __len__(self) -> int:
        return len(TARGETS)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3, 4, 4), i, dtype=torch.uint8), torch.from_numpy(TARGETS[i])


@pytest.fixture
def photos(tmp_path: Path, photographs: list[Any]) -> Path:
    """The images of `Numbered` in the list `all.txt`."""
    lines = []
    for i, row in enumerate(TARGETS):
        photographs[0].resize((4, 4)).save(tmp_path / f"p_{i}.png")
        labels = ";".join(CLASSES[k] for k in np.flatnonzero(row))
        lines.append(f"p_{i}.png {labels}\n")
    (tmp_path / "all.txt").write_text("".join(lines))
    return tmp_path


def opened(root: Path, kind: str, **changes: Any) -> DataSets:
    name = "list" if kind == "list" else f"{__name__}:Numbered"
    config = DataConfig(name, str(root), "all.txt", None, labels="multi", **changes)
    return open_datasets(config)


def number_at(source: ImageSource, i: int) -> int:
    """The number of an image in `Numbered`."""
    return int(source.name(i).rstrip("].png").replace("[", "_").rpartition("_")[2])


def rows_of(source: ImageSource) -> dict[int, list[int]]:
    """The target by the number of the image; asserts that both ways to it agree."""
    targets = source.known_targets()
    loaded = [source.load(i)[1].tolist() for i in range(len(source))]
    assert loaded == targets.tolist()
    return {number_at(source, i): row for i, row in enumerate(loaded)}


SPLITS: dict[str, Callable[[int], dict[str, Any]]] = {
    "fold": lambda i: {"fold": [i, 2]},
    "stratified": lambda i: {"fold": [i, 2], "stratify": True},
    "groups": lambda i: {"fold": [i, 2], "group": r"\d(?=$|\.png$)"},
}


@pytest.mark.parametrize("kind", ["list", "map-style"])
@pytest.mark.parametrize("split", SPLITS)
def test_each_image_is_held_out_in_one_fold(photos: Path, kind: str, split: str) -> None:
    folds = [opened(photos, kind, **SPLITS[split](i)) for i in range(2)]
    held_out = [rows_of(fold.val) for fold in folds]
    assert sorted(chain(*held_out)) == list(range(90))
    for number, fold in enumerate(folds):
        train, val = rows_of(fold.train), held_out[number]
        assert not train.keys() & val.keys() and len(train) + len(val) == 90
        assert train | val == dict(enumerate(TARGETS.tolist()))
        if split == "groups":
            assert not {i % 10 for i in train} & {i % 10 for i in val}
        again = opened(photos, kind, **SPLITS[split](number))
        assert names(again.val) == names(fold.val) and again.train.digest() == fold.train.digest()


@pytest.mark.parametrize("kind", ["list", "map-style"])
def test_shares_of_all_images_are_held_out_and_trained_on(photos: Path, kind: str) -> None:
    whole = opened(photos, kind, val_fraction=0.2)
    assert (len(whole.train), len(whole.val)) == (72, 18)
    half = opened(photos, kind, val_fraction=0.2, fraction=0.5)
    assert names(half.val) == names(whole.val)
    assert len(half.train) == 36 and rows_of(half.train).items() <= rows_of(whole.train).items()
    assert names(opened(photos, kind, val_fraction=0.2).val) == names(whole.val)


@pytest.mark.parametrize("kind", ["list", "map-style"])
def test_chosen_classes_keep_all_images_with_these_labels(photos: Path, kind: str) -> None:
    data = opened(photos, kind, val_fraction=0.2, classes=["dog", "ant"])
    assert data.classes == data.train.classes == ("dog", "ant")
    found = rows_of(data.train) | rows_of(data.val)
    assert found == dict(enumerate(TARGETS[:, [3, 0]].tolist()))
    in_order = opened(photos, kind, val_fraction=0.2, classes=["cat", "dog", "bee", "ant"])
    assert (
        rows_of(in_order.train).items()
        <= dict(enumerate(TARGETS[:, [2, 3, 1, 0]].tolist())).items()
    )
    assert in_order.train.digest() != opened(photos, kind, val_fraction=0.2).train.digest()


# ---- a separate test set


@pytest.mark.parametrize("kind", ["list", "shards"])
def test_separate_test_set_keeps_the_kind_of_labels(folder: Path, kind: str) -> None:
    place = folder / "t.csv"
    place.write_text("path,labels\nimages/a 1.jpg,dog;cat\nimages/b.jpg,\nimages/c.jpg,cat\n")
    if kind == "shards":
        place = folder / "t.tar"
        shard(place, ["dog;cat", "", "cat"])
    config = locate_test_set(place, DataConfig("list", "elsewhere", labels="multi"))
    source = open_test_set(config, ["eel", "dog", "cat"], allow_missing=True)
    assert source.known_targets().tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 1]]
    assert "3 images of 2 classes" in describe_images(config, source)
