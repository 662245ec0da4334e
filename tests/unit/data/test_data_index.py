"""Indexing folders: equal to torchvision's ImageFolder, and errors for the usual mistakes."""

import contextlib
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import REPOSITORY, write_files
from torchvision.datasets import ImageFolder

from imagenet_cls.data.classes import match_classes
from imagenet_cls.data.index import IMAGE_SUFFIXES, describe_unread, index_folder
from imagenet_cls.data.sources import FolderSource, MapSource, size_fingerprint, with_classes
from imagenet_cls.errors import DataError


def touch(root: Path, *names: str) -> Path:
    write_files(root, dict.fromkeys(names, "x"))
    return root


def test_index_folder_equals_image_folder(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "b/2.JPEG",
        "b/10.jpeg",
        "b/sub/1.PNG",
        "b/sub/deep/x.bmp",
        "b/a-sub/9.jpg",
        "b/notes.txt",
        "B/1.webp",
        "a10/ä ö.jpg",
        "a10/z.tiff",
        "a2/1.pgm",
        "a2/b.c/1.ppm",
        "a2/b/1.tif",
        "a2/b-d/1.jpg",
    )
    index, reference = index_folder(tmp_path), ImageFolder(str(tmp_path))
    assert list(index.classes) == reference.classes
    samples = [(str(index.path(i)), int(index.targets[i])) for i in range(len(index))]
    assert samples == reference.samples
    assert len(index) == 12 and index.targets.dtype == np.int64 and index.names.dtype.kind == "S"


def test_index_folder_skips_hidden_files_and_takes_gif(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "a/1.gif",
        "a/._1.jpg",
        "a/.cache/2.jpg",
        ".ipynb_checkpoints/3.jpg",
        "b/1.jpg",
        "b/._2.jpg",
    )
    index = index_folder(tmp_path)
    assert [index.name(i) for i in range(len(index))] == ["a/1.gif", "b/1.jpg"]


def test_files_that_are_no_images_are_counted_by_suffix(tmp_path: Path) -> None:
    for suffix in ("jfif", "JPE", "avif", "jp2", "J2K", "heic", "HEIF"):
        touch(tmp_path, f"a/1.{suffix}")
    touch(
        tmp_path,
        "a/1.TXT",
        "b/deep/2.txt",
        "b/README",
        "b/.hidden.svg",
        "b/x.eps",
        "b/1.jpg",
        "notes.csv",
        "beside.png",
    )
    index = index_folder(tmp_path)
    assert len(index) == 8
    assert index.unread == {b".txt": 2, b"": 1, b".eps": 1, b".png": 1}
    assert describe_unread(index.unread) == "2 .txt, 1 without a suffix, 1 .eps, 1 .png"
    many = {b".%d" % i: 10 - i for i in range(7)}
    assert describe_unread(many).endswith("6 .4, 9 others")


def test_suffixes_are_listed_on_the_page() -> None:
    page = (REPOSITORY / "docs" / "data.md").read_text()
    section = page.partition("## Image files\n")[2].partition("\n## ")[0].partition("\n\n")[0]
    assert {suffix.encode() for suffix in re.findall(r"`(\.\w+)`", section)} == IMAGE_SUFFIXES


def test_digest_depends_on_names_targets_and_classes_only(tmp_path: Path) -> None:
    names = ["a/1.jpg", "a/2.jpg", "b/3.jpg"]
    first = index_folder(touch(tmp_path / "one", *names)).digest
    assert first == index_folder(touch(tmp_path / "two", *reversed(names))).digest
    assert first != index_folder(touch(tmp_path / "three", "a/1.jpg", "b/2.jpg", "b/3.jpg")).digest
    assert first != index_folder(touch(tmp_path / "four", "a/1.jpg", "a/2.jpg", "c/3.jpg")).digest
    renamed = with_classes(FolderSource(index_folder(tmp_path / "one")), ["b", "a"], "one")
    assert first != renamed.digest()


def test_describe_sizes_tells_other_images_under_the_same_names(tmp_path: Path) -> None:
    names = [f"a/{number:04}.jpg" for number in range(1500)]
    source = FolderSource(index_folder(touch(tmp_path, *names)))
    before = size_fingerprint(source)
    (tmp_path / names[0]).write_bytes(b"longer than before")
    after = size_fingerprint(source)
    (tmp_path / names[-1]).unlink()
    assert len({before, after, size_fingerprint(source)}) == 3
    assert size_fingerprint(MapSource(range(3), "numbers", "abc")) is None


def test_with_classes_matches_folders_by_name(tmp_path: Path) -> None:
    index = index_folder(touch(tmp_path, "a/1.jpg", "b/1.jpg", "c/1.jpg", "c/2.jpg"))
    source = with_classes(FolderSource(index), ["c", "a", "b"], tmp_path)
    assert isinstance(source, FolderSource) and source.classes == ("c", "a", "b")
    assert source.index.targets.tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize(
    ("folders", "classes", "is_error"),
    [
        ("training_set test_set", "cat dog", True),
        ("seg_train seg_test seg_pred_val", "cat dog", True),
        ("TrainImages ValImages", "cat dog", True),
        ("train2017 val2017", "cat dog", True),
        ("Training Testing", "cat dog", True),
        ("dev eval", "cat dog", True),
        ("trainset testset", "x/cat y/dog", True),
        ("trainval test", "cat dog", True),
        ("traindataset validate", "cat dog", True),
        ("data-train data-validation", "cat dog", True),
        ("strain_1 festival", "young old", False),
        ("cats dogs", "young old", False),
        ("bus train test", "front side", False),
        ("train_freight train_test_other", "front", False),
        ("valley device", "summer winter", False),
        ("training_shoes testudo", "1 2", False),
    ],
)
def test_class_folders_repeated_in_parts_are_an_error(
    folders: str, classes: str, is_error: bool, tmp_path: Path
) -> None:
    for folder in folders.split():
        for name in classes.split():
            (tmp_path / folder / name).mkdir(parents=True)
            (tmp_path / folder / name / "1.jpg").touch()
    if not is_error:
        assert index_folder(tmp_path).classes == tuple(sorted(folders.split()))
        return
    with pytest.raises(DataError, match=r"data\.train="):
        index_folder(tmp_path)
    for name in folders.split():  # other class folders in each
        for number, path in enumerate(list((tmp_path / name).rglob("1.jpg"))):
            path.parent.rename(path.parent.with_name(f"{name}_{number}"))
    assert len(index_folder(tmp_path).classes) == len(folders.split())


@pytest.mark.parametrize("parts", [("train_images", "test_images"), ("train", "test")])
def test_part_without_class_folders_is_an_error(parts: tuple[str, str], tmp_path: Path) -> None:
    first, second = parts
    files = (f"{first}/cat/1.jpg", f"{first}/dog/1.jpg", f"{second}/1.jpg")
    with pytest.raises(DataError, match=rf"data\.train={first} "):
        index_folder(touch(tmp_path, *files))


@pytest.mark.parametrize(("classes", "named"), [("ab", "c, d, e, ..."), ("abcdefxy", "x, y")])
def test_match_classes_with_other_classes_raises(classes: str, named: str) -> None:
    with pytest.raises(DataError, match=named):
        match_classes("abcdef", list(classes), "val")


@pytest.mark.parametrize(
    ("names", "folder", "expected"),
    [
        (
            ["ILSVRC2012_val_00000001.JPEG", "2.JPEG"],
            "",
            "holds 2 images .*\n.*tools/prepare_imagenet.py",
        ),
        (
            ["train/n1/1.jpg", "train/n2/1.jpg"],
            "",
            "a level deeper\\.\n.*data.train=train data.val=null",
        ),
        (
            ["images/n1/1.jpg", "images/n2/1.jpg"],
            "",
            "a level deeper\\.\n.*data.train=images data.val=null",
        ),
        (
            ["test/n1/1.jpg", "train/n1/1.jpg", "Val/n1/1.jpg"],
            "",
            "deeper\\.\n.*train data.val=Val data.val_fraction=null",
        ),
        (["a/1.jpg", "b/note.txt", "c/2/note.txt"], "", "2 of 3 class folders hold no image: b, c"),
        (["readme.txt"], "", "holds 0 images"),
        (["train/n1/1.jpg"], "val", "set data.root.*\n?.*data.val_fraction=0.1"),
        (["n1/1.jpg"], "train", "data.val=null data.val_fraction=0.1.*data.train=\\."),
        ([], "nowhere/train", "Set data.root"),
        (["train/1.jpg"], "train", "holds 1 images"),
    ],
)
def test_index_folder_missing_or_wrong_layout_raises(
    tmp_path: Path, names: list[str], folder: str, expected: str
) -> None:
    with pytest.raises(DataError, match=expected) as error:
        index_folder(touch(tmp_path, *names) / folder)
    assert error.value.exit_code == 3 and len(str(error.value).splitlines()) <= 3


def test_index_folder_single_class_with_subfolders_and_images(tmp_path: Path) -> None:
    assert len(index_folder(touch(tmp_path, "train/1.jpg", "train/more/2.jpg"))) == 2


def test_class_in_another_unicode_normalization_is_shown_by_code_points() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    with pytest.raises(DataError) as caught:
        match_classes([decomposed], [composed], "val")
    assert "'caf\\xe9'" in str(caught.value) and "'cafe\\u0301'" in str(caught.value)


def test_index_folder_takes_names_that_are_not_utf8(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg")
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/a/\xff.jpg"))).write_bytes(b"x")
    index = index_folder(tmp_path)
    assert index.path(1).is_file() and index.digest


def test_index_does_not_depend_on_the_order_of_the_file_system(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = index_folder(image_folder / "train")

    @contextlib.contextmanager
    def shuffled(path: Any) -> Iterator[Iterator[os.DirEntry]]:
        with scandir(path) as entries:
            found = list(entries)
            yield iter(random.sample(found, len(found)))

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", shuffled)
    for _ in range(3):
        index = index_folder(image_folder / "train")
        assert (index.digest, index.classes) == (expected.digest, expected.classes)


def test_link_to_a_folder_that_holds_it_is_an_error(tmp_path: Path) -> None:
    """Each image would count once for each time that the link is followed."""
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.jpg").touch()
    (tmp_path / "train" / "dog").symlink_to(tmp_path / "train" / "cat")  # a link beside is followed
    assert len(index_folder(tmp_path / "train")) == 2
    (tmp_path / "train" / "cat" / "all").symlink_to(tmp_path / "train")
    with pytest.raises(DataError, match="a link to a folder that holds it"):
        index_folder(tmp_path / "train")
