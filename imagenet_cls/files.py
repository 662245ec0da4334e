"""Files that are written whole or not at all."""

import contextlib
import os
from pathlib import Path


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
