"""Archives: the index, the images and the errors are those of the same files in folders, wherever
there are such.
"""

import contextlib
import io
import json
import os
import shutil
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from archive_writers import write_imagenet, write_tar, write_zip
from helpers import datasets_in, peak_kib, write_files

from imagenet_cls.commands.cli import call_command
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data import archives
from imagenet_cls.data.archive_files import Member, archive_members, open_archive
from imagenet_cls.data.archives import index_members
from imagenet_cls.data.check import check_paths
from imagenet_cls.data.datasets import DataSets, open_datasets
from imagenet_cls.data.index import PREPARE_COMMAND
from imagenet_cls.data.sources import size_fingerprint
from imagenet_cls.errors import DataError
from imagenet_cls.extras.datasets.pack import pack_command
from imagenet_cls.extras.datasets.verify_data import verify_command


def files_of(folder: Path) -> list[tuple[str, bytes]]:
    """Names below `folder` and contents, in an order that is not the sorted one."""
    paths = sorted(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.name[::-1]
    )
    return [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths]


def write_shard_with_linked_label(path: Path) -> None:
    write_tar(path, [("a.jpg", IMAGE)])
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("a.cls")
        member.type = tarfile.LNKTYPE
        member.linkname = "b.cls"
        tar.addfile(member)


def write_shards(
    folder: Path,
    files: list[tuple[str, bytes]],
    label_of: Callable[[str], str],
    suffix: str = ".cls",
) -> None:
    """Three shards of one sample after the other: an image and the file with its label."""
    for number in range(3):
        members = []
        for name, content in files[number::3]:
            label = (name.rpartition(".")[0] + suffix, label_of(name).encode())
            members += [(name, content), label]
        # as WebDataset's writer: a pax header for each
        write_tar(folder / f"s-{number:04d}.tar", members, mtime=1.5)


Make = Callable[[Path, Path], DataConfig]


def both_parts(write: Callable[[Path, list[tuple[str, bytes]]], object], suffix: str) -> Make:
    def make(root: Path, image_folder: Path) -> DataConfig:
        for part in ("train", "val"):
            write(root / f"{part}{suffix}", files_of(image_folder / part))
        return DataConfig(root=str(root), train=f"train{suffix}", val=f"val{suffix}")

    return make


def below(prefix: str, files: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [(prefix + name, content) for name, content in files]


def whole_zip(root: Path, image_folder: Path) -> DataConfig:
    return DataConfig(
        root=str(write_zip(root / "imagenet.zip", below("some folder/", files_of(image_folder))))
    )


def class_tars(root: Path, image_folder: Path) -> DataConfig:
    for folder in sorted(image_folder.glob("*/*")):
        write_tar(root / folder.parent.name / f"{folder.name}.tar", files_of(folder))
    return DataConfig(root=str(root))


FOLDERS: dict[str, Make] = {
    "tar, pax": both_parts(write_tar, ".tar"),
    "tar, GNU": both_parts(lambda path, files: write_tar(path, files, tarfile.GNU_FORMAT), ".tar"),
    "tar, ustar": both_parts(
        lambda path, files: write_tar(path, below("./", files), tarfile.USTAR_FORMAT), ".tar"
    ),
    "tar with a top folder": both_parts(
        lambda path, files: write_tar(path, below("top/", files)), ".tar"
    ),
    "zip, stored": both_parts(write_zip, ".zip"),
    "zip, deflated": both_parts(
        lambda path, files: write_zip(path, below("x/", files), zipfile.ZIP_DEFLATED), ".zip"
    ),
    "zip as root": whole_zip,
    "class tars": class_tars,
}


def held_out(root: Path, train: str) -> DataSets:
    return datasets_in(root, train=train, val=None, val_fraction=0.2)


def contents(source: Any) -> list[tuple[str, int, bytes]]:
    return [
        (source.name(i), int(source.index.targets[i]), source.read(i)) for i in range(len(source))
    ]


def described(opened: DataSets) -> list[object]:
    return [
        [part.digest(), size_fingerprint(part), part.classes] for part in (opened.train, opened.val)
    ]


@pytest.fixture
def odd_folder(tmp_path: Path, image_folder: Path) -> Path:
    """Long and odd names, a hidden file, folders in class folders, and files that are no images."""
    root = tmp_path / "folders"
    jpeg = (image_folder / "train" / "cat" / "000.JPEG").read_bytes()
    long = "a very long name " * 9
    for name in (
        "b/x.jpg",
        "b/sub/z.jpg",
        "b/sub.jpg",
        "b/sub-2/z.jpg",
        f"b/{long}.JPEG",
        f"a/{long}/{long}.png",
        "a/ü \udcff.gif",
        "a/notes.txt",
        "b/sub/list.TXT",
        "b/sub/z.csv",
        "a/.hidden.txt",
        "a/._hidden.jpg",
        ".hidden/b.jpg",
        "c/1.2.JPG",
    ):
        for part in ("train", "val"):
            path = root / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg + name.encode("utf-8", "surrogateescape"))
    return root


@pytest.mark.parametrize("name", FOLDERS)
def test_archives_of_class_folders_equal_the_folders(
    name: str, image_folder: Path, tmp_path: Path
) -> None:
    data = FOLDERS[name](tmp_path / "archives", image_folder)
    check_paths(data)
    opened, expected = open_datasets(data), datasets_in(image_folder)
    assert contents(opened.train) == contents(expected.train)
    assert contents(opened.val) == contents(expected.val)
    assert described(opened) == described(expected)
    split = {"val": None, "val_fraction": 0.3}
    expected_split = datasets_in(image_folder, **split)
    assert described(open_datasets(replace(data, **split))) == described(expected_split)
    assert open_datasets(data, ("val",)).val.digest() == expected.val.digest()


@pytest.mark.parametrize("name", ["tar, pax", "tar, GNU", "zip, stored", "zip as root"])
def test_odd_names_are_those_of_the_folders(name: str, odd_folder: Path, tmp_path: Path) -> None:
    if name.startswith("zip"):
        (odd_folder / "train/a/ü \udcff.gif").unlink()  # zipfile writes no such name
        (odd_folder / "val/a/ü \udcff.gif").unlink()
    opened = open_datasets(FOLDERS[name](tmp_path / "archives", odd_folder))
    expected = datasets_in(odd_folder)
    assert contents(opened.train) == contents(expected.train)
    assert described(opened) == described(expected)
    for data in (opened, expected):
        assert data.train.index.unread == {b".txt": 2, b".csv": 1}


@pytest.mark.parametrize("labels", ["names", "numbers", "floats", "json", "json of floats"])
def test_shards_keep_their_order_and_take_labels(
    labels: str, image_folder: Path, tmp_path: Path
) -> None:
    classes = ["cat", "dog", "eel"]
    files = files_of(image_folder / "train")
    suffix, label_of = {
        "names": (".cls", lambda name: name[:3]),
        "numbers": (".cls", lambda name: f"{classes.index(name[:3])}\n"),
        "floats": (".cls", lambda name: f"{classes.index(name[:3])}.0"),
        "json of floats": (
            ".json",
            lambda name: json.dumps({"cls": float(classes.index(name[:3]))}),
        ),
        "json": (
            ".json",
            lambda name: json.dumps({"label": classes.index(name[:3]), "more": "x" * 600}),
        ),
    }[labels]
    write_shards(tmp_path / "train", files, label_of, suffix)
    opened = held_out(tmp_path, "train/s-{0000..0002}.tar")
    whole = datasets_in(tmp_path, ("val",), val="train").val
    expected = [(n, classes.index(n[:3]), c) for number in range(3) for n, c in files[number::3]]
    assert contents(whole) == expected
    assert whole.classes == (tuple(classes) if labels == "names" else ("0", "1", "2"))
    both = [row for row in expected if row in contents(opened.train) + contents(opened.val)]
    assert both == expected and len(contents(opened.val)) == 8
    (tmp_path / "train" / "classes.txt").write_text("cat\ndog\neel\n")
    named = datasets_in(tmp_path, train="train/*.tar", val=str(image_folder / "val"))
    assert named.train.classes == tuple(classes)
    assert contents(named.train) == expected


def test_numbers_in_shards_are_indices_of_the_classes(image_folder: Path, tmp_path: Path) -> None:
    """Class 10 has index 2."""
    files = files_of(image_folder / "train")[:8]
    index = {f"./{name}": i // 2 for i, (name, _) in enumerate(files)}
    write_shards(tmp_path / "train", below("./", files), lambda name: str(index[name]))
    (tmp_path / "train" / "classes.txt").write_text("0\n1\n10\n2\n")
    opened = datasets_in(tmp_path, val="train")
    assert opened.train.classes == ("0", "1", "10", "2")
    expected = {name[2:]: target for name, target in index.items()}
    for source in (opened.train, opened.val):
        assert {name: target for name, target, _ in contents(source)} == expected


def test_numbers_in_shards_are_names_if_all_are_names_of_classes(tmp_path: Path) -> None:
    """Sorted, class 10 has index 1."""
    write_files(tmp_path / "train", {f"{name}/1.jpg": "" for name in ("0", "10", "2", "other")})
    files = [(f"{number}.jpg", IMAGE) for number in (0, 2, 10)]
    write_shards(tmp_path / "val", files, lambda name: name[:-4])
    val = datasets_in(tmp_path).val
    labels = [(name, val.classes[target]) for name, target, _ in contents(val)]
    assert labels == [("0.jpg", "0"), ("2.jpg", "2"), ("10.jpg", "10")]


def test_large_zip_is_read_by_its_64_bit_directory(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 4)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 20_000)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files_of(image_folder / "train"):
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as member:
                member.write(content)
    data = file.getvalue()
    (tmp_path / "train.zip").write_bytes(b"a program that unpacks itself" + data)
    assert b"PK\6\6" in data and len(data) > 20_000
    opened, expected = held_out(tmp_path, "train.zip"), held_out(image_folder, "train")
    assert contents(opened.train) == contents(expected.train)
    assert described(opened) == described(expected)


# ---- bad input


def patch_central(path: Path, offset: int, value: int) -> None:
    """Set 16 bits of the first entry of a zip's directory."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, data.index(b"PK\1\2") + offset, value)
    path.write_bytes(data)


IMAGE = b"\xff\xd8 some image"
SAMPLE = [("a.jpg", IMAGE), ("a.cls", b"0")]
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (
        lambda f: os.truncate(
            write_tar(f / "a.tar", [("a/1.jpg", IMAGE * 999), ("b/2.jpg", IMAGE * 999)]), 18_000
        ),
        "2.jpg",
    ),
    "compressed": (lambda f: (f / "a.tar").write_bytes(b"\x1f\x8b\x08" + bytes(2000)), "not a tar"),
    "no image": (lambda f: write_tar(f / "a.tar", [("a/notes.txt", b"")]), "no image"),
    "flat": (lambda f: write_tar(f / "a.tar", [("1.jpg", IMAGE)]), "class folders"),
    "label is a link": (
        lambda f: write_shard_with_linked_label(f / "a.tar"),
        "a.cls is a link",
    ),
    "negative size": (
        lambda f: write_tar(f / "a.tar", [("a/1.jpg", IMAGE)], pax_headers={"size": "-1024"}),
        "damaged",
    ),
    "zip without its start": (
        lambda f: (f / "a.zip").write_bytes(
            write_zip(f / "b", [("a/1.jpg", IMAGE)]).read_bytes()[60:]
        ),
        "no zip header|cut short|damaged",
    ),
    "encrypted": (
        lambda f: patch_central(write_zip(f / "a.zip", [("a/1.jpg", IMAGE)]), 8, 1),
        "a/1.jpg is encrypted",
    ),
    "bzip2": (
        lambda f: write_zip(f / "a.zip", [("a/1.jpg", IMAGE)], zipfile.ZIP_BZIP2),
        "method 12",
    ),
    "two images of a key": (
        lambda f: write_tar(f / "a.tar", [*SAMPLE, ("a.png", IMAGE)]),
        "two images have the key a",
    ),
    "no label": (
        lambda f: write_tar(f / "a.tar", [*SAMPLE, ("b.jpg", IMAGE)]),
        "the sample b has no label",
    ),
    "no label in the json": (
        lambda f: write_tar(f / "a.tar", [("a.jpg", IMAGE), ("a.json", b"[3]")]),
        "the sample a has no label",
    ),
    "negative label": (
        lambda f: write_tar(f / "a.tar", [("a.jpg", IMAGE), ("a.cls", b"-1")]),
        "numbers 0 to 0.*\n.*folder of the list or of the archives",
    ),
    "label out of range": (
        lambda f: (
            write_tar(f / "a.tar", [("a.jpg", IMAGE), ("a.cls", b"7")]),
            (f / "classes.txt").write_text("x\ny"),
        ),
        "'7' is none of the 2 classes",
    ),
    "image of 2 GiB": (
        lambda f: patch_central(write_zip(f / "a.zip", [("a/1.jpg", IMAGE)]), 26, 2**15),
        "1.jpg has 2147483661 bytes",
    ),
    "local header at the end": (
        lambda f: patch_central(
            write_zip(f / "a.zip", [("a/1.jpg", b"jpeg"), ("a/2.jpg", b"jpeg")], end=b"PK\3\4"),
            42,
            210,
        ),
        "a/1.jpg.*no zip header",
    ),
    "twice, by another path": (
        lambda f: write_tar(f / "a.tar", [("a/1.jpg", IMAGE), ("a//1.jpg", IMAGE)]),
        "twice",
    ),
    "link below ./": (
        lambda f: write_tar(f / "a.tar", [("./a/1.jpg", b"")], type=tarfile.SYMTYPE, linkname="/x"),
        "a/1.jpg is a link",
    ),
    "surrogate in a label": (
        lambda f: write_tar(f / "a.tar", [("a.jpg", IMAGE), ("a.json", b'{"label": "\\ud800"}')]),
        "the sample a has no label",
    ),
    "dot in a key": (
        lambda f: write_tar(f / "a.tar", [*SAMPLE, ("b.v2.jpg", IMAGE), ("b.v2.cls", b"0")]),
        "b.v2.jpg is of no sample",
    ),
    "some without labels": (
        lambda f: (write_tar(f / "a.tar", SAMPLE), write_tar(f / "b.tar", [("b.jpg", IMAGE)])),
        "1 of 2 archives have no labels",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_archive_is_an_error_with_its_name(name: str, tmp_path: Path) -> None:
    make, text = BAD[name]
    (tmp_path / "train").mkdir()
    make(tmp_path / "train")
    (tmp_path / "train" / "b").unlink(missing_ok=True)
    with pytest.raises(DataError, match=text) as error:
        held_out(tmp_path, "train").train.load(0)
    lines = str(error.value).splitlines()
    assert len(lines) <= 3 and str(tmp_path / "train") in lines[0]


@pytest.mark.parametrize("missing", ["train", "val"])
def test_archives_of_imagenet_are_an_error_that_names_what_unpacks_them(
    missing: str, image_folder: Path, tmp_path: Path
) -> None:
    write_imagenet(tmp_path, {"n1": [("n1_1.JPEG", IMAGE)]}, [("n1", IMAGE)])
    (unpacked,) = {"train", "val"} - {missing}
    shutil.copytree(image_folder / unpacked, tmp_path / unpacked)
    for part in (missing, f"ILSVRC2012_img_{missing}.tar"):
        with pytest.raises(DataError) as error:
            datasets_in(tmp_path, **{missing: part})
        assert PREPARE_COMMAND in error.value.remedy


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("none-{0000..0002}.tar", "none"),
        ("*.tar", r"\*"),
        ("{0..1000000}.tar", "more than 1,000,000"),
        ("missing.tar", "missing"),
        ("missing", "missing"),
        (f"{{0..{'9' * 5000}}}.tar", "File name too long"),
    ],
)
def test_missing_archives_are_an_error(part: str, text: str, tmp_path: Path) -> None:
    data = DataConfig(root=str(tmp_path), train=part)
    for check in (check_paths, open_datasets):
        with pytest.raises(DataError, match=text) as error:
            check(data)
        assert len(str(error.value)) < 500 + len(str(tmp_path))


def touch(archive: Path) -> None:
    os.utime(archive, ns=(0, 0))


def replace_archive(archive: Path) -> None:
    """By one of equal size and mtime."""
    before = archive.stat()
    other = archive.with_name("other")
    other.write_bytes(archive.read_bytes())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(archive)


@pytest.mark.parametrize("change", [touch, replace_archive, Path.unlink])
def test_archive_that_changes_after_the_listing_is_an_error(
    change: Callable[[Path], object], image_folder: Path, tmp_path: Path
) -> None:
    data = FOLDERS["zip, stored"](tmp_path, image_folder)
    opened = open_datasets(data)
    change(tmp_path / "train.zip")
    with pytest.raises(DataError, match="--resume") as error:
        opened.train.load(0)
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and lines[0].startswith(f"{tmp_path / 'train.zip'}: ")
    assert "data.exclude" not in lines[1]  # as it leaves out images only


def test_member_of_size_zero_is_not_decompressed(tmp_path: Path) -> None:
    zeros = [(f"{name}/1.jpg", bytes(50_000_000)) for name in "ab"]
    path = write_zip(tmp_path / "train.zip", zeros, zipfile.ZIP_DEFLATED)
    for offset in (24, 26):  # of the size
        patch_central(path, offset, 0)
    source = datasets_in(tmp_path, train="train.zip", val="train.zip").train
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="the 0 bytes"):
            source.load(0)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def members(path: Path) -> list[Member]:
    with open_archive(str(path)) as file:
        return list(archive_members(file))


FIELDS = (0, 99, 100, 124, 134, 136, 148, 153, 155, 156, 157, 257, 263, 345)
"""Bytes of a header: name, mode, size, mtime, checksum, type, link, magic, version, prefix."""


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_with_a_damaged_header_or_end_is_an_error(form: int, tmp_path: Path) -> None:
    """One bit is flipped in each field of each header, and in the two blocks of zeros at the
    end.
    """
    name = "a/3.jpg" if form == tarfile.USTAR_FORMAT else "a/" + "long " * 30 + ".jpg"
    files = [("a/1.jpg", IMAGE), (name, IMAGE), ("b/2.jpg", IMAGE)]
    path = write_tar(tmp_path / "a.tar", files, form)
    whole, listed = path.read_bytes(), members(path)
    end = listed[-1].offset + 512
    headers = [member.offset - 512 for member in listed]
    if form != tarfile.USTAR_FORMAT:
        headers.append(1024)  # of the long name
    assert [member.name.decode() for member in listed] == [name for name, _ in files]
    accepted = 0
    for start in (*headers, end, end + 512):
        for place in (*range(0, 512, 13), *FIELDS, 511):
            damaged = bytearray(whole)
            damaged[start + place] ^= 1 << place % 8
            path.write_bytes(damaged)
            try:
                assert members(path) == listed, (start, place)
                accepted += 1
            except DataError:
                pass
    assert accepted <= 2 * len(headers)  # of a checksum, a leading zero and the last byte
    if form != tarfile.USTAR_FORMAT:
        for position in range(1536, 1720):  # the long name itself has no checksum
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            with contextlib.suppress(DataError):
                assert len(members(path)) == 3, position


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])  # GNU's long names and pax headers
def test_extension_header_of_gigabytes_is_an_error(kind: bytes, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a/1.jpg", IMAGE)], tarfile.GNU_FORMAT)
    header = tarfile.TarInfo("long")
    header.type, header.size = kind, 2**33
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + path.read_bytes())
    before = peak_kib()
    with pytest.raises(DataError, match=r"a\.tar"):
        members(path)
    assert peak_kib() - before < 1_000_000


def test_archive_that_is_a_fifo_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(DataError, match=r"a\.tar"):
        members(tmp_path / "a.tar")


def test_shards_with_texts_in_place_of_labels_are_an_error(tmp_path: Path) -> None:
    files = [(f"{number}.jpg", IMAGE) for number in range(6)]
    write_shards(tmp_path / "train", files, lambda name: name, ".txt")
    with pytest.raises(DataError, match=r"label"):
        datasets_in(tmp_path, val="train")
    assert len(index_members(tmp_path, sorted((tmp_path / "train").glob("*.tar")))) == 6


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_that_is_cut_anywhere_is_an_error(form: int, tmp_path: Path) -> None:
    files = [("a/1.jpg", IMAGE), ("a/" + "l" * 90 + ".jpg", IMAGE * 100), ("b/2.jpg", IMAGE)]
    path = write_tar(tmp_path / "a.tar", files, form)
    whole, listed = path.read_bytes(), members(path)
    end = listed[-1].offset + 512 + 1024
    for length in [*range(0, end, 128), end - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            members(path)
    path.write_bytes(whole[:end])
    assert members(path) == listed


def test_damaged_directory_of_a_zip_loses_no_member_silently(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", [(f"a/{i}.jpg", IMAGE) for i in range(4)])
    whole = path.read_bytes()
    start, second = whole.index(b"PK\1\2"), whole.index(b"PK\1\2", whole.index(b"PK\1\2") + 1)
    for bit in (*range(8 * start, 8 * second), *range(8 * len(whole) - 176, 8 * len(whole))):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):
            assert len(members(path)) == 4, bit
    for length in range(start, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            members(path)


def test_damaged_data_in_a_zip_is_an_error(image_folder: Path, tmp_path: Path) -> None:
    data = FOLDERS["zip, deflated"](tmp_path, image_folder)
    archive = bytearray((tmp_path / "train.zip").read_bytes())
    archive[60:90] = bytes(30)
    (tmp_path / "train.zip").write_bytes(archive)
    source: Any = open_datasets(data).train
    first = int(source.index.byte_ranges.places[:, 1].argmin())
    with pytest.raises(DataError, match=r"image \d+.*damaged"):
        source.load(first)


@pytest.mark.parametrize("name", ["zip, stored", "tar, pax", "class tars"])
def test_bad_image_in_an_archive_is_listed_and_left_out(
    name: str, image_folder: Path, tmp_path: Path
) -> None:
    folders = tmp_path / "folders"
    shutil.copytree(image_folder, folders)
    (folders / "train" / "dog" / "004.JPEG").write_bytes(b"")
    data = FOLDERS[name](tmp_path / "archives", folders)
    words = ["resnet50", *(f"data.{key}={getattr(data, key)}" for key in ("root", "train", "val"))]
    assert call_command(verify_command, words) == 3
    bad = Path(data.root) / "bad_images.txt"
    assert bad.read_text().startswith(f"{data.train}/dog/004.JPEG\tan empty file")
    opened = open_datasets(replace(data, exclude=str(bad)))
    assert len(opened.train) == 39 and "dog/004.JPEG" in opened.note
    (folders / "train" / "dog" / "004.JPEG").unlink()
    assert opened.train.digest() == datasets_in(folders).train.digest()


def test_verify_data_reads_archives_beside_images(
    image_folder: Path, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    files = files_of(image_folder / "train")
    write_shards(tmp_path / "train", files, lambda name: name[:3])
    for name in ("one.zip", "other.zip"):  # of the same names
        write_zip(tmp_path / name, files[:5])
    write_zip(tmp_path / "bad.zip", [("cat/empty.jpg", b"")])
    write_zip(tmp_path / "notes.zip", [("notes.txt", b"")])
    (tmp_path / "image.jpg").write_bytes(files[0][1])
    code, out, error = call(verify_command, tmp_path)
    assert (
        code == 3
        and "52 images, 1 bad" in out
        and f"(in {tmp_path / 'bad.zip'})" in out
        and "CONFIG" in error
    )
    assert call(verify_command, tmp_path / "one.zip")[0] == 0


def test_verify_data_reads_images_of_the_same_key_in_all_shards(
    image_folder: Path, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    files = files_of(image_folder / "train")
    for shard in range(2):
        samples = [
            (f"{i:04d}.jpg", files[i][1][: 900 if (shard, i) == (0, 5) else None])
            for i in range(20)
        ]
        write_tar(
            tmp_path / f"train-{shard}.tar",
            [s for n, d in samples for s in ((n, d), (f"{n[:4]}.cls", b"0"))],
        )
    fields = {"root": str(tmp_path), "train": "train-*.tar", "val": "train-1.tar"}
    overrides = [f"data.{key}={value}" for key, value in fields.items()]
    for words, count in ((["resnet50", *overrides], 60), ([tmp_path], 40)):
        code, out, _ = call(verify_command, *words)
        assert code == 3 and f"{count} images, 1 bad" in out
        assert "0005.jpg: " in out and f"(in {tmp_path / 'train-0.tar'})" in out
    with pytest.raises(DataError, match=r"verify.data(\.py)? CONFIG"):
        open_datasets(DataConfig(**fields)).train.load(5)


# ---- cache


def test_cached_archives_are_listed_again_after_a_change(
    cache: Path, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "train", files_of(image_folder / "train"), lambda name: name[:3])
    write_zip(tmp_path / "val.zip", files_of(image_folder / "val"))
    data = DataConfig(root=str(tmp_path), val="val.zip")
    listed = [contents(part) for part in (open_datasets(data).train, open_datasets(data).val)]
    with monkeypatch.context() as only_cache:
        only_cache.setattr(archives, "_scan_archives", None)  # a call is an error
        opened = open_datasets(data)
        assert [contents(opened.train), contents(opened.val)] == listed
    before = (tmp_path / "val.zip").stat()
    files = files_of(image_folder / "val")
    write_zip(tmp_path / "val.zip", files[1:] + files[:1])
    os.utime(tmp_path / "val.zip", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "train" / "s-0002.tar").unlink()
    opened = open_datasets(data)
    assert contents(opened.val) == listed[1]
    found = contents(opened.train)
    assert found == [row for row in listed[0] if row in found] != listed[0]


def test_class_tar_with_subfolders_is_one_class(tmp_path: Path, image_folder: Path) -> None:
    dog = files_of(image_folder / "train" / "dog")
    write_tar(tmp_path / "train" / "dog.tar", [*dog[:10], *below("extra/", dog[10:])])
    write_tar(tmp_path / "train" / "cat.tar", files_of(image_folder / "train" / "cat"))
    data = held_out(tmp_path, "train")
    assert data.classes == ("cat", "dog")
    assert len(data.train) + len(data.val) == 20


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_archive_of_class_tars_is_an_error(
    prefix: str, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    """Also with an image beside the tars, and beside archives that are read."""
    tar = write_tar(tmp_path / "inner", SAMPLE).read_bytes()
    tars = [(f"{prefix}{name}.tar", tar) for name in ("._a", "a", "b")]
    path = write_tar(tmp_path / "whole" / "train.tar", [("docs/cover.jpg", IMAGE), *tars])
    write_zip(path.with_name("eel.zip"), [("eel/1.jpg", IMAGE)])
    for root, part in ((path.parent, path.name), (path, "."), (path.parent, ".")):
        with pytest.raises(DataError, match="2 tars") as error:
            held_out(root, part)
        assert PREPARE_COMMAND in error.value.remedy
    for command, *argv in ((pack_command, path, tmp_path / "out"), (verify_command, path.parent)):
        assert call(command, *argv)[0] == 3


def test_class_tars_beside_other_class_folders_are_an_error(
    tmp_path: Path, image_folder: Path
) -> None:
    shutil.copytree(image_folder / "train" / "cat", tmp_path / "train" / "cat")
    write_tar(tmp_path / "train" / "dog.tar", files_of(image_folder / "train" / "dog"))
    with pytest.raises(DataError, match=r"dog\.tar"):
        held_out(tmp_path, "train")
    # unpacked, and not removed
    shutil.copytree(image_folder / "train" / "dog", tmp_path / "train" / "dog")
    assert held_out(tmp_path, "train").classes == ("cat", "dog")


def test_unpacked_class_tars_are_not_read_from_the_cache(
    cache: Path, tmp_path: Path, image_folder: Path
) -> None:
    for name in ("cat", "dog"):
        write_tar(tmp_path / "train" / f"{name}.tar", files_of(image_folder / "train" / name))
    of_tars = held_out(tmp_path, "train")
    for name in ("cat", "dog"):  # beside them
        shutil.copytree(image_folder / "train" / name, tmp_path / "train" / name)
        (tmp_path / "train" / name / "new.jpg").write_bytes(IMAGE)
    data = held_out(tmp_path, "train")
    assert len(data.train) + len(data.val) == len(of_tars.train) + len(of_tars.val) + 2


def test_shard_that_two_patterns_name_counts_once(tmp_path: Path) -> None:
    for number in range(1, 11):
        name = f"train/s{number}-x.tar"
        write_tar(tmp_path / name, [(f"{number}.jpg", IMAGE), (f"{number}.cls", b"0")])
    data = datasets_in(tmp_path, train="train/s{1..10}*.tar", val="train/s1-x.tar")
    assert len(data.train) == 10


@pytest.mark.parametrize("prefixes", [("train/", "val/"), ("a/b/train_", "a/b/val_")])
def test_classes_a_level_deeper_are_an_error(
    tmp_path: Path, image_folder: Path, prefixes: tuple[str, str]
) -> None:
    train, val = (files_of(image_folder / part) for part in ("train", "val"))
    write_zip(tmp_path / "both.zip", [*below(prefixes[0], train), *below(prefixes[1], val)])
    with pytest.raises(DataError, match="deeper"):
        held_out(tmp_path, "both.zip")


def test_shards_of_one_label_may_have_folders(tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "a.tar", [("a/b/0.jpg", IMAGE), ("a/b/0.cls", b"cat")])
    assert datasets_in(tmp_path, val="train").classes == ("cat",)


def test_files_of_shards_beside_images_and_labels_are_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "a.tar", [*SAMPLE, ("a.txt", b""), ("a.json", b"{}")])
    train = datasets_in(tmp_path, val="train").train
    assert train.index.unread == {b".txt": 1}


def test_tar_of_class_folders_may_hold_other_files(tmp_path: Path, image_folder: Path) -> None:
    files = [
        ("a.tar", b""),
        *files_of(image_folder / "train"),
        ("cat/000.json", b'{"width": 3}'),
        ("dog/000.json", b"[" * 100_000),
    ]
    write_tar(tmp_path / "train.tar", files)
    assert held_out(tmp_path, "train.tar").classes == ("cat", "dog", "eel")


def test_patterns_may_be_absolute(tmp_path: Path, image_folder: Path) -> None:
    write_shards(tmp_path / "shards", files_of(image_folder / "train"), lambda name: name[:3])
    data = held_out(tmp_path / "elsewhere", f"{tmp_path}/shards/s-*.tar")
    assert data.classes == ("cat", "dog", "eel")
    with pytest.raises(DataError, match="No such file"):
        held_out(tmp_path, "shards/s-{0002..0001}.tar")


@pytest.mark.parametrize("missing", range(3))
def test_range_of_patterns_of_which_one_has_no_match_is_an_error(
    missing: int, tmp_path: Path, image_folder: Path
) -> None:
    for number in {0, 1, 2} - {missing}:
        folder = tmp_path / f"s-{number}"
        write_shards(folder, files_of(image_folder / "train"), lambda name: name[:3])
    with pytest.raises(DataError, match=rf"s-{missing}/\*\.tar: No such file"):
        held_out(tmp_path, "s-{0..2}/*.tar")


def test_root_may_be_an_archive_of_class_folders(tmp_path: Path, image_folder: Path) -> None:
    root = write_zip(tmp_path / "train.zip", files_of(image_folder / "train"))
    assert held_out(root, ".").classes == ("cat", "dog", "eel")


@pytest.mark.parametrize("part", ["train/", "./train", "val/../train"])
def test_folder_in_an_archive_may_be_named_by_any_path(
    part: str, tmp_path: Path, image_folder: Path
) -> None:
    root = write_zip(tmp_path / "all.zip", files_of(image_folder))
    assert held_out(root, part).classes == ("cat", "dog", "eel")


def test_sparse_members_are_an_error(tmp_path: Path, image_folder: Path) -> None:
    files = files_of(image_folder / "train")
    write_tar(tmp_path / "train.tar", files, pax_headers={"GNU.sparse.map": "0,5"})
    with pytest.raises(DataError, match="sparse"):
        held_out(tmp_path, "train.tar")


def test_shard_with_double_slashes_in_its_names_is_read(tmp_path: Path) -> None:
    """As GNU tar writes them for `tar -cf train.tar 0//`."""
    samples = [(f"0//{i}", str(i % 2).encode()) for i in range(10)]
    files = [
        file for key, label in samples for file in ((f"{key}.jpg", IMAGE), (f"{key}.cls", label))
    ]
    write_tar(tmp_path / "train.tar", files)
    data = DataConfig(root=str(tmp_path), train="train.tar", val="train.tar")
    expected = [(f"0/{i}.jpg", i % 2, IMAGE) for i in range(10)]
    assert contents(open_datasets(data).train) == expected
