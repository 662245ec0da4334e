"""Indexing folders: equal to torchvision's ImageFolder, and errors for the usual mistakes."""

from pathlib import Path

import numpy as np
import pytest
from helpers import write_files
from torchvision.datasets import ImageFolder

from imagenet_cls.data.image_set import indexed_images
from imagenet_cls.data.index import index_folder
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


def test_index_folder_skips_hidden_files_and_counts_other_files(tmp_path: Path) -> None:
    """Names that are not UTF-8 are read."""
    images = ["a/1.JPE", "a/2.gif", "a/\udcff.heic"]
    hidden = ["a/._1.jpg", "a/.cache/2.jpg", ".ipynb_checkpoints/3.jpg", "a/.hidden.svg"]
    hidden += ["__MACOSX/a/4.jpg", "a/@eaDir/5.jpg", "lost+found/6.jpg"]  # that systems make
    others = ["a/1.TXT", "a/deep/2.txt", "a/README", "a/x.eps", "notes.csv", "beside.png"]
    index = index_folder(touch(tmp_path, *images, *hidden, *others))
    assert [index.name(i) for i in range(len(index))] == images
    assert index.path(2).is_file() and index.digest
    assert index.unread == {b".txt": 2, b"": 1, b".eps": 1, b".png": 1}


def test_digest_depends_on_names_targets_and_classes_only(tmp_path: Path) -> None:
    names = ["a/1.jpg", "a/2.jpg", "b/3.jpg"]
    first = index_folder(touch(tmp_path / "one", *names)).digest
    assert first == index_folder(touch(tmp_path / "two", *reversed(names))).digest
    assert first != index_folder(touch(tmp_path / "three", "a/1.jpg", "b/2.jpg", "b/3.jpg")).digest
    assert first != index_folder(touch(tmp_path / "four", "a/1.jpg", "a/2.jpg", "c/3.jpg")).digest
    swapped = indexed_images(index_folder(tmp_path / "one")).with_classes(["b", "a"], "one")
    assert swapped.classes == ("b", "a") and swapped.required_targets("").tolist() == [1, 1, 0]
    assert first != swapped.digest


def test_describe_sizes_tells_other_images_under_the_same_names(tmp_path: Path) -> None:
    names = [f"a/{number:04}.jpg" for number in range(1500)]
    source = indexed_images(index_folder(touch(tmp_path, *names)))
    before = source.size_fingerprint()
    (tmp_path / names[0]).write_bytes(b"longer than before")
    after = source.size_fingerprint()
    (tmp_path / names[-1]).unlink()
    assert len({before, after, source.size_fingerprint()}) == 3


@pytest.mark.parametrize(
    ("folders", "classes", "is_error"),
    [
        ("seg_train seg_test seg_pred_val", "cat dog", True),
        ("TrainImages ValImages", "cat dog", True),
        ("trainset testset", "x/cat y/dog", True),
        ("data-traindataset data-validate", "cat dog", True),
        ("train test docs", "cat dog", True),
        ("train test docs", ".", False),
        ("strain_1 festival", "young old", False),
        ("train_freight train_test_other", "front", False),
        ("train", ". more", False),  # a single class
    ],
)
def test_class_folders_repeated_in_parts_are_an_error(
    folders: str, classes: str, is_error: bool, tmp_path: Path
) -> None:
    parts = folders.split()
    touch(tmp_path, *(f"{part}/{name}/1.jpg" for part in parts for name in classes.split()))
    if is_error:
        with pytest.raises(DataError, match="are parts"):
            index_folder(tmp_path)
    else:
        assert index_folder(tmp_path).classes == tuple(sorted(parts))


@pytest.mark.parametrize(
    ("names", "folder", "expected"),
    [
        (["ILSVRC2012_val_00000001.JPEG", "2.JPEG"], "", "2 images"),
        (["train/n1/1.jpg", "train/n2/1.jpg"], "", "folder train"),
        (["train/a/1.jpg", "train/b/1.jpg", "test/1.jpg"], "", "are parts"),
        (["a/1.jpg", "b/note.txt", "c/2/note.txt"], "", "b, c"),
        (["a/1.dcm", "b/1.dcm"], "", r"2 \.dcm"),
        (["train_images/1.jpg", "test_images/1.jpg"], "", r"data\.name=list"),
        ([], "nowhere/train", "nowhere"),
    ],
)
def test_index_folder_missing_or_wrong_layout_raises(
    tmp_path: Path, names: list[str], folder: str, expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        index_folder(touch(tmp_path, *names) / folder)


def test_link_to_a_folder_that_holds_it_is_an_error(tmp_path: Path) -> None:
    """Each image would count once for each time that the link is followed."""
    train = touch(tmp_path / "train", "cat/1.jpg")
    (train / "dog").symlink_to(train / "cat")  # a link beside is followed
    assert len(index_folder(train)) == 2
    (train / "cat" / "all").symlink_to(train)
    with pytest.raises(DataError, match="cat/all"):
        index_folder(train)
    (train / "cat" / "all").unlink()
    (train / "eel").symlink_to(tmp_path / "not mounted")
    with pytest.raises(DataError, match="eel"):
        index_folder(train)
