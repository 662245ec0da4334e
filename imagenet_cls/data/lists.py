"""Text files that list images.

Annotation files (`path label` lines, or CSV), and the list of bad images that
`tools/verify_data.py` writes, for `data.exclude`.
"""

import csv
import io
import os
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from imagenet_cls.data.classes import resolve_labels
from imagenet_cls.data.index import IMAGE_SUFFIXES, ImageIndex, suffix_of
from imagenet_cls.data.targets import multi_hot, split_labels
from imagenet_cls.errors import DataError
from imagenet_cls.files import read_text
from imagenet_cls.text import command_line, format_value, join_names

# Names of columns in the header of a CSV file, in lower case.
PATH_COLUMNS = (
    *("path", "file", "filename", "file_name", "image", "image_path", "image_name", "name"),
    *("filepath", "filepaths", "file_path", "img_path", "img"),
    *("id", "image_id", "imageid", "id_code"),  # perhaps row numbers
)
LABEL_COLUMNS = ("label", "class", "class_name", "target", "category", "labels", "classes", "tags")
PART_COLUMNS = (
    *("split", "subset", "partition", "phase", "usage", "data set", "dataset", "set"),
    *("is_valid", "is_val", "is_train", "is_test"),
)
BAD_IMAGES_FILE = "bad_images.txt"
# `data.exclude` may always leave out 3 images, and 10 where they are at most a tenth of the part.
_MIN_EXCLUDABLE = 3
_ALWAYS_EXCLUDABLE = 10
_ZERO_OR_ONE = ("0", "1", "0.0", "1.0")  # in the column of a class
_BINARY = (*_ZERO_OR_ONE, "true", "false")
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
    if not class_file.is_file():
        _check_labels(labels - {*(classes or ())}, file, multilabel)
    target_of, names = resolve_labels(labels, classes, file, class_file)
    for number, _, image_labels in [(1, "", columns), *rows]:
        unknown = [label for label in image_labels if label not in target_of]
        if unknown:
            count = len(labels - target_of.keys())
            raise DataError(
                f"{file}:{number}: label {format_value(unknown[0])} is neither one of the "
                f"{len(names)} classes nor a number from 0 to {len(names) - 1} ({count} labels "
                "are unknown).",
                "Correct the list, or list all classes, one per line, in a classes.txt next to the "
                "training list.",
            )
    suffix = _missing_suffix(rows[0], file, folder)
    paths = np.array([os.fsencode(path) + suffix for _, path, _ in rows])
    if multilabel:
        classes_of = [[target_of[label] for label in labels] for _, _, labels in rows]
        targets = multi_hot(classes_of, len(names))
    else:
        targets = np.array([target_of[label] for _, _, (label,) in rows], np.int64)
    return ImageIndex(folder, paths, targets, names)


def _check_labels(labels: Collection[str], file: Path, multilabel: bool) -> None:
    """Raise DataError for labels that are no names of classes: `nan`, and with multilabel several
    in another form than with `;` between.
    """
    for label in sorted(labels):
        if label.lower() == "nan":
            raise DataError(
                f"{file}: a label is {label}, as pandas writes a missing one.",
                "Delete these rows, or list all classes, one per line, in a classes.txt beside.",
            )
        if multilabel and ("|" in label or label.startswith("[")):
            raise DataError(
                f"{file}: the label {format_value(label)} may be several.",
                "Write them with `;` between: cat;dog",
            )


def _missing_suffix(row: _Row, file: Path, folder: Path) -> bytes:
    """What is missing in the path of a row, as in the ids of Kaggle's lists: `000` for 000.jpg;
    empty if it is whole. Raises DataError if there is no such image.
    """
    number, path, _ = row  # to look for all images takes minutes on a network disk
    for suffix in (b"", *sorted(IMAGE_SUFFIXES)):
        if os.path.isfile(os.fsencode(folder / path) + suffix):  # noqa: PTH113 (pathlib raises for names that no file can have)
            return suffix
    remedy = f"Paths in a list are relative to data.root, {folder}: correct the paths or data.root."
    for below in sorted(folder.glob("*/")):
        if any(os.path.isfile(os.fsencode(below / path) + end) for end in (b"", *IMAGE_SUFFIXES)):  # noqa: PTH113
            remedy = f"It is in {below}: data.root={below} data.train={file.resolve()}"
    raise DataError(f"{file}:{number}: no image {folder / path}.", remedy)


def _read_rows(file: Path, folder: Path, multilabel: bool) -> tuple[list[_Row], tuple[str, ...]]:
    """The rows of an annotation file, without blank lines, and the names of its columns of 0 and 1,
    if it has such. folder: that paths are relative to. Raises DataError for a line that does not
    parse.
    """
    text = read_text(file, LIST_REMEDY)
    if "\0" in text:
        raise DataError(
            f"{file}: not a text file.",
            "Give a list of images in UTF-8, a folder of classes, or a .tar or .zip archive (of a "
            ".tar.gz: gunzip FILE).",
        )
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


def _csv_rows(
    file: Path, text: str, folder: Path, multilabel: bool
) -> tuple[list[_Row], tuple[str, ...]]:
    """As `_read_rows`, of a CSV file; its header is a first line without the name of an image."""
    rows: list[_Row] = []
    columns = _Columns(path=0, label=1, others={})
    is_binary: dict[int, bool] = {}  # of the columns so far: only 0, 1, true and false
    width = 2  # of a row, at most; ignored with one label
    is_first = True
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for line in reader:
            cells = [cell.strip() for cell in line]
            if not any(cells):
                continue
            where = f"{file}:{reader.line_num}"
            if is_first:
                is_first = False
                suffixes = {suffix_of(os.fsencode(cell)) for cell in cells}
                is_image = os.path.isfile(folder / cells[0])  # noqa: PTH113 (as in `index_list`)
                if suffixes.isdisjoint(IMAGE_SUFFIXES) and not is_image:
                    columns = _find_columns(cells, multilabel, where)
                    is_binary = dict.fromkeys(columns.others, True)
                    width = len(cells)
                    continue
            path = cells[columns.path] if columns.path < len(cells) else ""
            label = ""
            if columns.label is not None and columns.label < len(cells):
                label = cells[columns.label]
            for i in columns.others:
                is_binary[i] &= i >= len(cells) or cells[i].lower() in _BINARY
            if not path or not (label or multilabel) or (multilabel and any(cells[width:])):
                raise DataError(
                    f"{where}: {format_value(','.join(cells))} is not `path,label`.",
                    "Give both, with a comma between. Several labels, with `;` between, or none "
                    "need data.labels=multi.",
                )
            labels: tuple[str, ...] = (label,)
            if columns.label is None:
                labels = _labels_of_columns(cells, columns.others, where)
            elif multilabel:
                labels = split_labels(label)
            rows.append((reader.line_num, path, labels))
    except csv.Error as error:  # such as a quote that is never closed
        raise DataError(
            f"{file}:{reader.line_num}: not CSV: {error}.", "Look for a missing quote."
        ) from None
    if columns.label is None:
        return rows, tuple(columns.others.values())
    binary = [i for i in is_binary if is_binary[i]]
    # a single label may stand beside a binary column that is no class, and other columns
    least = 2 if multilabel else max(2, len(is_binary))
    if rows and columns.label in binary and len(binary) >= least:
        name = format_value(columns.others[columns.label])
        raise DataError(
            f"{file}: {len(binary)} columns have 0 and 1, so {name} may have the labels or be a "
            "class.",
            f"If each column is a class, rename {name} and set data.labels=multi; else delete the "
            "other columns.",
        )
    return rows, ()


def _find_columns(header: Sequence[str], multilabel: bool, where: str) -> _Columns:
    """The columns that a header names. Raises DataError for a header that does not tell them.

    Without a column of labels (`LABEL_COLUMNS`), the only column beside that of the paths has them;
    with `multilabel` several columns are those of classes. A first column without a name is
    ignored: pandas writes row numbers there. where: file and line, for messages.
    """
    names = [name.lower() for name in header]
    parts = [header[i] for i, name in enumerate(names) if name in PART_COLUMNS]
    if parts:
        raise DataError(
            f"{where}: the column {format_value(parts[0])} tells the part of each image.",
            "Write a list for each part, without this column, and name them in data.train and "
            "data.val; or delete the column.",
        )
    path = next((names.index(name) for name in PATH_COLUMNS if name in names), 0)
    label_columns = [i for i, name in enumerate(names) if name in LABEL_COLUMNS]
    if len(label_columns) > 1:
        raise DataError(
            f"{where}: the columns {join_names([header[i] for i in label_columns])} may all have "
            "the labels.",
            "Delete or rename all but one.",
        )
    label = next(iter(label_columns), None)
    others = {i: name for i, name in enumerate(header) if (name or i) and i != path}
    if path == label:
        raise DataError(
            f"{where}: the header {format_value(','.join(header))} has no column of paths.",
            f"Name it {PATH_COLUMNS[0]}.",
        )
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
    verify = f"{command_line('verify-data')} DATA_ROOT --out {path}"
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
    most = min(max(count // 100, _ALWAYS_EXCLUDABLE), max(count // 10, _MIN_EXCLUDABLE))
    if len(rows) > most:
        verify = f"{command_line('verify-data')} DATA --out {shlex.quote(str(path))}"
        raise DataError(
            f"{path} (data.exclude): names {len(rows)} of {count} {part} images, and at most "
            f"{most} may be left out.",
            f"Replace or delete some of them, and list the bad images again: {verify}",
        )
    return rows
