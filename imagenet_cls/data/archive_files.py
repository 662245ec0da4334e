"""Tar and zip archives: lists members with `tarfile` and `zipfile`, and reads one by its offset."""

import contextlib
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import FileIO
from typing import Any, NamedTuple

import numpy as np

from imagenet_cls.errors import DataError, explain_content_errors
from imagenet_cls.files import check_regular, open_at_once
from imagenet_cls.text import printable, shorten

_END_OF_TAR = bytes(1024)
_CHUNK_BYTES = 2**20
_ENTRY = b"PK\1\2"  # the start of an entry of a zip's directory
_DAMAGED = "Copy or download it again."
_DAMAGED_TAR = "Copy or download it again; unpack a compressed tar (.tar.gz) to .tar."


class Member(NamedTuple):
    """A file in an archive.

    offset: the offset of the data in a tar, of the local header in a zip. compressed: the
    compressed size in a zip, 0 in a tar. is_plain: whether it can be read.
    """

    name: bytes
    offset: int
    size: int
    compressed: int
    is_plain: bool


class ArchiveChangedError(DataError):
    """An archive that can't be opened any more, or is not the one that was listed."""


@dataclass(frozen=True, eq=False)
class ByteRanges:
    """Where each image lies in archives.

    statuses: `archive_status` of each archive when it was indexed. places: int64 (N, 4), for each
    image the index of its archive, and offset, size and compressed size as in `Member`.
    """

    archives: tuple[str, ...]
    statuses: tuple[tuple[int, ...], ...]
    places: np.ndarray

    def select(self, rows: np.ndarray) -> "ByteRanges":
        return replace(self, places=self.places[rows])

    def archive(self, i: int) -> str:
        return self.archives[self.places[i, 0]]

    def read(self, i: int) -> bytes:
        """The file of image `i`. Opens the archive each time: with thousands of shards, open
        descriptors would exceed their limit, and an archive that is replaced would not be noticed.

        Raises ArchiveChangedError. For a member that can't be read: OSError, and DataError with the
        reason, without names.
        """
        archive_index, offset, size, compressed = self.places[i].tolist()
        path = self.archives[archive_index]
        try:
            file = open_at_once(path, os.O_RDONLY)
        except OSError as error:
            raise ArchiveChangedError(
                f"{path}: {error.strerror}.",
                "Make this archive readable again, and continue with --resume.",
            ) from None
        try:
            if archive_status(os.fstat(file)) != self.statuses[archive_index]:
                raise ArchiveChangedError(
                    f"{path}: the archive was changed or replaced after it was listed.",
                    "Start again with --resume, which lists it again; or put the former one back "
                    "first.",
                )
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
def open_archive(path: str) -> Iterator[FileIO]:
    """An archive, opened without a buffer. Raises DataError if it can't be opened or read."""
    try:
        with FileIO(path, opener=open_at_once) as file:
            check_regular(file.fileno())
            yield file
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}.", "Check the path and its permissions."
        ) from None


def archive_members(file: FileIO) -> Iterator[Member]:
    """The files of a zip or a tar. Raises DataError."""
    return zip_members(file) if is_zip(file.name) else tar_members(file)


def is_zip(name: str) -> bool:
    return name.lower().endswith(".zip")


def tar_members(file: FileIO) -> Iterator[Member]:
    """The files of a tar. Raises DataError."""
    path = file.name
    with explain_content_errors(DataError, path, "not a tar archive, or damaged", _DAMAGED_TAR):
        tar: Any = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
        while (member := tar.next()) is not None:
            tar.members.clear()  # tarfile keeps all
            if not member.isdir():
                name = member.name.encode("utf-8", "surrogateescape")
                is_plain = member.isreg() and not member.issparse()
                yield Member(name, member.offset_data, member.size, 0, is_plain)
        # tarfile takes a damaged header for the end of the archive.
        if os.pread(file.fileno(), len(_END_OF_TAR), tar.offset) != _END_OF_TAR:
            raise DataError(
                f"{path}: cut short, or a damaged header, at byte {tar.offset}.", _DAMAGED_TAR
            )
        # Zeros take the place of what a broken download lacks.
        file.seek(tar.offset)
        while rest := file.read(_CHUNK_BYTES):
            if any(rest):
                raise DataError(
                    f"{path}: data follows the end of the archive at byte {tar.offset}: it is "
                    "damaged, or several archives are in one file.",
                    _DAMAGED_TAR,
                )


def zip_members(file: FileIO) -> Iterator[Member]:
    """The files of a zip, from its directory. Raises DataError."""
    path = file.name
    with explain_content_errors(DataError, path, "no zip archive, cut short or damaged", _DAMAGED):
        for info in zipfile.ZipFile(file).infolist():
            # zipfile decodes names without the flag of UTF-8 as code page 437.
            name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
            # A damaged length hides the next entries in this one. zipfile does not count them.
            if any(_ENTRY in field for field in (name, info.extra, info.comment)):
                raise DataError(
                    f"{path}: a damaged zip directory at {decode_name(name)}.", _DAMAGED
                )
            if name.endswith(b"/"):  # a folder
                continue
            is_link = stat.S_ISLNK(info.external_attr >> 16)
            is_encrypted = info.flag_bits & 1
            is_readable = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            is_plain = is_readable and not is_link and not is_encrypted
            yield Member(name, info.header_offset, info.file_size, info.compress_size, is_plain)
