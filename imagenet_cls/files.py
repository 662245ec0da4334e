"""Files that are written whole or not at all, and what to do where the file system refuses."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from imagenet_cls.errors import ResourceError


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file beside its place, sync and rename it: a kill at any moment leaves the old file or the new one.

    Raises OSError; then the old file is as it was. Two processes must not write the same path at once.
    """
    temporary = path.with_name(f".tmp-{path.name}")  # one name, so that the next write replaces what a kill left
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, from the system's cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explain_write_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError (disk full, no permission, share gone) into a ResourceError that names `path` and the remedy."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"can't write {path}: {error.strerror or error}\n{remedy}") from error
