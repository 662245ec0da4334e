"""Indexing folders: equal to torchvision's ImageFolder, and every usual mistake recognised."""

import os
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from imagenet_cls.data.index import index_folder, split
from imagenet_cls.data.layout import refuse_missing_part
from imagenet_cls.errors import DataError


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


def message(error: pytest.ExceptionInfo[DataError]) -> str:
    text = str(error.value)
    assert len(text.splitlines()) <= 3
    return text


def test_equals_image_folder(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *("b/2.JPEG", "b/10.jpeg", "b/sub/1.PNG", "b/sub/deep/x.bmp", "b/a-sub/9.jpg", "b/notes.txt"),
        *("B/1.webp", "a10/ä ö.jpg", "a10/z.tiff", "a2/1.pgm", "a2/b.c/1.ppm", "a2/b/1.tif", "a2/b-d/1.jpg"),
    )
    index, reference = index_folder(tmp_path), ImageFolder(str(tmp_path))
    assert list(index.classes) == reference.classes
    assert [(str(index.path(i)), int(index.targets[i])) for i in range(len(index))] == reference.samples
    assert len(index) == 12 and index.targets.dtype == np.int64 and isinstance(index.blob, bytes)


def test_hidden_files_are_left_out_and_gif_is_taken(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.gif", "a/._1.jpg", "a/.cache/2.jpg", ".ipynb_checkpoints/3.jpg", "b/1.jpg")
    index = index_folder(tmp_path)
    assert [index.name(i) for i in range(len(index))] == ["a/1.gif", "b/1.jpg"]


def test_digest_knows_names_targets_and_classes_but_not_the_place_or_order(tmp_path: Path) -> None:
    names = ["a/1.jpg", "a/2.jpg", "b/3.jpg"]
    first = index_folder(touch(tmp_path / "one", *names)).digest()
    assert first == index_folder(touch(tmp_path / "two", *reversed(names))).digest()
    assert first != index_folder(touch(tmp_path / "three", "a/1.jpg", "b/2.jpg", "b/3.jpg")).digest()
    assert first != index_folder(touch(tmp_path / "four", "a/1.jpg", "a/2.jpg", "c/3.jpg")).digest()
    assert first != index_folder(tmp_path / "one", classes=["b", "a"]).digest()


def test_validation_folders_are_mapped_by_name(tmp_path: Path) -> None:
    index = index_folder(touch(tmp_path, "a/1.jpg", "b/1.jpg", "c/1.jpg", "c/2.jpg"), classes=["c", "a", "b"])
    assert index.targets.tolist() == [1, 2, 0, 0] and index.classes == ("c", "a", "b")


def test_class_names_of_the_parts_that_differ(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{name}/1.jpg" for name in "abcdef"))
    with pytest.raises(DataError) as error:
        index_folder(tmp_path, classes=["a", "b"])
    assert "4 of 6" in message(error) and "c, d, e, ..." in message(error)
    with pytest.raises(DataError) as error:
        index_folder(tmp_path, classes=[*"abcdef", "x", "y"])
    assert "2 of 8" in message(error) and "x, y" in message(error)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1.JPEG", "2.JPEG"], ["2 images", "tools/prepare_imagenet.py"]),
        (["train/n1/1.jpg", "train/n2/1.jpg"], ["one folder only", "train"]),
        (["train/n1/1.jpg", "val/n1/1.jpg"], ["parts of a data set", "data.train=train"]),
        (["a/1.jpg", "b/note.txt", "c/2/note.txt"], ["2 of 3 class folders hold no image", "b, c"]),
        (["readme.txt"], ["neither class folders nor images"]),
    ],
)
def test_wrong_layouts(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    with pytest.raises(DataError) as error:
        index_folder(touch(tmp_path, *names))
    assert all(words in message(error) for words in expected) and error.value.exit_code == 3


def test_one_class_with_subfolders_and_images_is_no_mistake(tmp_path: Path) -> None:
    assert len(index_folder(touch(tmp_path, "train/1.jpg", "train/more/2.jpg"))) == 2


@pytest.mark.parametrize(
    ("names", "root", "part", "key", "expected"),
    [
        ([], "nowhere", "train", "data.train", ["nowhere", "set data.root"]),
        (["train/a/1.jpg"], ".", "val", "data.val", ["data.val=null data.val_fraction=0.1"]),
        (["train/a/1.jpg"], "train", "train", "data.train", ["data.root itself ends in 'train'", "set data.root="]),
        (["ILSVRC/Data/CLS-LOC/train/a/1.jpg"], ".", "train", "data.train", ["ILSVRC/Data/CLS-LOC\n"[:-1]]),
        (["cat/1.jpg", "dog/1.jpg"], ".", "train", "data.train", ["cat, dog", "data.train=. data.val=null"]),
        (["1.jpg"], ".", "train", "data.train", ["1 images lie directly"]),
    ],
)
def test_missing_parts(tmp_path: Path, names: list[str], root: str, part: str, key: str, expected: list[str]) -> None:
    touch(tmp_path, *names)
    with pytest.raises(DataError) as error:
        refuse_missing_part(tmp_path / root, part, key)
    assert all(words in message(error) for words in expected)


def test_split_is_stratified_and_a_function_of_names(tmp_path: Path) -> None:
    names = [f"{c}/{i}.jpg" for c, n in (("a", 10), ("b", 25), ("c", 2), ("d", 1)) for i in range(n)]
    index = index_folder(touch(tmp_path / "one", *names))
    train, val = split(index, 0.2)
    assert np.bincount(val.targets, minlength=4).tolist() == [2, 5, 1, 0]
    of_train, of_val = ({part.name(i) for i in range(len(part))} for part in (train, val))
    assert of_train | of_val == set(names) and not of_train & of_val
    assert [val.path(i).is_file() for i in range(len(val))] == [True] * len(val)
    # images added to one class change nothing in the others, and nothing depends on the folder's place
    more = touch(tmp_path / "two", *names, *(f"a/more{i}.jpg" for i in range(20)))
    _, val_of_more = split(index_folder(more), 0.2)
    assert {n for n in of_val if n[0] != "a"} == {
        n for n in map(val_of_more.name, range(len(val_of_more))) if n[0] != "a"
    }


def test_names_that_are_not_utf8_survive(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg")
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/a/\xff.jpg"))).write_bytes(b"x")
    index = index_folder(tmp_path)
    assert index.path(1).is_file() and index.digest()
