"""Index images in tar and zip archives.

The archives hold class folders or are WebDataset shards, which have `KEY.jpg` and `KEY.cls`.
Members are listed once, and then read by their offsets.
"""

import glob
import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import FileIO
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from imagenet_cls.data.archive_files import (
    ByteRanges,
    Member,
    archive_members,
    archive_status,
    decode_name,
    is_zip,
    open_archive,
)
from imagenet_cls.data.classes import resolve_labels
from imagenet_cls.data.index import (
    IMAGE_SUFFIXES,
    PREPARE_COMMAND,
    ImageIndex,
    check_level,
    is_hidden,
    list_folder,
    suffix_of,
)
from imagenet_cls.data.targets import multi_hot, split_labels
from imagenet_cls.errors import DataError
from imagenet_cls.text import format_value, join_names

_NUMBER_RANGE = re.compile(r"\{(\d{1,6})\.\.(\d{1,6})\}")  # {0000..1023}
_THREADS = 16  # they wait for the disk
_LAYOUT_REMEDY = (
    f"Name the images CLASS/NAME.jpg (ImageNet's archives: {PREPARE_COMMAND}); or, in a WebDataset "
    "shard (a .tar), KEY.jpg, each with its label in KEY.cls."
)
_PLAIN_REMEDY = (
    "Make the archive again without it, or by zip -0 -r, or by GNU tar with --dereference "
    "--hard-dereference and without --sparse."
)


def find_archives(root: Path, part: str) -> list[Path] | None:
    """The archives that hold a part of a dataset, in order; None if there are none.

    `root/part` is an archive, a folder of archives, or a pattern (`*`, `?`, `{0000..1023}`); or
    `root` is an archive with the folder `part`. Raises DataError for class tars beside class
    folders, unless each tar was unpacked into a folder of its name.
    """
    if os.path.isfile(root):  # noqa: PTH113 (pathlib raises without permission)
        return [root]
    if os.path.isdir(root / part):  # noqa: PTH112
        return _archives_in(root / part)
    paths = _expand(root, part)
    return paths if any(map(os.path.isfile, paths)) else None


def is_archive(name: str) -> bool:
    return name.lower().endswith(".tar") or is_zip(name)


def _archives_in(folder: Path) -> list[Path] | None:
    """The archives directly in a folder, by name; None if it holds folders, or no archive."""
    try:
        content = list_folder(os.fsencode(folder))
    except OSError:  # the caller indexes it as class folders, and raises an error that explains it
        return None
    names = sorted(name for name in map(os.fsdecode, content.others) if is_archive(name))
    archives = [folder / name for name in names]
    if not content.folders:
        return archives or None
    # A tar of a class may have been unpacked beside it, and its images count once.
    folders = set(map(os.fsdecode, content.folders))
    not_unpacked = [
        path.name for path in archives if path.suffix.lower() == ".tar" and path.stem not in folders
    ]
    if not_unpacked:
        raise DataError(
            f"{folder}: holds class folders, and archives that are not unpacked: "
            f"{join_names(not_unpacked)}.",
            "Unpack them, move them elsewhere, or keep the archives only.",
        )
    return None


def _expand(root: Path, pattern: str) -> list[Path]:
    """The files that a pattern names, relative to `root` or absolute, some of which may be
    missing.
    """
    numbers = _NUMBER_RANGE.search(pattern)
    if numbers is None:
        names = glob.glob(pattern, root_dir=root)  # noqa: PTH207 (may be absolute)
        return [root / name for name in sorted(names) or [pattern]]
    first, last = numbers.groups()
    paths = []
    for number in range(int(first), int(last) + 1):
        padded = f"{number:0{len(first)}}"
        paths += _expand(root, _NUMBER_RANGE.sub(padded, pattern, count=1))
    return list(dict.fromkeys(paths))  # 1* names what 10* names, too


def index_archives(
    root: Path,
    part: str,
    archives: Sequence[Path],
    classes: Sequence[str] | None = None,
    multilabel: bool = False,
) -> ImageIndex:
    """Index the images in what `find_archives` found: in the order of class folders on disk, or of
    the shards.

    classes: the training classes, for the labels of shards in a validation part (see
    `resolve_labels`). multilabel: a label of a shard may be several with `;` between, or empty
    for none. Raises DataError.
    """
    part_path = root / part
    lists = _list_each(archives)
    have_labels = [members.labels is not None for members in lists if members.names]
    if not have_labels:
        raise DataError(f"{part_path}: it contains no images.", _LAYOUT_REMEDY)
    if any(have_labels) != all(have_labels):
        count = have_labels.count(False)
        raise DataError(
            f"{part_path}: {count} of {len(have_labels)} archives have no labels.", _LAYOUT_REMEDY
        )
    index = _index_all(part_path, archives, lists)
    if not have_labels[0]:
        others = list(chain.from_iterable(members.others for members in lists))
        del lists  # frees the names as Python objects
        part_folder = os.fsencode(os.path.normpath(part)) if root.is_file() else b"."
        return _with_class_folders(index, part_folder, others)
    texts = list(chain.from_iterable(members.labels or () for members in lists))
    labels, targets = np.unique(np.array(texts, bytes), return_inverse=True)
    index = replace(index, targets=targets, classes=tuple(map(os.fsdecode, labels.tolist())))
    class_file = archives[0].with_name("classes.txt")
    return _with_labels_resolved(index, class_file, classes, multilabel)


def _with_labels_resolved(
    index: ImageIndex, class_file: Path, classes: Sequence[str] | None, multilabel: bool
) -> ImageIndex:
    """The index of shards, whose classes are labels, with the classes that the labels name.

    classes: the training classes, for a validation part. Raises DataError.
    """
    labels_of = [split_labels(text) if multilabel else (text,) for text in index.classes]
    labels = {label for own in labels_of for label in own}
    # In WebDataset `KEY.cls` holds an integer, so that numbers are lines of a classes.txt.
    target_of, names = resolve_labels(
        labels - {""}, classes, index.root, class_file, numbers_are_indices=True
    )
    unknown = sorted(labels.difference(target_of))
    if unknown:
        number = next(number for number, own in enumerate(labels_of) if unknown[0] in own)
        image = index.describe(int(np.argmax(index.targets == number)))
        raise DataError(
            f"{image}: its label {format_value(unknown[0])} is none of the {len(names)} classes.",
            f"Correct the shards, or list all classes, one per line, in {class_file}; for several "
            "labels or none set data.labels=multi",
        )
    if not names:
        raise DataError(f"{index.root}: no image has a label.", _LAYOUT_REMEDY)
    classes_of = [[target_of[label] for label in own] for own in labels_of]
    rows = multi_hot(classes_of, len(names)) if multilabel else np.concatenate(classes_of)
    targets = rows[index.targets]
    return replace(index, targets=targets, classes=names)


def index_members(root: Path, archives: Sequence[Path]) -> ImageIndex:
    """Index all images in archives, without classes. root: of the index. Raises DataError."""
    return _index_all(root, archives, _list_each(archives))


def part_folders(archive: Path) -> list[str]:
    """The folders in an archive that hold class folders, such as `train` and `val`: at the top, or
    in the only folder there. Raises DataError.
    """
    names = index_members(archive, [archive]).names.tolist()
    folders = {name.rpartition(b"/")[0] for name in names}
    prefix = _prefix_of_classes(folders, b".")
    parts = [folder.removeprefix(prefix).partition(b"/") for folder in folders]
    return sorted({os.fsdecode(top) for top, _, deeper in parts if deeper})


class _Members(NamedTuple):
    """The images of an archive, in its order.

    labels: of each image of a shard; None for images that are in class folders. places: see
    `ByteRanges`. others: paths of files that are neither images nor labels. status: of the archive,
    before it was listed.
    """

    names: list[bytes]
    labels: list[bytes] | None
    places: np.ndarray
    others: list[bytes]
    status: tuple[int, ...]


def _index_all(root: Path, archives: Sequence[Path], lists: Sequence[_Members]) -> ImageIndex:
    """All images of archives, in their order, without classes."""
    names = np.concatenate([np.array(members.names, bytes) for members in lists])
    places = np.concatenate([members.places for members in lists])
    statuses = tuple(members.status for members in lists)
    byte_ranges = ByteRanges(tuple(map(str, archives)), statuses, places)
    unread = Counter(suffix_of(name) for members in lists for name in members.others)
    return ImageIndex(root, names, np.zeros(len(names), np.int64), (), byte_ranges, unread)


def _with_class_folders(
    index: ImageIndex, part_folder: bytes, others: Sequence[bytes]
) -> ImageIndex:
    """The images of an index that are in class folders, in the order of `index_folder`.

    part_folder: see `_prefix_of_classes`. others: the paths of the other files. Raises DataError,
    also for a repeated name.
    """
    names = index.names.tolist()
    folders = [name.rpartition(b"/")[0] for name in names]
    prefix = _prefix_of_classes(set(folders), part_folder)
    class_of = {
        folder: os.fsdecode(folder.removeprefix(prefix).partition(b"/")[0])
        for folder in set(folders)
        if folder and folder.startswith(prefix)
    }
    if not class_of:
        found = join_names(sorted({decode_name(folder.partition(b"/")[0]) for folder in folders}))
        raise DataError(
            f"{index.root}: the images have neither labels nor class folders; they are in "
            f"{found or 'no folder'}.",
            _LAYOUT_REMEDY,
        )
    rows = [row for row, folder in enumerate(folders) if folder in class_of]
    rows.sort(key=lambda row: (class_of[folders[row]], folders[row], names[row]))
    below = [names[row].removeprefix(prefix) for row in rows]
    for name, following in pairwise(below):
        if name == following:
            raise DataError(
                f"{index.root}: it contains {decode_name(name)} twice.", "Make the archive again."
            )
    classes = sorted(set(class_of.values()))
    packed = np.array(below)
    check_level(index.root, classes, packed)
    class_to_idx = {name: i for i, name in enumerate(classes)}
    outside = {*range(len(names))}.difference(rows)
    unread = chain(others, (names[row] for row in outside))
    return replace(
        index.select(np.array(rows)),
        names=packed,
        targets=np.array([class_to_idx[class_of[folders[row]]] for row in rows]),
        classes=tuple(classes),
        unread=Counter(suffix_of(name) for name in unread if name.startswith(prefix)),
    )


def _list_each(archives: Sequence[Path]) -> list[_Members]:
    """List the images of each archive, in several threads. Raises DataError."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_list_archive, archives, range(len(archives))))


def _list_archive(path: Path, archive_index: int) -> _Members:
    """List the images of an archive, and read the labels of a shard. Raises DataError.

    archive_index: of the archive in the list of archives.
    """
    names: list[bytes] = []
    places = array("q")
    label_files: dict[bytes, Member] = {}  # by the keys of their samples
    others: list[bytes] = []
    with open_archive(str(path)) as file:
        status = archive_status(os.fstat(file.fileno()))
        for member in archive_members(file):
            parts = [part for part in member.name.split(b"/") if part not in (b"", b".")]
            if any(map(is_hidden, parts)):
                continue
            name = b"/".join(parts)
            suffix = suffix_of(name)
            if suffix in IMAGE_SUFFIXES:
                _check_member(file.name, name, member)
                names.append(name)
                places.extend((archive_index, member.offset, member.size, member.compressed))
            elif suffix == b".cls" and not is_zip(path.name):
                label_files[name[: -len(suffix)]] = member
            else:
                others.append(name)
        labels = _labels(file, names, label_files) if label_files else None
    placed = np.array(places, np.int64).reshape(-1, 4)
    return _Members(names, labels, placed, others, status)


def _check_member(path: str, name: bytes, member: Member) -> None:
    """Raise DataError for a member that can't be read from its archive."""
    if not member.is_plain:
        raise DataError(
            f"{path}: {decode_name(name)} is a link, no plain file, encrypted, or compressed by "
            "another method than deflate.",
            _PLAIN_REMEDY,
        )


def _labels(
    file: FileIO, names: Sequence[bytes], label_files: Mapping[bytes, Member]
) -> list[bytes]:
    """The label of each image of a shard: the content of KEY.cls, without white space around it.
    As in WebDataset, a key ends at the first dot of the name. Raises DataError.
    """
    labels = {}
    for name in names:
        key = name[: name.find(b".", name.rfind(b"/") + 1)]
        member = label_files.get(key)
        if member is None:
            raise DataError(
                f"{file.name}: the image {decode_name(name)} has no label {decode_name(key)}.cls.",
                "Add it. The key of a sample ends at the first dot of the name.",
            )
        if key in labels:
            raise DataError(
                f"{file.name}: two images have the key {decode_name(key)}.",
                "Give each sample its own key, without dots.",
            )
        _check_member(file.name, key + b".cls", member)
        labels[key] = os.pread(file.fileno(), member.size, member.offset).strip()
    return list(labels.values())


def _prefix_of_classes(folders: Collection[bytes], part_folder: bytes) -> bytes:
    """The path above the class folders, with `/` at its end; empty if they are at the top.

    folders: the folders of the images. part_folder: the path of the part, which may be in the only
    folder at the top: `train` gives `train/` for train/cat/1.jpg, and `data/train/` for
    data/train/cat/1.jpg. With `.`, the classes are at the top or in the only folder there: empty
    for cat/1.jpg and dog/1.jpg, `data/` for data/cat/1.jpg.
    """
    tops = {folder.partition(b"/")[0] for folder in folders}
    top = tops.pop() + b"/" if len(tops) == 1 else b""
    if part_folder != b".":
        prefix = part_folder + b"/"
        is_part_at_top = any(folder.startswith(prefix) for folder in folders)
        return prefix if is_part_at_top else top + prefix
    return top if all(b"/" in folder for folder in folders) else b""
