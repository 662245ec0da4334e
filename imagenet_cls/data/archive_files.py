"""Tar and zip archives: lists members with `tarfile` and `zipfile`, and reads one by its offset."""

import contextlib
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from imagenet_cls.errors import DataError, explain_content_errors
from imagenet_cls.files import check_regular
from imagenet_cls.text import printable, shorten

# tarfile reads an extension header (long names, pax records) whole, whatever size it says.
_MAX_EXTENSION_BYTES = 1 << 20
_END_OF_TAR = bytes(1024)
_ENTRY = b"PK\1\2"  # the start of an entry of a zip's directory
_DAMAGED = "Copy or download it again."
_DAMAGED_TAR = "Copy or download it again; unpack a compressed tar (.tar.gz) to .tar."
_PLAIN_ZIP = "Make the archive again: zip -0 -r"
_PLAIN_TAR = (
    "Make the archive again with GNU tar: --dereference --hard-dereference, and without --sparse "
    "and --listed-incremental."
)


class Member(NamedTuple):
    """A file in an archive.

    offset: the offset of the data in a tar, of the local header in a zip. compressed: the
    compressed size in a zip, 0 in a tar. problem, remedy: why it can't be read as an image, and
    what to do; problem is None if it can.
    """

    name: bytes
    offset: int
    size: int
    compressed: int
    problem: str | None
    remedy: str


class ArchiveChangedError(DataError):
    """An archive that can't be opened any more, or is not the one that was listed."""


@dataclass(frozen=True, eq=False)
class ByteRanges:
    """Where each image lies: in `archives[archive_index]` at `offset` with `size` bytes, int arrays
    (N,).

    compressed: the compressed size in a zip, where `offset` is the offset of the local header; 0 in
    a tar. statuses: `archive_status` of each archive when it was indexed.
    """

    archives: tuple[str, ...]
    statuses: tuple[tuple[int, ...], ...]
    archive_index: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    compressed: np.ndarray

    def select(self, rows: np.ndarray) -> "ByteRanges":
        return replace(
            self,
            archive_index=self.archive_index[rows],
            offset=self.offset[rows],
            size=self.size[rows],
            compressed=self.compressed[rows],
        )

    def archive(self, i: int) -> str:
        return self.archives[self.archive_index[i]]

    def read(self, i: int) -> bytes:
        """The file of image `i`. Opens the archive each time: with thousands of shards, open
        descriptors would exceed their limit, and an archive that is replaced would not be noticed.

        Raises ArchiveChangedError. For a member that can't be read: OSError, and DataError with the
        reason, without names.
        """
        path = self.archive(i)
        size = int(self.size[i])
        compressed = int(self.compressed[i])
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ArchiveChangedError(
                f"{path}: {error.strerror}.",
                "Make this archive readable again, and continue with --resume.",
            ) from None
        try:
            if archive_status(os.fstat(file)) != self.statuses[self.archive_index[i]]:
                raise ArchiveChangedError(
                    f"{path}: the archive was changed or replaced after it was listed.",
                    "Start again with --resume, which lists it again; or put the former one back "
                    "first.",
                )
            offset = int(self.offset[i])
            if not compressed:
                data = os.pread(file, size, offset)
            else:
                data = _read_zip_member(file, offset, size, compressed)
        finally:
            os.close(file)
        if len(data) != size:
            raise DataError(f"not the {size} bytes that the archive says: it is damaged", _DAMAGED)
        return data


def _read_zip_member(file: int, offset: int, size: int, compressed: int) -> bytes:
    """The bytes of a member, stored or deflated. Decompresses at most one byte more than `size`,
    enough to see that the size is wrong. Raises DataError.
    """
    header = os.pread(file, 30, offset)
    if len(header) < 30 or header[:4] != b"PK\3\4":
        raise DataError("no zip header at its offset: the archive is damaged", _DAMAGED)
    method, name_length, extra_length = struct.unpack("<8xH16x2H", header)
    data = os.pread(file, compressed, offset + 30 + name_length + extra_length)
    if method != zipfile.ZIP_DEFLATED:
        return data
    try:
        return zlib.decompressobj(-15).decompress(data, size + 1)  # + 1: zlib takes 0 as no limit
    except zlib.error as error:
        raise DataError(f"its compressed data is damaged ({error})", _DAMAGED) from None


def archive_status(status: os.stat_result) -> tuple[int, ...]:
    """What changes when an archive is changed: its size, mtime and ctime (ns). A program can
    restore the first two, but not the ctime.

    The inode number adds nothing to ctime, and on FUSE (sshfs, s3fs) an unchanged file may get
    another one.
    """
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def decode_name(name: bytes) -> str:
    """A member's name in a message."""
    return shorten(printable(os.fsdecode(name)), 200)


@contextlib.contextmanager
def open_archive(path: str) -> Iterator[int]:
    """A descriptor of an archive. Raises DataError if it can't be opened or read."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            check_regular(file)
            yield file
        finally:
            os.close(file)
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}.", "Check data.root, data.train and data.val."
        ) from None


def archive_members(
    file: int, path: str, start: int = 0, end: int | None = None
) -> Iterator[Member]:
    """The files of a zip, or of a tar, which lies in `file` from `start` to `end` (None: to its
    end). Raises DataError.
    """
    if path.lower().endswith(".zip"):
        return zip_members(file, path)
    return tar_members(file, path, start, end)


class _Section:
    """The bytes from `start` to `end` of a file, for tarfile, which reads headers and no data."""

    def __init__(self, file: int, path: str, start: int, end: int):
        self.file = file
        self.path = path
        self.start = start
        self.end = end
        self.position = 0

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        self.position = position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_EXTENSION_BYTES:
            raise DataError(
                f"{self.path}: an extension header of {size} bytes at byte "
                f"{self.start + self.position}.",
                _DAMAGED_TAR,
            )
        offset = self.start + self.position
        data = os.pread(self.file, max(min(size, self.end - offset), 0), offset)
        self.position += len(data)
        return data


def tar_members(file: int, path: str, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The files of a tar, which lies in `file` from `start` to `end` (None: to its end). Raises
    DataError.
    """
    end = os.fstat(file).st_size if end is None else end
    section: Any = _Section(file, path, start, end)
    with explain_content_errors(DataError, path, "not a tar archive, or damaged", _DAMAGED_TAR):
        tar: Any = tarfile.TarFile(fileobj=section, encoding="utf-8", errors="surrogateescape")
        while (member := tar.next()) is not None:
            tar.members.clear()  # tarfile keeps all
            name = member.name.encode("utf-8", "surrogateescape")
            offset = start + member.offset_data
            is_sparse = member.issparse() or any("GNU.sparse." in key for key in member.pax_headers)
            stated = None if is_sparse else member.pax_headers.get("size")
            if member.size < 0 or stated not in (None, str(member.size)):
                # tarfile takes 0 for a size that is no number.
                raise DataError(f"{path}: a damaged pax header of {decode_name(name)}.", _DAMAGED)
            if start + tar.offset > end:
                raise DataError(
                    f"{path}: cut short in {decode_name(name)}: it ends at byte {end}.", _DAMAGED
                )
            if not member.isdir():
                has_atime = _has_atime(os.pread(file, 512, offset - 512))
                is_plain = member.isreg() and not is_sparse and not has_atime
                problem = None if is_plain else "is a link, a sparse file or no plain file"
                yield Member(name, offset, member.size, 0, problem, _PLAIN_TAR)
        # tarfile takes a damaged header for the end of the archive.
        section.seek(tar.offset)
        found = section.read(len(_END_OF_TAR))
        if found != _END_OF_TAR:
            kind = "cut short: no end" if len(found) < len(_END_OF_TAR) else "a damaged header"
            raise DataError(f"{path}: {kind} at byte {start + tar.offset}.", _DAMAGED_TAR)


def _has_atime(header: bytes) -> bool:
    """Whether GNU tar (--listed-incremental) wrote a time of access where tarfile reads the start
    of a long name.
    """
    return header[257:265] == b"ustar  \0" and header[345:346] != b"\0"


def zip_members(file: int, path: str) -> Iterator[Member]:
    """The files of a zip, from its directory. Raises DataError."""
    total = os.fstat(file).st_size
    with (
        explain_content_errors(DataError, path, "no zip archive, cut short or damaged", _DAMAGED),
        open(file, "rb", closefd=False) as content,
    ):
        for info in zipfile.ZipFile(content).infolist():
            # zipfile decodes names without the flag of UTF-8 as code page 437.
            name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
            if any(_ENTRY in field for field in (name, info.extra, info.comment)):
                # A damaged length hides the next entries in this one. zipfile does not count them.
                raise DataError(
                    f"{path}: a damaged zip directory at {decode_name(name)}.", _DAMAGED
                )
            offset = info.header_offset
            compressed = info.compress_size
            if offset < 0 or offset + compressed > total or compressed == 0 < info.file_size:
                raise DataError(
                    f"{path}: cut short, or damaged: {decode_name(name)} can't lie at byte "
                    f"{offset}.",
                    _DAMAGED,
                )
            if name.endswith(b"/"):  # a folder
                continue
            problem = None
            if info.flag_bits & 1:
                problem = "is encrypted"
            elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                problem = f"is compressed by method {info.compress_type}, which is not supported"
            yield Member(name, offset, info.file_size, compressed, problem, _PLAIN_ZIP)
