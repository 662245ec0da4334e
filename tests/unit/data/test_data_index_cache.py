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

import pytest
from helpers import write_files

from imagenet_cls.data import index, index_cache
from imagenet_cls.data.index import index_folder, scan_classes
from imagenet_cls.data.index_cache import read_scan, write_scan


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Classes a and b, one with a folder of images in it, and c, a link to a folder elsewhere."""
    root = tmp_path / "train"
    names = ("a/1.jpg", "a/2.JPEG", "b/1.png", "b/more/3.jpg", "b/.hidden/4.jpg", "b/notes.txt")
    write_files(root, dict.fromkeys(names, ""))
    touch(tmp_path / "elsewhere" / "ü \udcff.jpg")
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


def test_cached_index_equals_the_scanned_one(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = index_folder(root).digest
    monkeypatch.setattr(index, "scan_classes", None)  # a call is an error
    assert index_folder(root).digest == expected
    assert len(index_folder(root)) == 5 and index_folder(root).unread == {b".txt": 1}
    monkeypatch.chdir(root.parent)
    assert index_folder("train").digest == expected
    assert len(list(cache.iterdir())) == 1


def replace_by_folder(path: Path) -> None:
    path.unlink()
    touch(path / "1.jpg")


def add_image_and_restore_time(root: Path) -> None:
    before = (root / "a").stat()
    touch(root / "a" / "3.jpg")
    os.utime(root / "a", ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda root: touch(root / "a" / "3.jpg"),
        lambda root: replace_by_folder(root / "a" / "1.jpg"),
        lambda root: shutil.rmtree(root / "b" / "more"),
        lambda root: touch(root / "d" / "1.jpg"),
        lambda root: touch(root.parent / "elsewhere" / "2.jpg"),
        add_image_and_restore_time,
    ],
)
def test_changed_folders_are_listed_again(
    cache: Path, root: Path, change: Callable[[Path], object]
) -> None:
    index_folder(root)
    wait_for_clock(root.parent)
    change(root)
    changed = index_folder(root)
    assert read_scan(root) and changed.digest == index_folder(root).digest
    shutil.rmtree(cache)
    assert changed.digest == index_folder(root).digest


@pytest.mark.parametrize("place", [".", "a"])
def test_link_that_may_become_a_folder_is_not_cached(cache: Path, root: Path, place: str) -> None:
    (root / place / "link.d").symlink_to(root.parent / "not mounted yet")
    index_folder(root)
    assert not cache.exists()
    touch(root.parent / "not mounted yet" / "9.jpg")
    assert len(index_folder(root)) == 6


@pytest.mark.parametrize(
    ("setting", "value"),
    [("MIN_IMAGES", 6), ("MIN_AGE_SEC", 60), ("FILE_SYSTEMS", frozenset({"vfat"}))],
)
def test_small_changing_or_unreliable_datasets_are_not_cached(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: object
) -> None:
    monkeypatch.setattr(index_cache, setting, value)
    assert len(index_folder(root)) == 5 and not cache.exists()


@pytest.mark.parametrize(
    ("damage", "is_replaced"),
    [
        (lambda file: os.truncate(file, file.stat().st_size // 2), True),
        (lambda file: file.write_bytes(b""), True),
        (lambda file: (file.unlink(), file.mkdir()), False),
        (lambda file: (file.unlink(), os.mkfifo(file)), False),
        (lambda file: (file.unlink(), file.symlink_to("/dev/zero")), False),
    ],
)
def test_damaged_cache_is_ignored(
    cache: Path, root: Path, damage: Callable[[Path], object], is_replaced: bool
) -> None:
    """And replaced, if it is a file."""
    expected = index_folder(root).digest
    (file,) = cache.iterdir()
    damage(file)
    assert read_scan(root) is None
    assert index_folder(root).digest == expected
    assert file.is_file() == bool(read_scan(root)) == is_replaced
    assert list(cache.iterdir()) == [file]


def test_cache_with_a_damaged_header_of_an_array_is_ignored(cache: Path, root: Path) -> None:
    """Of large arrays numpy then reads a part, whose checksum it can't compare."""
    for number in range(500):  # with one bit flipped, 505 is 105
        touch(root / "a" / f"image {number}.jpg")
    index_folder(root)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    shapes = [found.end() for found in re.finditer(rb"'shape': \((?=505)", whole)]
    assert len(shapes) == 2
    for place in shapes:
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            file.write_bytes(damaged)
            assert read_scan(root) is None, bit


def test_cache_of_another_format_is_ignored(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_folder(root)
    monkeypatch.setattr(index_cache, "FORMAT", index_cache.FORMAT + 1)
    assert read_scan(root) is None


def test_cache_folder_that_cannot_be_made_is_no_error(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(index_cache.CACHE_VARIABLE, str(root / "a" / "1.jpg" / "cache"))
    assert len(index_folder(root)) == 5


def test_full_disk_leaves_no_file(
    disk: Path, cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(index_cache.CACHE_VARIABLE, str(disk))
    (disk / "filled").write_bytes(bytes(990_000))
    for number in range(3000):
        touch(root / "a" / f"{number}.jpg")
    assert len(index_folder(root)) == 3004
    assert [path.name for path in disk.iterdir()] == ["filled"]


def test_default_place_is_the_cache_of_the_user(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(index_cache.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(root.parent / "home"))
    for variable, place in (("relative", "home/.cache"), (str(root.parent / "xdg"), "xdg")):
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        index_folder(root)
        (file,) = (root.parent / place / "imagenet-cls").iterdir()
        assert file.suffix == ".npz"
        file.unlink()


def test_writers_and_readers_at_once_get_the_whole_scan(cache: Path, root: Path) -> None:
    expected = index_folder(root).digest
    scan = scan_classes(root)
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(write_scan, root, scan, time.time()) for _ in range(40)]
        reads = [pool.submit(index_folder, root) for _ in range(40)]
    assert not any(write.result() for write in writes)
    assert all(read.result().digest == expected for read in reads)
    assert read_scan(root) and [path.suffix for path in cache.iterdir()] == [".npz"]
