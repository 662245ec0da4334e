"""Annotation files: `path label` lines, or CSV, as an `ImageIndex`.

Owns the two formats and what a label may be. Refuses to read images: of the files named, only a few are looked for.
Called by `datasets` for `data.name: list`.
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.index import ImageIndex
from imagenet_cls.data.layout import is_image, listed
from imagenet_cls.errors import DataError, format_value

PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path", "name")
LABEL_COLUMNS = ("label", "class", "class_name", "target", "category")

Row = tuple[int, str, str]  # line number (from 1), path, label


def index_list(file: Path | str, folder: Path | str, classes: Sequence[str] | None = None) -> ImageIndex:
    """Index the images that `file` names, in its order, with paths relative to `folder` (absolute ones stay).

    Format: CSV where the name ends in .csv, with or without a header; else `path label` lines, split at the last white
    space, so that paths may contain spaces. Labels are class names, or numbers 0 .. C-1. The classes are, in this
    order of precedence: `classes` (the training classes, for a validation list); the lines of a `classes.txt` beside
    `file`; the names, sorted; for numbers, their decimal strings. Numbers that are not themselves class names count
    into the classes.

    Raises DataError with file and line for a line that is none, a label that is unknown or out of range, and missing
    images: only the first, the middle and the last three are looked for, since looking for 1.28 million takes minutes
    on a network disk.
    """
    file, folder = Path(file), Path(folder)
    rows = read_rows(file)
    if not rows:
        raise DataError(f"{file}: no images in it\nwrite one `path label` line for each image")
    beside = file.with_name("classes.txt")
    if classes is None and beside.is_file():
        classes = _listed_classes(beside)
    targets, names = _targets(file, rows, classes)
    _refuse_missing_images(file, folder, rows)
    return ImageIndex.pack(folder, [os.fsencode(path) for _, path, _ in rows], targets, names)


def read_rows(file: Path) -> list[Row]:
    """The lines of an annotation file. Blank lines are left out. DataError for a line that does not parse."""
    text = _read_text(file)
    if file.suffix.lower() == ".csv":
        return _csv_rows(file, text)
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().rsplit(maxsplit=1)
        if len(words) == 1:
            raise DataError(
                f"{file}:{number}: {format_value(words[0])} is not `path label`\nput the image's class behind its path"
            )
        if words:
            rows.append((number, words[0], words[1]))
    return rows


def _listed_classes(file: Path) -> list[str]:
    """The lines of a classes.txt. DataError for a class that stands there twice: labels would name two targets."""
    names = [line.strip() for line in _read_text(file).splitlines() if line.strip()]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError(f"{file}: {listed(twice)} stand there more than once\nlist each class once, one a line")
    return names


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except FileNotFoundError:
        is_default = Path(DataConfig.root) in file.parents
        root = "data.root (its default here: a change of data.name forgets a file's)" if is_default else "data.root"
        remedy = f"set {root}, data.train and data.val to where the lists are"
        raise DataError(f"{file}: no such annotation file\n{remedy}") from None
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}\na list is a text file of `path label` lines, or CSV") from None


def _csv_rows(file: Path, text: str) -> list[Row]:
    rows: list[Row] = []
    reader = csv.reader(io.StringIO(text, newline=""))
    path_column, label_column = 0, 1
    for cells in _parsed(reader, file):
        if not any(cell.strip() for cell in cells):
            continue
        if not rows and not any(is_image(os.fsencode(cell.strip())) for cell in cells):
            path_column, label_column = _columns([cell.strip().lower() for cell in cells])
            continue
        if (
            len(cells) <= max(path_column, label_column)
            or not cells[path_column].strip()
            or not cells[label_column].strip()
        ):
            row = format_value(",".join(cells))
            raise DataError(f"{file}:{reader.line_num}: {row} is not `path,label`\ngive both, separated by a comma")
        rows.append((reader.line_num, cells[path_column].strip(), cells[label_column].strip()))
    return rows


def _parsed(reader: Any, file: Path) -> Iterator[list[str]]:
    """The reader's lines. DataError for what its parser refuses, such as a quote that is opened and never closed."""
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(f"{file}:{reader.line_num}: not CSV: {error}\nlook for a quote that is never closed") from None


def _columns(header: list[str]) -> tuple[int, int]:
    """Positions of path and label in a header; the first two columns where it names neither."""
    path = next((header.index(name) for name in PATH_COLUMNS if name in header), 0)
    label = next((header.index(name) for name in LABEL_COLUMNS if name in header), 1 if path == 0 else 0)
    return path, label


def _is_number(label: str) -> bool:
    """Whether a label is a class number. Python reads no number of thousands of digits: that is a name."""
    return label.removeprefix("-").isdecimal() and label.isascii() and len(label) < 1000


def _targets(file: Path, rows: Sequence[Row], classes: Sequence[str] | None) -> tuple[np.ndarray, list[str]]:
    """Target of each row, int64 (N,), and the names of the classes."""
    labels = {label for _, _, label in rows}
    numbers = all(map(_is_number, labels))
    if classes is None:
        names = _numbered_classes(file, labels) if numbers else sorted(labels)
    else:
        names = list(classes)
    position = {name: i for i, name in enumerate(names)}
    if numbers and not labels <= position.keys():
        position = {label: int(label) for label in labels if 0 <= int(label) < len(names)}
    unknown = sorted(labels - position.keys())
    if unknown:
        number, _, label = next(row for row in rows if row[2] in set(unknown))
        what = f"out of range 0 to {len(names) - 1}" if numbers else f"not among the {len(names)} classes"
        raise DataError(
            f"{file}:{number}: label {format_value(label)} is {what} ({len(unknown)} such labels: {listed(unknown)})\n"
            "correct the list, or name all classes, one a line, in a classes.txt beside the training list"
        )
    return np.fromiter((position[label] for _, _, label in rows), np.int64, len(rows)), names


def _numbered_classes(file: Path, labels: set[str]) -> list[str]:
    """Classes `0` .. `C-1` for number labels. DataError where a number is left out: then C cannot be told."""
    used = {int(label) for label in labels}
    # The first few only: one mistyped label may be a number of any size.
    missing = [str(number) for number in islice((n for n in range(max(used) + 1) if n not in used), 4)]
    if missing:
        raise DataError(
            f"{file}: labels run from {min(used)} to {max(used)}, but no image has label {listed(missing)}\n"
            "count classes from 0, or name all of them, one a line, in a classes.txt beside the list"
        )
    return [str(number) for number in range(max(used) + 1)]


def _refuse_missing_images(file: Path, folder: Path, rows: Sequence[Row]) -> None:
    last = len(rows) - 1
    for i in sorted({0, last // 2, max(last - 2, 0), max(last - 1, 0), last}):
        number, path, _ = rows[i]
        if not _is_file(folder / path):
            raise DataError(
                f"{file}:{number}: no image {folder / path}\n"
                f"paths in a list are relative to data.root, which is {folder}: set it to where they start from"
            )


def _is_file(path: Path) -> bool:
    """A path that no file system takes (a name of more than 255 bytes, a null byte) is no file."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
