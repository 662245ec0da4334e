"""Text files that list images: annotation files (`path label` lines, or CSV), and the list of bad images that
`tools/verify_data.py` writes, for `data.exclude`.
"""

import csv
import io
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archives import find_archives
from imagenet_cls.data.classes import (
    NUMBER,
    chosen_classes,
    join_names,
    label_positions,
    match_classes,
    read_classes,
    read_text,
    targets_by_name,
)
from imagenet_cls.data.index import ImageIndex, check_not_parts, class_folders, is_image
from imagenet_cls.errors import DataError, command_line, format_value

# Names of columns in the header of a CSV file, in lower case.
PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path", "name")
LABEL_COLUMNS = ("label", "class", "class_name", "target", "category")
BAD_IMAGES_FILE = "bad_images.txt"
ALWAYS_EXCLUDABLE = 10  # images of a part, if these are at most a tenth of it
REMEDY = "set data.root, data.train and data.val to the lists"

Row = tuple[int, str, str]  # line number (from 1), path, label


def check_paths(data: DataConfig, subset: bool = False) -> None:
    """Raise DataError for missing folders and lists, classes a level deeper, and other classes in validation.

    subset: the validation folder need not have all classes. Imports no torch.
    """
    root = Path(data.root).expanduser()
    if data.name == "folder":
        folders = [
            part
            for part in (data.train, data.val)
            if part is not None and find_archives(root, part) is None
        ]
        classes = {part: class_folders(root / part) for part in folders}
        if data.train in classes:
            check_not_parts(root / data.train, classes[data.train])
        chosen = chosen_classes(data)
        for part in folders if chosen is not None else folders[1:]:
            if chosen is not None or data.train in classes:
                match_classes(
                    *(classes[part], chosen or classes[data.train], root / part),
                    subset=subset and part != data.train,
                    ignore_others=chosen is not None,
                )
    elif data.name == "list":
        for name in filter(None, (data.train, data.val)):
            read_text(root / name, REMEDY, 1)
    if data.exclude is not None:
        read_bad_images(Path(data.exclude).expanduser())


def index_list(
    file: Path | str, folder: Path | str, classes: Sequence[str] | None = None
) -> ImageIndex:
    """Index the images that `file` names, in its order, with paths relative to `folder` (or absolute).

    A .csv file has the columns that its header names (`PATH_COLUMNS`, `LABEL_COLUMNS`), or the
    first two. Another one has `path label` lines, split at the last white space. Labels are of the
    classes in a `classes.txt` next to `file`, else of `classes` (the training classes, for a
    validation list), else name classes themselves: see `label_positions`. The classes of a
    `classes.txt` are matched to `classes` by name. Raises DataError with file and line for a
    malformed line, a label that is unknown or out of range, and a first image that is missing.
    """
    file, folder = Path(file), Path(folder)
    rows = read_rows(file)
    if not rows:
        raise DataError(f"{file}: no images in it\nwrite one `path label` line for each image")
    class_file = file.with_name("classes.txt")
    own = read_classes(class_file) if class_file.is_file() else None
    targets, names = _targets(file, rows, own or classes)
    if own is not None and classes is not None:
        targets = targets_by_name(targets, names, classes, class_file)
        names = list(classes)
    number, path, _ = rows[0]  # to look for all images takes minutes on a network disk
    if not os.path.isfile(folder / path):  # noqa: PTH113 (pathlib raises for names that no file can have)
        remedy = (
            f"paths in a list are relative to data.root, {folder}: correct the paths or data.root"
        )
        raise DataError(f"{file}:{number}: no image {folder / path}\n{remedy}")
    return ImageIndex(
        folder, np.array([os.fsencode(path) for _, path, _ in rows]), targets, tuple(names)
    )


def read_rows(file: Path) -> list[Row]:
    """The rows of an annotation file, without blank lines. Raises DataError for a line that does not parse."""
    text = read_text(file, REMEDY)
    if file.suffix.lower() == ".csv":
        return _csv_rows(file, text)
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.strip().rsplit(maxsplit=1)
        if len(parts) == 1:
            raise DataError(
                f"{file}:{number}: {format_value(parts[0])} is not `path label`\nadd the image's class"
            )
        if parts:
            rows.append((number, parts[0], parts[1]))
    return rows


def _csv_rows(file: Path, text: str) -> list[Row]:
    rows: list[Row] = []
    reader = csv.reader(io.StringIO(text, newline=""))
    columns = 0, 1
    try:
        for line in reader:
            cells = [cell.strip() for cell in line]
            if not rows and any(cells) and not any(is_image(os.fsencode(cell)) for cell in cells):
                columns = _columns([cell.lower() for cell in cells])
            elif any(cells):
                path, label = (cells[column] if column < len(cells) else "" for column in columns)
                if not path or not label:
                    what = f"{format_value(','.join(cells))} is not `path,label`"
                    raise DataError(
                        f"{file}:{reader.line_num}: {what}\ngive both, with a comma between"
                    )
                rows.append((reader.line_num, path, label))
    except csv.Error as error:  # such as a quote that is never closed
        raise DataError(
            f"{file}:{reader.line_num}: not CSV: {error}\nlook for a missing quote"
        ) from None
    return rows


def _columns(header: list[str]) -> tuple[int, int]:
    """Positions of path and label in a header; the first two columns if it names neither."""
    path = next((header.index(name) for name in PATH_COLUMNS if name in header), 0)
    label = next(
        (header.index(name) for name in LABEL_COLUMNS if name in header), 1 if path == 0 else 0
    )
    return path, label


def _targets(
    file: Path, rows: Sequence[Row], classes: Sequence[str] | None
) -> tuple[np.ndarray, list[str]]:
    """Target of each row, int64 (N,), and the names of the classes."""
    labels = {label for _, _, label in rows}
    position, names = label_positions(labels, classes, file)
    unknown = labels - position.keys()
    if unknown:
        number, _, label = next(row for row in rows if row[2] in unknown)
        is_number, count = NUMBER.fullmatch(label), len(names)
        what = f"out of range 0 to {count - 1}" if is_number else f"not one of the {count} classes"
        raise DataError(
            f"{file}:{number}: label {format_value(label)} is {what} ({len(unknown)} such labels)\n"
            "correct the list, or list all classes, one per line, in a classes.txt next to the training list"
        )
    return np.fromiter((position[label] for _, _, label in rows), np.int64, len(rows)), names


def read_bad_images(path: Path) -> dict[str, str]:
    """Reason of each bad image, by its path: relative to the dataset's root, with `/` between folders, or absolute.

    One image per line: path, tab, reason. Also reads the `verified_images.json` of earlier versions. Raises DataError.
    """
    text = read_text(
        path, f"data.exclude: make it with {command_line('verify-data')} DATA_ROOT --out {path}"
    )
    if text.startswith("{"):
        try:
            return {image["path"]: image["reason"] for image in json.loads(text)["bad"]}
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{path} (data.exclude): not a list that verify-data wrote") from None
    rows = [line.partition("\t") for line in text.split("\n") if line.strip()]
    return {name: reason or "listed" for name, _, reason in rows}


def exclude_images(
    index: ImageIndex,
    root: Path,
    path: Path,
    part: str,
) -> tuple[ImageIndex, str | None]:
    """The images of a part without those in the list at `path`, and a note about them, or None.

    root: the dataset's. part: for messages. Raises DataError for more than 1 % of the images or ten,
    whichever is more, and for more than a tenth.
    """
    rows = _bad_rows(index, root, path)
    if not rows:
        return index, None
    count = len(index)
    most = min(max(count // 100, ALWAYS_EXCLUDABLE), count // 10)
    if len(rows) > most:
        what = f"names {len(rows)} of {count} {part} images, and at most {most} may be left out"
        verify = f"{command_line('verify-data')} DATA --out {shlex.quote(str(path))}"
        remedy = f"replace or delete some of them, and list the bad images again: {verify}"
        raise DataError(f"{path} (data.exclude): {what}\n{remedy}")
    names = join_names([index.name(row) for row in rows])
    note = f"{len(rows)} of {count} {part} images left out by data.exclude: {names}"
    return index.select(np.delete(np.arange(count), rows)), note


def _bad_rows(index: ImageIndex, root: Path, path: Path) -> list[int]:
    """Rows of `index` that the list names. (An annotation file may name an image twice.)"""
    base, start = os.fsencode(os.path.abspath(root)), os.fsencode(os.path.abspath(index.root))  # noqa: PTH100

    def absolute(folder: bytes, name: bytes) -> bytes:
        return os.path.normpath(os.path.join(folder, name))  # noqa: PTH118

    paths = {absolute(base, os.fsencode(name)) for name in read_bad_images(path)}
    # Compared first, since normpath takes seconds for ImageNet.
    file_names = {path.rpartition(b"/")[2] for path in paths}
    rows = [i for i, n in enumerate(index.names.tolist()) if n.rpartition(b"/")[2] in file_names]
    return [i for i in rows if absolute(start, index.names[i]) in paths]
