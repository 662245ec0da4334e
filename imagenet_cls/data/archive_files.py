"""Tar and zip archives: lists their members, and reads a member by its offset.

Formats: POSIX.1-2001 `pax`, section "pax Interchange Format", with GNU's long names; PKWARE's APPNOTE.TXT 6.3, sections
4.3 and 4.5.3 (Zip64). To list a tar, tarfile takes several times as long.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from imagenet_cls.data.index import is_image
from imagenet_cls.errors import DataError, printable, shorten
from imagenet_cls.files import check_regular

_READ = 2048  # bytes read at a header of a tar: the small members behind it are in them, too
_CENTRAL_READ = 1 << 22
_CENTRAL = struct.Struct("<8x2H8x2L3H8xL").unpack_from  # of an entry of a zip's directory
_NO_32_BITS = 0xFFFF_FFFF
_ZEROS = bytes(512)
_FILES, _EXTENSIONS = b"0\0" + b"7", b"xgLK"  # types of members
_GNU_NAME, _PAX, _FOLDER = b"Lx5"
_DAMAGED = "copy or download it again"

# Name, offset (of the data in a tar, of the local header in a zip), size, compressed size in a zip (0 in a tar), and
# the content of a small member of a tar.
Member = tuple[bytes, int, int, int, bytes]


@dataclass(frozen=True, eq=False)
class Spans:
    """Where each image lies: in `archives[number]` at `offset` with `size` bytes, int arrays (N,).

    packed: the compressed size in a zip, where `offset` is that of the local header; 0 in a tar. statuses: size and
    mtime (ns) of each archive when it was indexed.
    """

    archives: tuple[str, ...]
    statuses: tuple[tuple[int, int], ...]
    number: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    packed: np.ndarray

    def select(self, rows: np.ndarray) -> "Spans":
        arrays = {name: getattr(self, name)[rows] for name in ("number", "offset", "size", "packed")}
        return replace(self, **arrays)

    def archive(self, i: int) -> str:
        return self.archives[self.number[i]]

    def read(self, i: int) -> bytes:
        """The file of image `i`. Opens the archive each time, so that forked workers share no position in it.

        Raises OSError, and DataError with the reason, without names.
        """
        number, offset, size, packed = (int(a[i]) for a in (self.number, self.offset, self.size, self.packed))
        file = os.open(self.archives[number], os.O_RDONLY)
        try:
            status = os.fstat(file)
            if (status.st_size, status.st_mtime_ns) != self.statuses[number]:
                raise DataError("the archive has changed since it was indexed: start again, with --resume")
            method = 0
            if packed:
                local = os.pread(file, 30, offset)
                if local[:4] != b"PK\3\4":
                    raise DataError("no zip header at its place: the archive is damaged")
                method, name_length, extra_length = struct.unpack("<8xH16x2H", local)
                offset += 30 + name_length + extra_length
            data = os.pread(file, packed or size, offset)
        finally:
            os.close(file)
        if method == 8:
            inflater = zlib.decompressobj(-15)
            try:
                data = inflater.decompress(data, size)
            except zlib.error as error:
                raise DataError(f"its compressed data is damaged ({error})") from None
        if len(data) != size:
            raise DataError(f"its data has {len(data)} bytes instead of {size}: the archive is damaged")
        return data


def shown(name: bytes) -> str:
    """A member's name in a message."""
    return shorten(printable(os.fsdecode(name)), 200)


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor of an archive. Raises DataError if it can't be opened or read."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            check_regular(file)
            yield file
        finally:
            os.close(file)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}\ncheck data.root, data.train and data.val") from None


def tar_members(file: int, path: str, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The files of a tar, which lies in `file` from `start` to `end` (None: to its end). Raises DataError."""
    end = os.fstat(file).st_size if end is None else end
    position = base = start
    buffer = b""
    override: dict[bytes, bytes] = {}
    while True:
        at = position - base
        if at + 1024 > len(buffer):
            buffer, base, at = os.pread(file, _READ, position), position, 0
        header = buffer[at : at + 512]
        offset = position + 512
        size = _size_in_header(header) if len(header) == 512 else -1
        if size < 0:
            if header == _ZEROS and offset <= end:
                return
            what = f"a damaged header at byte {position}" if position > start else "not a tar archive"
            what = f"cut short: no end at byte {position}" if len(header) < 512 or offset > end else what
            raise DataError(f"{path}: {what}\n{_DAMAGED}; unpack a compressed tar (.tar.gz) to .tar")
        kind = header[156]
        if kind in _EXTENSIONS:
            content = os.pread(file, size, offset) if size > 512 else buffer[at + 512 : at + 512 + size]
            if kind == _GNU_NAME:
                override[b"path"] = content.rstrip(b"\0")
            elif kind == _PAX and b"GNU.sparse." in content:
                raise DataError(f"{path}: a sparse member at byte {position}\nmake the archive again without --sparse")
            elif kind == _PAX and (b"path=" in content or b"size=" in content):
                override |= _pax_records(content, path)
            position = offset + (abs(size) + 511 & -512)
            continue
        name = header[: min(header.find(0), 100)]
        if header[345] and header[257:263] == b"ustar\0":
            name = header[345:500].rstrip(b"\0") + b"/" + name
        if override:
            name, size = override.get(b"path", name), int(override.get(b"size", size))
            override = {}
        position = offset + (size + 511 & -512)
        if size < 0 or offset + size > end:
            raise DataError(f"{path}: cut short in {shown(name)}: it ends at byte {end}\n{_DAMAGED}")
        if kind in _FILES:
            yield name, offset, size, 0, b"" if size > 512 else buffer[at + 512 : at + 512 + size]
        elif kind != _FOLDER and is_image(name):
            raise DataError(
                f"{path}: {shown(name)} is a link, or no regular file\nmake the archive again with the images "
                "themselves: tar --dereference --hard-dereference"
            )


def _size_in_header(header: bytes) -> int:
    """The size of a member: octal, or for large ones binary. Negative if the checksum is wrong.

    The checksum is the sum of all bytes, of which those of the checksum count as spaces. The low half of Adler-32 is
    1 + the sum, modulo 65521.
    """
    try:
        checksum = int(header[148:156].strip(b"\0 "), 8) + sum(header[148:156]) - 256 + 1
        is_binary = header[124] == 0x80
        size = int.from_bytes(header[125:136], "big") if is_binary else int(header[124:136].strip(b"\0 ") or b"0", 8)
    except (ValueError, IndexError):
        return -1
    return size if (zlib.adler32(header) & 0xFFFF) == checksum % 65_521 else -1


def _pax_records(content: bytes, path: str) -> dict[bytes, bytes]:
    """Records `LENGTH KEY=VALUE` of a pax header."""
    records = {}
    with contextlib.suppress(ValueError):
        while content:
            length = int(content[: content.index(b" ")])
            if length < 5:
                break
            key, _, value = content[content.index(b" ") + 1 : length - 1].partition(b"=")
            records[key], content = value, content[length:]
        if not content and int(records.get(b"size", b"0")) >= 0:
            return records
    raise DataError(f"{path}: a damaged pax header\n{_DAMAGED}")


def zip_members(file: int, path: str) -> Iterator[Member]:
    """The members of a zip, from its central directory. Raises DataError, also for an image that is encrypted."""
    total = os.fstat(file).st_size
    position, end, shift = _central_directory(file, path, total)
    buffer, at = b"", 0
    while position + at < end:
        if at + 46 > len(buffer) or at + 46 + sum(struct.unpack_from("<3H", buffer, at + 28)) > len(buffer):
            position += at
            buffer, at = os.pread(file, _CENTRAL_READ, position), 0
        if len(buffer) < at + 46 or buffer[at : at + 4] != b"PK\1\2":
            raise DataError(f"{path}: a damaged zip directory\n{_DAMAGED}")
        flags, method, packed, size, name_length, extra_length, comment_length, offset = _CENTRAL(buffer, at)
        name = buffer[at + 46 : at + 46 + name_length]
        extra = buffer[at + 46 + name_length : at + 46 + name_length + extra_length]
        at += 46 + name_length + extra_length + comment_length
        if _NO_32_BITS in (packed, size, offset):
            size, packed, offset = _zip64(extra, size, packed, offset)
        offset += shift
        if (flags & 1 or method not in (0, 8)) and is_image(name):
            what = "encrypted" if flags & 1 else f"compressed by method {method}, which is not supported"
            raise DataError(f"{path}: {shown(name)} is {what}\nmake the archive again: zip -0 -r")
        if offset + packed > total or offset < 0:
            raise DataError(f"{path}: cut short: {shown(name)} lies behind its end\n{_DAMAGED}")
        yield name, offset, size, packed, b""


def _central_directory(file: int, path: str, total: int) -> tuple[int, int, int]:
    """Start and end of the directory, and the bytes before the zip, as where it unpacks itself."""
    start = max(total - 65_557, 0)
    tail = os.pread(file, 65_557, start)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) < at + 22:
        raise DataError(f"{path}: no zip archive, or cut short\n{_DAMAGED}")
    size, offset = struct.unpack_from("<12x2L", tail, at)
    end = start + at
    if tail[max(at - 20, 0) : at][:4] == b"PK\6\7":
        end -= 76  # as in zipfile, the record lies right before its locator: where it says is wrong behind a program
        record = os.pread(file, 56, max(end, 0))
        if record[:4] != b"PK\6\6":
            raise DataError(f"{path}: a damaged zip directory\n{_DAMAGED}")
        size, offset = struct.unpack_from("<40x2Q", record)
    if offset + size > end:
        raise DataError(f"{path}: a damaged zip directory\n{_DAMAGED}")
    return end - size, end, end - size - offset


def _zip64(extra: bytes, *numbers: int) -> list[int]:
    """Size, compressed size and offset, where they exceed 32 bits."""
    fields = b""
    while len(extra) >= 4:
        key, length = struct.unpack_from("<2H", extra)
        if key == 1:
            fields = extra[4 : 4 + length]
        extra = extra[4 + length :]
    values = iter(struct.unpack_from(f"<{len(fields) // 8}Q", fields))
    return [next(values, number) if number == _NO_32_BITS else number for number in numbers]
