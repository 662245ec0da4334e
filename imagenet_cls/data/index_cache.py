"""Scans of large datasets in a cache folder, so that a run need not list a million files again.

A scan is used only if every listed folder has the same inode, mtime and ctime as before. The kernel
sets both times when a name is added, removed or replaced; a program can set only mtime. Without a
usable scan the folders are listed.
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from imagenet_cls.files import TEMPORARY, is_device_or_fifo, read_regular

CACHE_VARIABLE = "IMAGENET_CLS_CACHE"
MIN_IMAGES = 10_000  # fewer are listed in milliseconds
# File systems that set both times of a folder at each change. Others may not (FUSE, object storage,
# SMB), or show the times and inodes of a disk image, which may be replaced by another one
# (squashfs, overlay).
FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "zfs", "f2fs", "tmpfs", "nfs", "nfs4", "lustre", "ceph"}
)
# Two changes within the resolution of the times, up to 2 seconds, have equal times. The rest allows
# for a file server whose clock is slow.
MIN_AGE_SEC = 60
_DIGEST_BYTES = 32  # at the end of a cache file
FORMAT = 5  # raise it when other files are listed, in another order, or stored in another way


@dataclass(frozen=True)
class Scan:
    """The images in the class folders, archives or shards of a dataset.

    labels: the names of the class folders, or the labels of shards (are_shards), sorted.
    label_index: int32 (N,), indices of `labels`. names: (N,) paths relative to the dataset, of
    dtype S. unread: the number of other files, by suffix. statuses: of what was listed, before it
    was listed: of folders by their paths relative to the dataset, of archives by absolute paths.
    places: of images in archives, as in `ByteRanges`; empty for folders. is_cacheable: see
    `index.FolderContent`.
    """

    labels: list[str]
    label_index: np.ndarray
    names: np.ndarray
    unread: Mapping[bytes, int]
    statuses: Mapping[bytes, os.stat_result]
    places: np.ndarray
    are_shards: bool = False
    is_cacheable: bool = True


def open_status(path: bytes) -> os.stat_result:
    """The status of a folder or file. It is opened, so that an NFS client asks the server."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def read_scan(root: Path, archives: Sequence[bytes] = ()) -> Scan | None:
    """The cached scan of this folder, or of archives (absolute paths). None without one, if it is
    damaged, or something has changed.
    """
    try:
        with np.load(io.BytesIO(_read_verified(_cache_file(root))), allow_pickle=False) as stored:
            if stored["format"] != FORMAT:
                return None
            paths = stored["paths"].tolist()
            # A scan of folders begins with the folder itself.
            if paths != list(archives) if archives else b"" not in paths:
                return None
            folder = os.fsencode(root)
            statuses = {
                path: open_status(os.path.join(folder, path))  # noqa: PTH118
                for path in paths
            }
            if not np.array_equal(stored["times"], _times(statuses)):
                return None
            unread = zip(stored["suffixes"].tolist(), stored["num_unread"].tolist(), strict=True)
            return Scan(
                list(map(os.fsdecode, stored["labels"].tolist())),
                stored["label_index"],
                stored["names"],
                dict(unread),
                statuses,
                stored["places"],
                bool(stored["are_shards"]),
            )
    except Exception:  # zipfile and numpy raise anything for damaged files
        return None


def write_scan(root: Path, scan: Scan, started: float) -> None:
    """Write a scan that began at the Unix time `started` to the cache, if it is large enough and
    `_is_cacheable`. Errors are ignored.
    """
    with contextlib.suppress(OSError, RuntimeError):  # a RuntimeError if there is no home folder
        if len(scan.names) < MIN_IMAGES or not _is_cacheable(scan, started):
            return
        target = _cache_file(root)
        if is_device_or_fifo(target):
            return
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Several processes may write at once: each has a temporary file of its own.
        with tempfile.NamedTemporaryFile(prefix=TEMPORARY, dir=target.parent, delete=False) as file:
            try:
                content = io.BytesIO()
                np.savez(
                    content,
                    format=np.array(FORMAT),
                    paths=np.array(list(scan.statuses)),
                    times=_times(scan.statuses),
                    labels=np.array(list(map(os.fsencode, scan.labels))),
                    label_index=scan.label_index,
                    names=scan.names,
                    suffixes=np.array(list(scan.unread), bytes),
                    num_unread=np.array(list(scan.unread.values()), np.int64),
                    places=scan.places,
                    are_shards=np.array(scan.are_shards),
                )
                file.write(content.getbuffer())
                file.write(_digest(content.getbuffer()))
                file.flush()
                Path(file.name).replace(target)
            finally:
                Path(file.name).unlink(missing_ok=True)


def _read_verified(path: Path) -> bytes:
    """The content of a cache file. Raises OSError or ValueError for a damaged one.

    numpy compares the checksum of an array only when it reads to its end. With a damaged header it
    may not.
    """
    stored = read_regular(path)
    content = stored[:-_DIGEST_BYTES]
    if stored[-_DIGEST_BYTES:] != _digest(content):
        raise ValueError(f"{path}: wrong checksum")
    return content


def _digest(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _is_cacheable(scan: Scan, started: float) -> bool:
    """Whether any later change of what was listed will change its times, so that `read_scan`
    detects it.
    """
    statuses = scan.statuses.values()
    latest = max(max(status.st_mtime, status.st_ctime) for status in statuses)
    if not scan.is_cacheable or latest > started - MIN_AGE_SEC:
        return False
    file_systems = {}
    # only Linux has it: see proc(5)
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        mount, _, file_system = line.partition(" - ")
        major, minor = mount.split()[2].split(":")
        file_systems[os.makedev(int(major), int(minor))] = file_system.split()[0]
    return all(file_systems.get(status.st_dev, "unknown") in FILE_SYSTEMS for status in statuses)


def _times(statuses: Mapping[bytes, os.stat_result]) -> np.ndarray:
    """Inode number and times in nanoseconds, as text, since an inode number may exceed int64."""
    return np.array(
        [b"%d %d %d" % (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for s in statuses.values()]
    )


def _cache_file(root: Path) -> Path:
    """The file for the dataset in `root`. Raises RuntimeError if there is no home folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    if not folder:
        # ignored unless it is absolute, as the XDG specification says
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = os.fspath((xdg if xdg.is_absolute() else Path.home() / ".cache") / "imagenet-cls")
    absolute = os.path.abspath(os.fsencode(root))  # noqa: PTH100
    return Path(folder, f"index-{blake2b(absolute, digest_size=8).hexdigest()}.npz")
