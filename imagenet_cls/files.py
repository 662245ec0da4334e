"""Atomic writes and removals, locks, and errors of the file system."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from imagenet_cls.errors import DataError, ResourceError, UsageError

TEMPORARY = ".tmp-"
# At the start of the pages and pictures that a later call may replace.
OUTPUT_MARK = "written by imagenet-cls"
REMOVED = f"{TEMPORARY}gone-"


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file beside its place, sync and rename it: a kill or OSError leaves the old file or
    the new one.

    A device or FIFO is written to as it is. Renaming a file over it would remove it: for root,
    /dev/null too.
    """
    if path.is_dir():  # renaming would replace a link to a folder
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if is_device_or_fifo(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `path` at the end. An OSError leaves the old file."""
    # one name, so that the next write replaces what a kill left
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def is_device_or_fifo(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def check_replaced(path: Path, option: str = "--out") -> None:
    """Raise UsageError for an existing file that an output would replace, unless it is empty or has
    `OUTPUT_MARK`: it may be the user's.
    """
    if is_device_or_fifo(path) or not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(4096)
    if head and OUTPUT_MARK.encode() not in head:
        raise UsageError(
            f"{path} already exists, and is not marked as an output of imagenet-cls.",
            f"Name another file with {option}, or move that one away.",
        )


def check_output_path(path: Path | None, option: str = "--out") -> None:
    """Raise UsageError if a file can't be written or would be replaced."""
    if path is None:
        return
    if path.is_file() or path.is_dir() or (path.is_symlink() and not path.exists()):
        raise UsageError(
            f"{path} already exists.", f"Name another file with {option}, or move that one away."
        )
    if not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        what = "no permission" if path.parent.is_dir() else "its folder does not exist"
        raise UsageError(f"Can't write {path}: {what}.", f"Name another file with {option}.")


def write_output(path: Path, content: bytes | str, option: str = "--out") -> None:
    """`write_file` for a path that an option of a command gives. Raises ResourceError."""
    with explain_write_errors(path, f"Name another file with {option}."):
        write_file(path, content)


def check_regular(file: Path | int) -> None:
    """Raise OSError unless a path, or an open descriptor, is a regular file. A device or FIFO may
    have no end.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):  # noqa: PTH116 (for a descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(file))


def read_regular(path: str | bytes | Path) -> bytes:
    """The content of a regular file. Raises OSError, also for a device or FIFO, without waiting."""
    with open(path, "rb", buffering=0, opener=open_at_once) as file:
        check_regular(file.fileno())
        return file.read()


def read_text(file: Path, remedy: str, length: int = -1) -> str:
    """The text of a file, or its first `length` characters. Raises DataError with the remedy if it
    can't be read.
    """
    try:
        check_regular(file)
        with file.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            return lines.read(length)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.", remedy) from None


def open_at_once(path: str | bytes, flags: int) -> int:
    """An `opener` for `open` that does not wait until another process opens a FIFO for writing."""
    return os.open(path, flags | os.O_NONBLOCK)


def link(path: Path, target: str) -> None:
    """Make or replace a symbolic link, in one step; without an error where the file system has
    none.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)


def take_lock(folder: Path, remedy: str) -> IO[str]:
    """Lock a folder by its file `.lock`, which names the holder, until it is closed. Raises
    UsageError or OSError.
    """
    lock = (folder / ".lock").open("a+")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise UsageError(f"{folder} is in use by {holder}.", remedy) from None
    if not os.path.samestat(os.fstat(lock.fileno()), (folder / ".lock").stat()):
        raise FileNotFoundError("the lock has just been removed by another process")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def is_locked(folder: Path) -> bool:
    """Whether another process has the lock of `take_lock`. In the process that has it, this would
    release it.
    """
    try:
        with (folder / ".lock").open("rb") as lock:
            os.lockf(lock.fileno(), os.F_TEST, 0)
    except (PermissionError, BlockingIOError) as error:
        return error.filename is None  # else the file can't be opened
    except OSError:
        pass
    return False


def remove(path: Path) -> None:
    """Remove a folder, which is renamed first, or a file or link if there is one. Raises
    OSError.
    """
    if path.is_dir() and not path.is_symlink():
        renamed = path.with_name(f"{REMOVED}{path.name}")
        path.rename(renamed)
        shutil.rmtree(renamed)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Write a file, or the names in a folder, from the system's cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explain_write_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError (disk full, no permission, share gone) into a ResourceError that names `path`
    and the remedy.
    """
    try:
        yield
    except OSError as error:
        raise ResourceError(f"Can't write {path}: {error.strerror or error}.", remedy) from error
