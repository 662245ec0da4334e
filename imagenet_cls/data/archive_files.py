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

from imagenet_cls.errors import DataError, explain_content_errors, printable, shorten
from imagenet_cls.files import check_regular

# tarfile reads an extension header (long names, pax records) whole, whatever size it says.
_MAX_EXTENSION_BYTES = 1 << 20
_END_OF_TAR = bytes(1024)
_ENTRY = b"PK\1\2"  # the start of an entry of a zip's directory
_DAMAGED = "copy or download it again"
_DAMAGED_TAR = f"{_DAMAGED}; unpack a compressed tar (.tar.gz) to .tar"
_LINK = (
    "is a link, or no regular file\n"
    "make the archive again with the images themselves: tar --dereference --hard-dereference"
)
_INCREMENTAL = "is in an incremental backup\nmake the archive again without --listed-incremental"
_PLAIN_ZIP = "make the archive again: zip -0 -r"
_SPARSE = "is a sparse file\nmake the archive again without --sparse"


class Member(NamedTuple):
    """A file in an archive.

    offset: of the data in a tar, of the local header in a zip. packed: the compressed size in a zip,
    0 in a tar. problem: why it can't be read as an image, and what to do; None if it can.
    """

    name: bytes
    offset: int
    size: int
    packed: int
    problem: str | None


class ArchiveChangedError(DataError):
    """An archive that can't be opened any more, or is not the one that was listed."""


@dataclass(frozen=True, eq=False)
class ByteRanges:
    """Where each image lies: in `archives[number]` at `offset` with `size` bytes, int arrays (N,).

    packed: the compressed size in a zip, where `offset` is that of the local header; 0 in a tar.
    statuses: `archive_status` of each archive when it was indexed.
    """

    archives: tuple[str, ...]
    statuses: tuple[tuple[int, ...], ...]
    number: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    packed: np.ndarray

    def select(self, rows: np.ndarray) -> "ByteRanges":
        arrays = {
            name: getattr(self, name)[rows] for name in ("number", "offset", "size", "packed")
        }
        return replace(self, **arrays)

    def archive(self, i: int) -> str:
        return self.archives[self.number[i]]

    def read(self, i: int) -> bytes:
        """The file of image `i`. Opens the archive each time, so that forked workers share no position in it.

        Raises ArchiveChangedError. For a member that can't be read: OSError, and DataError with the
        reason, without names.
        """
        number, offset, size, packed = (
            int(a[i]) for a in (self.number, self.offset, self.size, self.packed)
        )
        path = self.archives[number]
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            remedy = "make this archive readable again, and continue with --resume"
            raise ArchiveChangedError(f"{path}: {error.strerror}\n{remedy}") from None
        try:
            if archive_status(os.fstat(file)) != self.statuses[number]:
                raise ArchiveChangedError(
                    f"{path}: the archive was changed or replaced after it was listed\n"
                    "start again with --resume, which lists it again; or put the former one back first"
                )
            method = 0
            if packed:
                local = os.pread(file, 30, offset)
                if len(local) < 30 or local[:4] != b"PK\3\4":
                    raise DataError("no zip header at its place: the archive is damaged")
                method, name_length, extra_length = struct.unpack("<8xH16x2H", local)
                offset += 30 + name_length + extra_length
            data = os.pread(file, packed or size, offset)
        finally:
            os.close(file)
        if method == 8:
            inflater = zlib.decompressobj(-15)
            try:
                data = inflater.decompress(data, size + 1)  # 0 would be no limit
            except zlib.error as error:
                raise DataError(f"its compressed data is damaged ({error})") from None
        if len(data) != size:
            raise DataError(f"not the {size} bytes that the archive says: it is damaged")
        return data


def archive_status(status: os.stat_result) -> tuple[int, ...]:
    """What changes with an archive's content: size, mtime and ctime (ns), which no program can set.

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
            f"{path}: {error.strerror}\ncheck data.root, data.train and data.val"
        ) from None


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
            what = f"an extension header of {size} bytes at byte {self.start + self.position}"
            raise DataError(f"{self.path}: {what}\n{_DAMAGED_TAR}")
        place = self.start + self.position
        data = os.pread(self.file, max(min(size, self.end - place), 0), place)
        self.position += len(data)
        return data


def tar_members(file: int, path: str, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The files of a tar, which lies in `file` from `start` to `end` (None: to its end). Raises DataError."""
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
                raise DataError(f"{path}: a damaged pax header of {decode_name(name)}\n{_DAMAGED}")
            if start + tar.offset > end:
                what = f"cut short in {decode_name(name)}: it ends at byte {end}"
                raise DataError(f"{path}: {what}\n{_DAMAGED}")
            if not member.isdir():
                problem = None if member.isreg() else _LINK
                if is_sparse:
                    problem = _SPARSE
                elif _has_atime(os.pread(file, 512, offset - 512)):
                    problem = _INCREMENTAL
                yield Member(name, offset, member.size, 0, problem)
        # tarfile takes a damaged header for the end of the archive.
        section.seek(tar.offset)
        found = section.read(len(_END_OF_TAR))
        if found != _END_OF_TAR:
            what = "cut short: no end" if len(found) < len(_END_OF_TAR) else "a damaged header"
            raise DataError(f"{path}: {what} at byte {start + tar.offset}\n{_DAMAGED_TAR}")


def _has_atime(header: bytes) -> bool:
    """Whether GNU tar wrote a time of access where tarfile reads the start of a long name."""
    return header[257:265] == b"ustar  \0" and header[345:346] != b"\0"


def zip_members(file: int, path: str) -> Iterator[Member]:
    """The members of a zip, from its directory. Raises DataError."""
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
                what = f"a damaged zip directory at {decode_name(name)}"
                raise DataError(f"{path}: {what}\n{_DAMAGED}")
            offset, size, packed = info.header_offset, info.file_size, info.compress_size
            problem = None
            if info.flag_bits & 1:
                problem = f"is encrypted\n{_PLAIN_ZIP}"
            elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                method = info.compress_type
                problem = f"is compressed by method {method}, which is not supported\n{_PLAIN_ZIP}"
            if offset < 0 or offset + packed > total or packed == 0 < size:
                what = f"cut short, or damaged: {decode_name(name)} can't lie at byte {offset}"
                raise DataError(f"{path}: {what}\n{_DAMAGED}")
            yield Member(name, offset, size, packed, problem)
