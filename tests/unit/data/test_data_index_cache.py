"""The cache of scans: never another index than without it, whatever happens to the folders and to
the cache.
"""

import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from imagenet_cls.data import index, index_cache
from imagenet_cls.data.index import ImageIndex, index_folder, scan_classes
from imagenet_cls.data.index_cache import read_scan, write_scan


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Classes a and b, one with a folder of images in it, and c, a link to a folder elsewhere."""
    root = tmp_path / "train"
    for name in (
        "a/1.jpg",
        "a/2.JPEG",
        "b/1.png",
        "b/more/3.jpg",
        "b/.hidden/4.jpg",
        "b/notes.txt",
    ):
        touch(root / name)
    touch(tmp_path / "elsewhere" / "ü \udcff.jpg")
    touch(tmp_path / "other" / "ü \udcff.jpg")
    (root / "c").symlink_to(tmp_path / "elsewhere")
    return root


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def wait_for_clock(folder: Path) -> None:
    """Wait until the times of a changed folder differ from those of the last change: the clock has
    steps.
    """
    probe = folder / "probe"
    probe.touch()
    start = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns == start:
        time.sleep(0.001)
        probe.touch()


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_cache_file_that_is_no_regular_file_is_left_alone(
    kind: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(index_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(index_cache, "MIN_IMAGES", 1)
    monkeypatch.setattr(index_cache, "_is_cacheable", lambda *_: True)
    file = index_cache._cache_file(root)
    file.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    for _ in range(2):
        assert len(index_folder(root)) == 5
    assert not file.is_file()


def content(index: ImageIndex) -> tuple[list[bytes], list[int], tuple[str, ...], str]:
    return index.names.tolist(), index.targets.tolist(), index.classes, index.digest


def test_cached_index_equals_the_scanned_one(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(index_folder(root))
    assert expected[0] == [
        os.fsencode(n) for n in ("a/1.jpg", "a/2.JPEG", "b/1.png", "b/more/3.jpg", "c/ü \udcff.jpg")
    ]
    monkeypatch.setattr(index, "scan_classes", None)  # a call is an error
    assert content(index_folder(root)) == expected
    assert index_folder(root).unread == {b".txt": 1}
    monkeypatch.chdir(root.parent)
    assert content(index_folder("train")) == expected
    assert len(list(cache.iterdir())) == 1


def replace_by_folder(path: Path) -> None:
    path.unlink()
    touch(path / "1.jpg")


def restore_time(folder: Path, change: Callable[[], None]) -> None:
    before = folder.stat()
    change()
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda root: touch(root / "a" / "3.jpg"),
        lambda root: replace_by_folder(root / "a" / "1.jpg"),
        lambda root: touch(root / "b" / "more" / "4.jpg"),
        lambda root: touch(root / "b" / "another" / "4.jpg"),
        lambda root: shutil.rmtree(root / "b" / "more"),
        lambda root: touch(root / "d" / "1.jpg"),
        lambda root: touch(root.parent / "elsewhere" / "2.jpg"),
        lambda root: ((root / "c").unlink(), (root / "c").symlink_to(root / "b")),
        lambda root: restore_time(root / "a", lambda: touch(root / "a" / "3.jpg")),
    ],
)
def test_changed_folders_are_listed_again(
    cache: Path, root: Path, change: Callable[[Path], object]
) -> None:
    index_folder(root)
    assert read_scan(root)
    wait_for_clock(root.parent)
    change(root)
    assert read_scan(root) is None
    changed = index_folder(root)
    assert read_scan(root) and content(changed) == content(index_folder(root))
    shutil.rmtree(cache)
    assert content(changed) == content(index_folder(root))


def test_link_to_another_folder_with_the_same_names_is_followed(cache: Path, root: Path) -> None:
    index_folder(root)
    before = (root / "c").stat()
    wait_for_clock(root.parent)
    (root / "c").unlink()
    (root / "c").symlink_to(root.parent / "other")
    os.utime(root, ns=(0, 0))
    os.utime(root.parent / "other", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_scan(root) is None


@pytest.mark.parametrize("place", [".", "a"])
def test_link_that_may_become_a_folder_is_not_cached(cache: Path, root: Path, place: str) -> None:
    (root / place / "link").symlink_to(root.parent / "not mounted yet")
    index_folder(root)
    assert not cache.exists()
    touch(root.parent / "not mounted yet" / "9.jpg")
    index_folder(root)
    counts = np.bincount(read_scan(root).label_index).tolist()
    assert counts == ([2, 2, 1, 1] if place == "." else [3, 2, 1])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("MIN_IMAGES", 6), ("MIN_AGE_SEC", 60), ("FILE_SYSTEMS", frozenset({"vfat"}))],
)
def test_small_changing_or_unreliable_datasets_are_not_cached(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: object
) -> None:
    monkeypatch.setattr(index_cache, setting, value)
    assert len(index_folder(root)) == 5 and not cache.exists()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_bit_of_a_name(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[data.rindex(b"a/1.jpg")] ^= 1
    file.write_bytes(data)


def replace_by_pickle(file: Path) -> None:
    with file.open("wb") as opened:
        np.savez(opened, format=np.array([{}], dtype=object))


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_bit_of_a_name,
        replace_by_pickle,
        lambda file: file.write_bytes(b""),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.unlink(), file.symlink_to(file)),
    ],
)
def test_damaged_cache_is_ignored_and_replaced(
    cache: Path, root: Path, damage: Callable[[Path], object]
) -> None:
    expected = content(index_folder(root))
    (file,) = cache.iterdir()
    damage(file)
    assert read_scan(root) is None
    assert content(index_folder(root)) == expected
    assert file.is_dir() or (content(index_folder(root)) == expected and read_scan(root))
    assert list(cache.iterdir()) == [file]


def test_cache_with_a_damaged_header_of_an_array_is_ignored(cache: Path, root: Path) -> None:
    """Of large arrays numpy then reads a part, whose checksum it can't compare."""
    for number in range(400):
        touch(root / "a" / f"image {number}.jpg")
    index_folder(root)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    assert read_scan(root)
    shapes = [found.span(1) for found in re.finditer(rb"'shape': \(([\d, ]*)\)", whole)]
    assert len(shapes) == 10
    for start, end in shapes:
        for bit in range(8 * start, 8 * end):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            assert read_scan(root) is None, bit


def test_cache_of_another_format_is_ignored(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_folder(root)
    monkeypatch.setattr(index_cache, "FORMAT", index_cache.FORMAT + 1)
    assert read_scan(root) is None


@pytest.mark.parametrize("place", ["/dev/null", "/proc/cache", "file/cache"])
def test_cache_folder_that_cannot_be_made_is_no_error(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    touch(root.parent / "file")
    monkeypatch.setenv("IMAGENET_CLS_CACHE", str(root.parent / place))
    assert len(index_folder(root)) == len(index_folder(root)) == 5


def test_full_disk_leaves_no_file(
    disk: Path, cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGENET_CLS_CACHE", str(disk))
    (disk / "filled").write_bytes(bytes(990_000))
    for number in range(3000):
        touch(root / "a" / f"{number}.jpg")
    assert len(index_folder(root)) == 3004
    assert [path.name for path in disk.iterdir()] == ["filled"]


def test_default_place_is_the_cache_of_the_user(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IMAGENET_CLS_CACHE")
    monkeypatch.setenv("HOME", str(root.parent / "home"))
    for variable, place in (
        ("", "home/.cache"),
        ("relative", "home/.cache"),
        (str(root.parent / "xdg"), "xdg"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        index_folder(root)
        (file,) = (root.parent / place / "imagenet-cls").iterdir()
        assert file.suffix == ".npz"
        file.unlink()


def test_writers_and_readers_at_once_get_the_whole_scan(cache: Path, root: Path) -> None:
    expected = content(index_folder(root))
    scan = scan_classes(root)
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(write_scan, root, scan, time.time()) for _ in range(40)]
        reads = [pool.submit(lambda: content(index_folder(root))) for _ in range(40)]
    assert [write.result() for write in writes] == [None] * 40
    assert all(read.result() == expected for read in reads)
    assert read_scan(root) and [path.suffix for path in cache.iterdir()] == [".npz"]
