"""The list of bad images that `tools/verify_data.py` writes, and the training images that `data.exclude` leaves out."""

import json
import os
from pathlib import Path

import numpy as np

from imagenet_cls.data.index import ImageIndex, listed
from imagenet_cls.errors import DataError

FILE_NAME = "bad_images.txt"
# One of this many training images may be left out; of fewer, one.
IMAGES_PER_EXCLUDED = 10_000


def read_bad_images(path: Path) -> dict[str, str]:
    """Reason of each bad image, by its path: relative to the data set's root, with `/` between folders, or absolute.

    One image per line: path, tab, reason. Also reads the `verified_images.json` of earlier versions. Raises DataError.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        if text.startswith("{"):
            return {image["path"]: image["reason"] for image in json.loads(text)["bad"]}
    except OSError as error:
        remedy = f"make it with: python tools/verify_data.py DATA_ROOT --out {path}"
        raise DataError(f"{path} (data.exclude): {error.strerror}\n{remedy}") from None
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{path} (data.exclude): not a list that tools/verify_data.py wrote") from None
    rows = [line.partition("\t") for line in text.split("\n") if line.strip()]
    return {name: reason or "listed" for name, _, reason in rows}


def exclude_images(index: ImageIndex, root: Path, path: Path) -> tuple[ImageIndex, str | None]:
    """The training images without those in the list at `path`, and a note about them (None without any).

    root: the data set's; paths in the list are relative to it. Raises DataError for more than one image in 10,000,
    rounded up.
    """
    rows = [row for row, _ in _bad_rows(index, root, path)]
    if not rows:
        return index, None
    most = -(-len(index) // IMAGES_PER_EXCLUDED)
    if len(rows) > most:
        raise DataError(
            f"{path} (data.exclude): names {len(rows)} of {len(index)} training images, and at most {most} may be left "
            "out\nreplace the others"
        )
    names = listed([index.name(row) for row in rows])
    note = f"{len(rows)} of {len(index)} training images left out by data.exclude: {names}"
    return index.select(np.setdiff1d(np.arange(len(index)), rows)), note


def check_none_excluded(index: ImageIndex, root: Path, path: Path) -> None:
    """Raise DataError for a validation image in the list at `path`."""
    for row, reason in _bad_rows(index, root, path):
        raise DataError(
            f"{index.path(row)} (image {row}): {reason} ({path}); validation leaves no image out\n"
            "replace the file, and remove it from the list"
        )


def _bad_rows(index: ImageIndex, root: Path, path: Path) -> list[tuple[int, str]]:
    """Rows of `index` that the list names, with the reasons. (An annotation file may name an image twice.)"""
    base, start = os.fsencode(os.path.abspath(root)), os.fsencode(os.path.abspath(index.root))  # noqa: PTH100
    reasons = {
        os.path.normpath(os.path.join(base, os.fsencode(name))): reason  # noqa: PTH118
        for name, reason in read_bad_images(path).items()
    }
    file_names = {name.rpartition(b"/")[2] for name in reasons}  # compared first: normpath takes seconds for ImageNet
    rows = []
    for row in range(len(index)):
        name = index.raw_name(row)
        if name.rpartition(b"/")[2] in file_names:
            reason = reasons.get(os.path.normpath(os.path.join(start, name)))  # noqa: PTH118
            if reason is not None:
                rows.append((row, reason))
    return rows
