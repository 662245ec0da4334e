"""Which images of a data set are known to be bad: the file that `tools/verify_data.py` writes, and what it leads to.

Owns the file's form, and which training images are left out for it. Refuses to open an image: `verify` does. Called by
`verify`, which makes it, and by `datasets`.
"""

import json
import os
import stat
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from imagenet_cls.data.index import ImageIndex
from imagenet_cls.data.layout import listed
from imagenet_cls.errors import DataError, ResourceError

FILE_NAME = "verified_images.json"
FORMAT = "imagenet_cls verified images 1"
# Of so many training images one may be left out; of fewer, one.
IMAGES_FOR_EACH_BAD = 10_000


@dataclass(frozen=True)
class BadImage:
    """path: below the data set's root, with `/` between folders, or absolute where a list names a place elsewhere.

    size_bytes: None where there was nothing to read.
    """

    path: str
    reason: str
    size_bytes: int | None


@dataclass(frozen=True)
class Contents:
    """Images of a folder with all that are in it. digest: SHA-256 over their paths and bytes, in order of the paths."""

    images: int
    size_bytes: int
    bad: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What all images were when they were read. folders: by the first part of the paths, such as train and val."""

    whole: Contents
    folders: dict[str, Contents]
    bad: tuple[BadImage, ...]


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write it beside its place and rename it. Raises ResourceError."""
    tree = {"format": FORMAT, **asdict(manifest)}
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("w", encoding="ascii") as file:  # JSON escapes all else, names that are no text included
            json.dump(tree, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> ResourceError:
    """What to tell where the manifest's folder takes no file."""
    return ResourceError(f"can't write {path}: {error.strerror or error}\nname another place with --out FILE")


def read_manifest(path: Path) -> Manifest:
    """Raises DataError for a file that is missing or is no manifest."""
    remedy = "make it with: python tools/verify_data.py DATA_ROOT --out FILE"
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if tree["format"] != FORMAT:
            raise ValueError
        folders = {name: Contents(**folder) for name, folder in tree["folders"].items()}
        return Manifest(Contents(**tree["whole"]), folders, tuple(BadImage(**bad) for bad in tree["bad"]))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}, and it should name the bad images\n{remedy}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(f"{path}: is not a file that tools/verify_data.py wrote\n{remedy}") from None


def leave_out(index: ImageIndex, root: Path, path: Path) -> tuple[ImageIndex, str | None]:
    """A training part without the images that the manifest at `path` calls bad; a note where there are any.

    root: the data set's, which the manifest's paths are relative to. Raises DataError for more than one image in
    10,000, rounded up, and for an image that has another size now than it had when it was found to be bad.
    """
    found = _bad_rows(index, root, read_manifest(path).bad)
    for i, bad in found.items():
        if _size_bytes(index.path(i)) != bad.size_bytes:
            raise DataError(
                f"{index.path(i)}: was bad ({bad.reason}) as {path} was made, and has changed since\n"
                f"read the data set anew: python tools/verify_data.py {root}"
            )
    most = -(-len(index) // IMAGES_FOR_EACH_BAD)
    if len(found) > most:
        raise DataError(
            f"{path}: {len(found)} of {len(index)} training images are bad, and at most {most} may be left out\n"
            "replace the others; it gives the reason for each"
        )
    if not found:
        return index, None
    kept = np.setdiff1d(np.arange(len(index)), list(found))
    note = f"{len(found)} of {len(index)} training images left out, being bad: {listed([index.name(i) for i in found])}"
    return index.select(kept), note


def refuse_bad(index: ImageIndex, root: Path, path: Path) -> None:
    """Raise DataError where the manifest at `path` calls an image of a validation part bad."""
    for i, bad in _bad_rows(index, root, read_manifest(path).bad).items():
        raise DataError(
            f"{index.path(i)} (image {i}): {bad.reason}, as {path} says; validation leaves no image out\n"
            f"replace it, and read the data set anew: python tools/verify_data.py {root}"
        )


def _bad_rows(index: ImageIndex, root: Path, bad: Collection[BadImage]) -> dict[int, BadImage]:
    """Those images of `index` that `bad` names, by their rows, in order. A list may name an image twice."""
    base, start = os.fsencode(os.path.abspath(root)), os.fsencode(os.path.abspath(index.root))  # noqa: PTH100
    by_path = {os.path.normpath(os.path.join(base, os.fsencode(image.path))): image for image in bad}  # noqa: PTH118
    last_parts = {path.rpartition(b"/")[2] for path in by_path}
    rows = {}
    for i in range(len(index)):
        name = index.raw_name(i)
        if name.rpartition(b"/")[2] in last_parts:
            image = by_path.get(os.path.normpath(os.path.join(start, name)))  # noqa: PTH118
            if image is not None:
                rows[i] = image
    return rows


def _size_bytes(path: Path) -> int | None:
    """As `BadImage` has it."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None
