"""One table of containers: what is read from each are the files in folders. Bad archives are errors
that name the archive or the image.
"""

import contextlib
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archive_writers import Files, write_tar, write_zip
from helpers import datasets_in

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archive_files import (
    ArchiveChangedError,
    Member,
    archive_members,
    open_archive,
)
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.index import has_image_suffix
from imagenet_cls.errors import DataError

IMAGE = b"\xff\xd8 some image"
LONG = "a very long name " * 9
NAMES = (
    "a/0.jpe",
    f"a/{LONG}/{LONG}.png",
    "b/ü.gif",
    f"b/{LONG}.JPEG",
    "b/sub.jpg",
    "b/sub/z.jpg",
    "b/sub-2/z.jpg",
    "c/1.JPG",
    # no images, and hidden ones
    "a/notes.txt",
    "b/sub/list.TXT",
    "b/z.csv",
    "b/archive.tar",
    "a/.hidden.txt",
    "a/._hidden.jpg",
    ".hidden/b.jpg",
)


@pytest.fixture
def folders(tmp_path: Path, image_folder: Path) -> Path:
    """The files of NAMES in `train` and `val`."""
    jpeg = (image_folder / "train" / "cat" / "000.JPEG").read_bytes()
    for part in ("train", "val"):
        for name in NAMES:
            path = tmp_path / "folders" / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg + os.fsencode(part + name))
    return tmp_path / "folders"


def files_of(folder: Path) -> list[tuple[str, bytes]]:
    """Names below `folder` and contents, in the reverse of the order in which they are read from
    folders.
    """
    paths = sorted(folder.rglob("*"), key=lambda path: (path.parent, path.name), reverse=True)
    return [
        (path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths if path.is_file()
    ]


def below(prefix: str, files: Files) -> Files:
    return [(prefix + name, content) for name, content in files]


# ---- the table

# Writes a container of folders to `root`: (root, folders).
Make = Callable[[Path, Path], DataConfig]


def one_file(suffix: str, write: Callable[..., object], prefix: str = "", *options: int) -> Make:
    def make(root: Path, folders: Path) -> DataConfig:
        for part in ("train", "val"):
            write(root / f"{part}{suffix}", below(prefix, files_of(folders / part)), *options)
        return DataConfig(root=str(root), train=f"train{suffix}", val=f"val{suffix}")

    return make


def zip_as_root(root: Path, folders: Path) -> DataConfig:
    path = write_zip(root / "all.zip", below("top/", files_of(folders)))
    return DataConfig(root=str(path), train="./train/", val="train/../val")


def shards(
    texts: Sequence[str],
    place: str = "{part}",
    classes: str = "",
    **settings: Any,
) -> Make:
    """A shard for each of the class folders c, b and a. texts: the labels of a, b and c. place:
    `data.train` and `data.val`. classes: the content of a classes.txt.
    """

    def make(root: Path, folders: Path) -> DataConfig:
        for part in ("train", "val"):
            for number, folder in enumerate("cba"):
                text = texts["abc".index(folder)]
                members = []
                for name, content in files_of(folders / part / folder):
                    members.append((name, content))
                    if has_image_suffix(name):
                        members.append((name.rpartition(".")[0] + ".cls", text.encode()))
                # as WebDataset's writer: a pax header for each
                path = root / part / f"s-{number:04d}.tar"
                write_tar(path, below(f".//{folder}/", members), mtime=1.5)
            if classes:
                (root / part / "classes.txt").write_text(classes)
        train, val = (place.format(root=root, part=part) for part in ("train", "val"))
        return DataConfig(root=str(root), train=train, val=val, **settings)

    return make


CONTAINERS: dict[str, Make] = {
    "tar, pax": one_file(".tar", write_tar),
    "tar, GNU": one_file(".tar", write_tar, ".//top//", tarfile.GNU_FORMAT),
    "zip, stored": one_file(".zip", write_zip),
    "zip, deflated": one_file(".zip", write_zip, "", zipfile.ZIP_DEFLATED),
    "zip as root": zip_as_root,
    # names of parts are no mistake in labels
    "shards, .cls": shards(["test", "train\n", "val"]),
    "shards, numbers": shards(["0", "1\n", "2"], place="{part}/s-{{0000..0002}}.tar"),
    # numbers are lines, also where they are names; a file that is matched twice counts once
    "shards, classes.txt": shards(
        ["0", "1", "2"], place="{root}/{part}/s-*{{0..2}}*.tar", classes="2\n0\n1"
    ),
    "shards, several labels": shards(["a;", "b ", "c"], labels="multi"),
}
# The classes of shards; those of others are the class folders.
CLASSES = {
    "shards, .cls": ("test", "train", "val"),
    "shards, numbers": ("0", "1", "2"),
    "shards, classes.txt": ("2", "0", "1"),
    "shards, several labels": ("a", "b", "c"),
}


def contents(source: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    targets = source.targets
    return [
        (
            source.name(i),
            tuple(np.flatnonzero(targets[i]) if targets.ndim == 2 else [int(targets[i])]),
            source.files.read(source.numbers[i]),
        )
        for i in range(len(source))
    ]


def assert_holds(data: DataConfig, name: str, folders: Path) -> None:
    """The images of the folders: of class folders also the digest, and shards keep their order."""
    opened, expected = open_datasets(data), datasets_in(folders)
    for part in ("train", "val"):
        ours: Any = opened.parts[part]
        theirs = expected.parts[part]
        rows = contents(theirs)
        if name in CLASSES:
            rows.reverse()
        else:
            assert ours.digest == theirs.digest
            assert ours.size_fingerprint() == theirs.size_fingerprint()
        assert contents(ours) == rows
        assert ours.files.index.unread == theirs.files.index.unread
        assert ours.classes == CLASSES.get(name, theirs.classes)
    assert open_datasets(data, ("val",)).val.digest == opened.val.digest


# ---- what is read


@pytest.mark.parametrize("name", CONTAINERS)
def test_container_holds_the_images_of_the_folders(
    name: str, folders: Path, tmp_path: Path
) -> None:
    data = CONTAINERS[name](tmp_path / "container", folders)
    assert_holds(data, name, folders)
    if name not in CLASSES:
        split = {"val": None, "val_fraction": 0.5}
        held_out = open_datasets(replace(data, **split)).val
        assert held_out.digest == datasets_in(folders, **split).val.digest


def test_listed_image_in_a_container_is_left_out(folders: Path, tmp_path: Path) -> None:
    name = "shards, .cls"
    data = CONTAINERS[name](tmp_path / "container", folders)
    listed = tmp_path / "bad_images.txt"
    listed.write_text(f"{data.train}/b/sub.jpg\tan empty file\n")
    (folders / "train" / "b" / "sub.jpg").unlink()
    data = replace(data, exclude=str(listed))
    assert_holds(data, name, folders)


# ---- bad input


def patch_central(path: Path, offset: int, value: int) -> None:
    """Set 16 bits of the first entry of a zip's directory."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, data.index(b"PK\1\2") + offset, value)
    path.write_bytes(data)


Write = Callable[[Path], object]  # to a folder


def tar(*files: tuple[str, bytes], name: str = "a.tar", **options: Any) -> Write:
    return lambda folder: write_tar(folder / name, files, **options)


def patched_zip(offset: int, value: int, **options: Any) -> Write:
    files = [("a/1.jpg", b"jpeg"), ("a/2.jpg", b"jpeg")]
    return lambda folder: patch_central(
        write_zip(folder / "a.zip", files, **options), offset, value
    )


def both(*writes: Write) -> Write:
    return lambda folder: [write(folder) for write in writes]


SAMPLE = [("a.jpg", IMAGE), ("a.cls", b"0")]
# By case: the archives, and what the error names.
BAD: dict[str, tuple[Write, str]] = {
    "no image": (tar(("a/notes.txt", b"")), "train"),
    "neither folders nor labels": (tar(("1.jpg", IMAGE)), "train"),
    "same path in another form": (tar(("a/1.jpg", b""), ("a//1.jpg", b"")), "a/1.jpg"),
    "beside class folders": (both(tar(*SAMPLE), lambda f: (f / "b").mkdir()), "a.tar"),
    "link": (tar(("./a/1.jpg", b""), links=["./a/1.jpg"]), "a/1.jpg"),
    "two images of a sample": (tar(*SAMPLE, ("a.png", b"")), "a.tar"),
    "key with a dot": (tar(*SAMPLE, ("b.v2.jpg", b""), ("b.v2.cls", b"0")), "b.v2.jpg"),
    "some without labels": (both(tar(*SAMPLE), tar(("b/1.jpg", b""), name="b.tar")), "train"),
    "label out of range": (
        both(
            tar(("a.jpg", b""), ("a.cls", b"7")),
            lambda f: (f / "classes.txt").write_text("x\ny"),
        ),
        "a.jpg",
    ),
    "zip, encrypted": (patched_zip(8, 1), "a/1.jpg"),
    "zip, bzip2": (patched_zip(10, zipfile.ZIP_BZIP2), "a/1.jpg"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_archive_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    write, named = BAD[name]
    (tmp_path / "train").mkdir()
    write(tmp_path / "train")
    with pytest.raises(DataError) as error:
        datasets_in(tmp_path, val="train")
    message = str(error.value)
    assert str(tmp_path / "train") in message and named in message


@pytest.mark.parametrize(
    "part",
    [
        "missing-{0000..0002}.tar",
        "s-{1..0}/a.tar",
        "s-{0..1}/*.tar",  # one of two is missing
        "{0..1000000}.tar",
    ],
)
def test_missing_archive_of_a_pattern_is_an_error(part: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "s-0" / "a.tar", SAMPLE)
    with pytest.raises(DataError):
        datasets_in(tmp_path, train=part)


def change_status(archive: Path) -> None:
    """But neither size nor mtime."""
    before = archive.stat()
    os.utime(archive, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [change_status, Path.unlink])
def test_archive_that_changes_after_the_listing_is_an_error_about_it(
    change: Callable[[Path], object], folders: Path, tmp_path: Path
) -> None:
    opened = open_datasets(CONTAINERS["zip, stored"](tmp_path, folders))
    change(tmp_path / "train.zip")
    with pytest.raises(ArchiveChangedError, match=r"train\.zip"):
        opened.train.load(0)


def test_damaged_data_in_a_zip_is_an_error_that_names_the_image(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", [("a/1.jpg", IMAGE * 99)], zipfile.ZIP_DEFLATED)
    whole = path.read_bytes()
    path.write_bytes(whole[:37] + b"\xff" + whole[38:])  # the first byte of the compressed data
    source = datasets_in(tmp_path, train="a.zip", val="a.zip").train
    with pytest.raises(DataError, match=r"a/1\.jpg"):
        source.load(0)


def members(path: Path) -> list[Member]:
    with open_archive(str(path)) as file:
        return list(archive_members(file))


def flipped(whole: bytes, bit: int) -> bytes:
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_that_is_damaged_or_cut_anywhere_is_an_error(form: int, tmp_path: Path) -> None:
    """One bit is flipped in every four bytes of each header and of the zeros at the end."""
    long_name = f"a/{'long ' * (18 if form == tarfile.USTAR_FORMAT else 30)}.jpg"
    files = [("a/1.jpg", IMAGE), (long_name, IMAGE * 100), ("b/ü \udcff.jpg", IMAGE)]
    path = write_tar(tmp_path / "a.tar", files, form)
    whole, listed = path.read_bytes(), members(path)
    assert [os.fsdecode(member.name) for member in listed] == [name for name, _ in files]
    headers = [member.offset - 512 for member in listed]
    end = listed[-1].offset + 512
    accepted = 0
    for start in (*headers, end, end + 512):
        for place in range(0, 512, 4):
            path.write_bytes(flipped(whole, 8 * (start + place) + place % 7))
            try:
                assert members(path) == listed, (start, place)
                accepted += 1
            except DataError:
                pass
    assert accepted <= 2 * len(headers)  # of a checksum, a leading zero and the last byte
    end += 1024
    for length in [*range(0, end, 128), end - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"a\.tar"):
            members(path)
    path.write_bytes(whole[:end])
    assert members(path) == listed
    # two archives in one file, and zeros in place of a header
    for damaged in (whole + whole, whole[: headers[2]] + bytes(1024) + whole[headers[2] + 512 :]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.tar"):
            members(path)


def test_damaged_directory_of_a_zip_loses_no_member_silently(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", [(f"a/{i}.jpg", IMAGE) for i in range(4)])
    whole = path.read_bytes()
    start = whole.index(b"PK\1\2")
    second = whole.index(b"PK\1\2", start + 1)
    end = len(whole)
    for bit in (*range(8 * start, 8 * second), *range(8 * (end - 22), 8 * end)):
        path.write_bytes(flipped(whole, bit))
        with contextlib.suppress(DataError):
            assert len(members(path)) == 4, bit
    for length in range(start, end):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            members(path)
