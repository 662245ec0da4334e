"""Text files that list images.

Annotation files (`path label` lines, or CSV), and the list of bad images that
`tools/verify_data.py` writes, for `data.exclude`.
"""

import csv
import io
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from imagenet_cls.data.classes import resolve_labels
from imagenet_cls.data.index import (
    IMAGE_SUFFIXES,
    ImageIndex,
    has_image_suffix,
    may_be_parts,
    suffix_of,
)
from imagenet_cls.data.targets import multi_hot, split_labels
from imagenet_cls.errors import DataError
from imagenet_cls.files import read_text
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.text import command_line, format_value, join_names

# Names of columns in the header of a CSV file, in lower case.
PATH_COLUMNS = (
    "path",
    "file",
    "filename",
    "file_name",
    "image",
    "image_path",
    "image_name",
    "name",
)
LABEL_COLUMNS = ("label", "class", "class_name", "target", "category", "labels", "classes", "tags")
# Columns that tell the part of an image, by their names; `may_be_parts` is about their values.
_PART_COLUMN = re.compile(
    r"(?<![a-z])(split|subset|partition|phase|usage|k?fold|set|is_?(train|val|valid|test))(?![a-z])",
    re.IGNORECASE,
)
_MAX_PARTS = 9  # different values in such a column
BAD_IMAGES_FILE = "bad_images.txt"
_ZERO_OR_ONE = ("0", "1", "0.0", "1.0")  # in the column of a class
LIST_REMEDY = "Set data.root, data.train and data.val to the lists."

_Row = tuple[int, str, tuple[str, ...]]  # line number (from 1), path, labels


class _Columns(NamedTuple):
    """The indices of the columns of a CSV file. label: None if each column is a class. others: the
    names of the columns beside that of the paths.
    """

    path: int
    label: int | None
    others: dict[int, str]


def index_list(
    file: Path | str,
    folder: Path | str,
    classes: Sequence[str] | None = None,
    multilabel: bool = False,
) -> ImageIndex:
    """Index the images that `file` names, in its order, with paths relative to `folder` (or
    absolute).

    A .csv file has the columns that its header names (`PATH_COLUMNS`, `LABEL_COLUMNS`), or only
    two. Another one has `path label` lines, split at the last white space. Labels are of the
    classes in a `classes.txt` next to `file`, else of `classes` (the training classes, for a
    validation list), else name classes themselves: see `resolve_labels`.

    multilabel: an image has several labels with `;` between, or none. In a text file, a line that
    ends in the name of an image has none. A CSV file whose header names at least two columns beside
    that of the paths, and none of `LABEL_COLUMNS`, has a column of 0 and 1 for each class.

    Raises DataError with file and line for a malformed line, a label that is unknown or out of
    range, and a first image that is missing.
    """
    file = Path(file)
    folder = Path(folder)
    rows, columns = _read_rows(file, folder, multilabel)
    if not rows:
        raise DataError(f"{file}: no images in it.", "Write one `path label` line for each image.")
    labels = {label for _, _, labels in rows for label in labels} | {*columns}
    if not labels | {*(classes or ())}:
        raise DataError(f"{file}: no image has a label.", "Write `path label;label` lines.")
    class_file = file.with_name("classes.txt")
    if columns and not class_file.is_file():
        classes = classes or columns  # in their order
    target_of, names = resolve_labels(labels, classes, file, class_file)
    labels_of: dict[str, tuple[str, ...]] = {}
    for number, path, image_labels in [(1, "", columns), *rows]:
        unknown = [label for label in image_labels if label not in target_of]
        if unknown:
            raise DataError(
                f"{file}:{number}: label {format_value(unknown[0])} is neither one of the "
                f"{len(names)} classes nor a number from 0 to {len(names) - 1}"
                f"{did_you_mean(unknown[0], names)}.",
                "Correct the list, or list all classes, one per line, in a classes.txt next to the "
                "training list.",
            )
        first = labels_of.setdefault(path, image_labels)
        if first is not image_labels and {*first} != {*image_labels}:
            raise DataError(
                f"{file}:{number}: an earlier line has other labels for {format_value(path)}.",
                "Write one line for each image; several labels of it with `;` between, and "
                "data.labels=multi.",
            )
    suffix = _missing_suffix(rows[0], file, folder)
    paths = np.array([os.fsencode(path) + suffix for _, path, _ in rows])
    if multilabel:
        classes_of = [[target_of[label] for label in labels] for _, _, labels in rows]
        targets = multi_hot(classes_of, len(names))
    else:
        targets = np.array([target_of[label] for _, _, (label,) in rows], np.int64)
    return ImageIndex(folder, paths, targets, names)


def _missing_suffix(row: _Row, file: Path, folder: Path) -> bytes:
    """What is missing in the path of a row, as in the ids of Kaggle's lists: `000` for 000.jpg;
    empty if it is whole. Raises DataError if there is no such image, or there are several.
    """
    number, path, _ = row  # to look for all images takes minutes on a network disk
    found = _suffixes(folder / path)
    if b"" in found or len({suffix.lower() for suffix in found}) == 1:
        return found[0]
    if found:
        raise DataError(
            f"{file}:{number}: {folder / path} may be {b' or '.join(found).decode()}.",
            "Write the paths with their suffixes.",
        )
    raise DataError(
        f"{file}:{number}: no image {folder / path}.",
        f"Paths in a list are relative to data.root, {folder}: correct the paths or data.root, or "
        "name their column in a CSV file `path`.",
    )


def _suffixes(path: Path) -> list[bytes]:
    """What makes a path that of a file: nothing, or suffixes of images."""
    suffixes = sorted(IMAGE_SUFFIXES)
    choices = (b"", *suffixes, *map(bytes.upper, suffixes))
    return [suffix for suffix in choices if os.path.isfile(os.fsencode(path) + suffix)]  # noqa: PTH113 (pathlib raises for names that no file can have)


def _read_rows(file: Path, folder: Path, multilabel: bool) -> tuple[list[_Row], tuple[str, ...]]:
    """The rows of an annotation file, without blank lines, and the names of its columns of 0 and 1,
    if it has such. folder: that paths are relative to. Raises DataError for a line that does not
    parse.
    """
    text = read_text(file, LIST_REMEDY)
    if file.suffix.lower() in (".csv", ".tsv"):
        return _csv_rows(file, text, folder, multilabel)
    rows: list[_Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.strip().rsplit(maxsplit=1)
        if multilabel and parts and suffix_of(os.fsencode(parts[-1])) in IMAGE_SUFFIXES:
            rows.append((number, line.strip(), ()))
            continue
        if len(parts) == 1 or (multilabel and parts and parts[0].endswith(";")):
            raise DataError(
                f"{file}:{number}: {format_value(line.strip())} is not `path label`.",
                "Add the image's class; labels have no spaces here, but may have in a CSV file.",
            )
        if parts:
            labels = split_labels(parts[1]) if multilabel else (parts[1],)
            rows.append((number, parts[0], labels))
    return rows, ()


def _csv_lines(file: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """The line number and the cells of each row that is not blank. Raises DataError."""
    first = text.partition("\n")[0]
    delimiter = next((mark for mark in "\t,;" if mark in first), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for line in reader:
            cells = [cell.strip() for cell in line]
            if any(cells):
                yield reader.line_num, cells
    except csv.Error as error:  # such as a quote that is never closed
        raise DataError(
            f"{file}:{reader.line_num}: not CSV: {error}.", "Look for a missing quote."
        ) from None


def _csv_rows(
    file: Path, text: str, folder: Path, multilabel: bool
) -> tuple[list[_Row], tuple[str, ...]]:
    """As `_read_rows`, of a CSV file; its header is a first line without the name of an image."""
    rows: list[_Row] = []
    columns = _Columns(path=0, label=1, others={})
    width = 2  # of a row, at most
    lines = _csv_lines(file, text)
    first_line, header = next(lines, (1, []))
    is_named = not {*PATH_COLUMNS, *LABEL_COLUMNS}.isdisjoint(map(str.lower, header))
    has_image = any(map(has_image_suffix, header))
    if header and not has_image and (is_named or not _suffixes(folder / header[0])):
        columns = _find_columns(header, multilabel, f"{file}:{first_line}")
        width = len(header)
    elif header:
        lines = chain([(first_line, header)], lines)
    values: dict[int, set[str]] = {i: set() for i in columns.others}
    for number, cells in lines:
        where = f"{file}:{number}"
        path = cells[columns.path] if columns.path < len(cells) else ""
        label = ""
        if columns.label is not None and columns.label < len(cells):
            label = cells[columns.label]
        for i, found in values.items():
            if i < len(cells) and len(found) <= _MAX_PARTS:
                found.add(cells[i].lower())
        if not path or not (label or multilabel) or any(cells[width:]):
            raise DataError(
                f"{where}: {format_value(','.join(cells))} is not `path,label`.",
                "Give both, with a comma between, or a header. Several labels, with `;` between, "
                "or none need data.labels=multi.",
            )
        labels: tuple[str, ...] = (label,)
        if columns.label is None:
            labels = _labels_of_columns(cells, columns.others, where)
        elif multilabel:
            labels = split_labels(label)
        rows.append((number, path, labels))
    if columns.label is None:
        return rows, tuple(columns.others.values())
    for i, name in columns.others.items():
        may_tell = may_be_parts(values[i]) or _PART_COLUMN.search(name)
        if i != columns.label and 1 < len(values[i]) <= _MAX_PARTS and may_tell:
            raise DataError(
                f"{file}: the column {format_value(name)} tells the part of each image.",
                "Write a list for each part, and name them in data.train and data.val; or delete "
                "the column.",
            )
    return rows, ()


def _find_columns(header: Sequence[str], multilabel: bool, where: str) -> _Columns:
    """The columns that a header names. Raises DataError for a header that does not tell them.

    The paths are in the first of `PATH_COLUMNS` that is there, else in the first column. Without a
    column of labels (`LABEL_COLUMNS`), the only column beside that of the paths has them; with
    `multilabel` several columns are those of classes. A first column without a name is ignored:
    pandas writes row numbers there. where: file and line, for messages.
    """
    names = [name.lower() for name in header]
    path = next((names.index(name) for name in PATH_COLUMNS if name in names), 0 if names[0] else 1)
    label_columns = [i for i, name in enumerate(names) if name in LABEL_COLUMNS]
    if len(label_columns) > 1:
        raise DataError(
            f"{where}: the columns {join_names([header[i] for i in label_columns])} may all have "
            "the labels.",
            "Delete or rename all but one.",
        )
    label = next(iter(label_columns), None)
    others = {i: name for i, name in enumerate(header) if (name or i) and i != path}
    if label is not None or len(others) < 2:
        only = next(iter(others), len(header))
        return _Columns(path, only if label is None else label, others)
    if not multilabel:
        raise DataError(
            f"{where}: the header {format_value(','.join(header))} does not tell which column has "
            "the labels.",
            f"Name it {LABEL_COLUMNS[0]}. If each column is a class, with 0 or 1 for an image, set "
            "data.labels=multi.",
        )
    for name, count in Counter(others.values()).items():
        if count > 1 or not name or ";" in name:
            raise DataError(
                f"{where}: {format_value(name)} is no name of a class, or two columns have it.",
                "Give each column of 0 and 1 its own name, without `;`.",
            )
    return _Columns(path, None, others)


def _labels_of_columns(
    cells: Sequence[str], class_columns: dict[int, str], where: str
) -> tuple[str, ...]:
    """The classes of a row of 0 and 1. Raises DataError for another value.

    where: file and line, for messages.
    """
    labels = []
    for column, name in class_columns.items():
        value = cells[column] if column < len(cells) else ""
        if value not in _ZERO_OR_ONE:
            raise DataError(
                f"{where}: {format_value(value)} in column {format_value(name)} is not 0 or 1.",
                "Write 1 where the image has the class, else 0; or one column, `labels`, with the "
                "names of the classes and `;` between.",
            )
        if value.startswith("1"):
            labels.append(name)
    return tuple(labels)


def read_bad_images(path: Path) -> set[str]:
    """The paths of bad images: relative to the dataset's root, with `/` between folders, or
    absolute.

    A line has a path, perhaps followed by a tab and the reason. Raises DataError.
    """
    verify = f"{command_line('verify-data')} DATA_ROOT --out {shlex.quote(str(path))}"
    text = read_text(path, f"Correct data.exclude, or make the list: {verify}")
    return {line.partition("\t")[0] for line in text.split("\n") if line.strip()}


def bad_rows(paths: Sequence[str], root: Path, path: Path, part: str) -> list[int]:
    """The positions of the images of a part that the list at `path` names. (An annotation file may
    name an image twice.)

    paths: see `ImageIndex.full_paths`. root: the folder of the dataset, to which relative paths in
    the list belong. part: its name in messages. Raises DataError for more than 1 % of the images or
    10, whichever is more, and for more than a tenth or 3, whichever is more.
    """
    data_root = os.path.abspath(root)  # noqa: PTH100
    names = read_bad_images(path)
    bad = {os.path.normpath(os.path.join(data_root, name)) for name in names}  # noqa: PTH118
    rows = [i for i, full_path in enumerate(paths) if full_path in bad]
    count = len(paths)
    # More bad images have a cause, such as a broken disk or the list of another dataset.
    most = max(count // 100, min(count // 10, 10), 3)
    if len(rows) > most:
        verify = f"{command_line('verify-data')} DATA --out {shlex.quote(str(path))}"
        raise DataError(
            f"{path} (data.exclude): names {len(rows)} of {count} {part} images, and at most "
            f"{most} may be left out.",
            f"Replace or delete some of them, and list the bad images again: {verify}",
        )
    return rows
