"""Files are written whole or not at all, and only regular files are read."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from imagenet_cls.checkpoint.format import read_checkpoint
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config
from imagenet_cls.data.image_set import FileImages
from imagenet_cls.data.index import ImageIndex
from imagenet_cls.data.lists import index_list, read_bad_images
from imagenet_cls.errors import ResourceError, UserError
from imagenet_cls.files import explain_write_errors, write_file
from imagenet_cls.inference.predictor import Predictor


def test_write_file_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / ".tmp-a").write_text("left by a kill")
    for content in ("first", b"second"):
        write_file(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == b"second" and [
        path.name for path in tmp_path.iterdir()
    ] == ["a"]


def test_write_file_that_fails_keeps_the_old_one(tmp_path: Path) -> None:
    write_file(tmp_path / "a", "first")
    (tmp_path / ".tmp-a").symlink_to("/dev/full")
    with (
        pytest.raises(ResourceError, match="No space left") as caught,
        explain_write_errors(tmp_path / "a", "Do this"),
    ):
        write_file(tmp_path / "a", "second")
    assert str(caught.value).endswith("\nDo this")
    assert (tmp_path / "a").read_text() == "first" and [
        path.name for path in tmp_path.iterdir()
    ] == ["a"]


READERS: list[Callable[[Path], object]] = [
    lambda path: index_list(path, path.parent),
    read_bad_images,
    lambda path: read_checkpoint(path.parent),
    lambda path: Predictor.crop(SimpleNamespace(config=Config(), transform=None), path),
    lambda path: load_config(path, []),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", READERS)
def test_file_without_an_end_is_an_error(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(UserError, match=r"regular file") as caught:
        read(tmp_path / "manifest.json")
    assert "manifest.json" in str(caught.value)


@pytest.mark.timeout(60)
def test_image_that_is_a_device_or_a_fifo_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jpg")
    names = np.array([b"/dev/null", b"fifo.jpg"])
    source = FileImages(ImageIndex(tmp_path, names, np.zeros(2, np.int64), ("a",)))
    for i, name in enumerate(("/dev/null", "fifo.jpg")):
        with pytest.raises(UserError, match=rf"{name} .*regular"):
            source.load(i)
