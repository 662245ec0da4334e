"""Index images in tar and zip archives.

The archives hold class folders or are WebDataset shards, which have `KEY.jpg` and `KEY.cls` or
`KEY.json`. Members are listed once, and then read by their offsets.
"""

import contextlib
import glob
import json
import os
import re
import time
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from itertools import chain
from pathlib import Path

import numpy as np

from imagenet_cls.data.archive_files import (
    ByteRanges,
    Member,
    archive_members,
    archive_status,
    decode_name,
    open_archive,
)
from imagenet_cls.data.classes import resolve_labels
from imagenet_cls.data.index import (
    IMAGE_SUFFIXES,
    PREPARE_COMMAND,
    ImageIndex,
    index_scan,
    is_hidden,
    list_folder,
    suffix_of,
)
from imagenet_cls.data.index_cache import Scan, open_status, read_scan, write_scan
from imagenet_cls.data.targets import multi_hot, split_labels
from imagenet_cls.errors import DataError
from imagenet_cls.text import format_value, join_names

_JSON_LABELS = ("label", "cls", "class", "class_name", "category", "labels", "target")
_NUMBER_RANGE = re.compile(r"\{(\d{1,6})\.\.(\d{1,6})\}")  # {0000..1023}
_THREADS = 16  # they wait for the disk
_MAX_MEMBER_BYTES = 1 << 30  # a damaged zip may claim any size
_LAYOUT_REMEDY = (
    f"Name the images CLASS/NAME.jpg (ImageNet's archives: {PREPARE_COMMAND}); or, in a WebDataset "
    "shard, KEY.jpg, each with its label in KEY.cls, or as `label` in KEY.json."
)
_PLAIN_REMEDY = (
    "Make the archive again: zip -0 -r, or GNU tar with --dereference --hard-dereference and "
    "without --sparse."
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
    return name.lower().endswith((".tar", ".zip"))


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
    listed = [os.fsencode(os.path.abspath(path)) for path in archives]  # noqa: PTH100 (keeps links)
    scan = read_scan(part_path, listed)
    if scan is None:
        started = time.time()
        part_folder = os.fsencode(os.path.normpath(part)) if root.is_file() else b"."
        scan = _scan_archives(part_path, part_folder, archives, _open_statuses(listed))
        write_scan(part_path, scan, started)
    statuses = tuple(archive_status(scan.statuses[path]) for path in listed)
    byte_ranges = ByteRanges(tuple(map(str, archives)), statuses, scan.places)
    index = index_scan(scan, part_path, byte_ranges)
    if not scan.are_shards:
        return index
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
    for number, own in enumerate(labels_of):
        for label in own:
            if label not in target_of:
                image = index.describe(int(np.argmax(index.targets == number)))
                raise DataError(
                    f"{image}: its label {format_value(label)} is none of the {len(names)} "
                    "classes.",
                    f"Correct the shards, or list all classes, one per line, in {class_file}; for "
                    "several labels or none set data.labels=multi",
                )
    if not names:
        raise DataError(f"{index.root}: no image has a label.", _LAYOUT_REMEDY)
    classes_of = [[target_of[label] for label in own] for own in labels_of]
    rows = multi_hot(classes_of, len(names)) if multilabel else np.concatenate(classes_of)
    targets = rows[index.targets]
    return replace(index, targets=targets, classes=names)


def index_members(root: Path, archives: Sequence[Path]) -> ImageIndex:
    """Index all images in archives, without classes. root: of the index. Raises DataError."""
    scans = _scan_each(archives, have_classes=False)
    statuses = tuple(archive_status(path.stat()) for path in archives)
    places = np.concatenate([scan.places for scan in scans])
    byte_ranges = ByteRanges(tuple(map(str, archives)), statuses, places)
    names = np.array([name for scan in scans for name in scan.names], bytes)
    unread = Counter(suffix_of(name) for scan in scans for name in scan.others)
    return ImageIndex(root, names, np.zeros(len(names), np.int64), (), byte_ranges, unread)


def part_folders(archive: Path) -> list[str]:
    """The folders in an archive that hold class folders, such as `train` and `val`: at the top, or
    in the only folder there. Raises DataError.
    """
    names = index_members(archive, [archive]).names.tolist()
    folders = {name.rpartition(b"/")[0] for name in names}
    prefix = _prefix_of_classes(folders, b".")
    parts = [folder.removeprefix(prefix).partition(b"/") for folder in folders]
    return sorted({os.fsdecode(top) for top, _, deeper in parts if deeper})


@dataclass(eq=False)
class _ArchiveScan:
    """The images of an archive, in its order.

    labels: of each image of a shard; None for images that are in class folders. places: see
    `ByteRanges`. others: paths of files that are neither images nor labels.
    """

    names: list[bytes]
    labels: list[bytes] | None
    places: np.ndarray
    others: list[bytes]


def _open_statuses(paths: Sequence[bytes]) -> dict[bytes, os.stat_result]:
    try:
        return {path: open_status(path) for path in paths}
    except OSError as error:
        raise DataError(
            f"{os.fsdecode(error.filename)}: {error.strerror}.",
            "Check the path and its permissions.",
        ) from None


def _scan_archives(
    part_path: Path,
    part_folder: bytes,
    archives: Sequence[Path],
    statuses: Mapping[bytes, os.stat_result],
) -> Scan:
    """List the archives, and combine their images into one scan: class folders in sorted order, or
    shards in theirs.

    part_folder: see `_prefix_of_classes`.
    """
    scans = _scan_each(archives)
    have_labels = [scan.labels is not None for scan in scans if scan.names]
    if not have_labels:
        raise DataError(f"{part_path}: it contains no images.", _LAYOUT_REMEDY)
    if any(have_labels) != all(have_labels):
        count = have_labels.count(False)
        raise DataError(
            f"{part_path}: {count} of {len(have_labels)} archives have no labels.", _LAYOUT_REMEDY
        )
    names = np.concatenate([np.array(scan.names, bytes) for scan in scans])
    places = np.concatenate([scan.places for scan in scans])
    others = list(chain.from_iterable(scan.others for scan in scans))
    if have_labels[0]:
        label_of_image = list(chain.from_iterable(scan.labels or () for scan in scans))
        labels = sorted(set(label_of_image))
        label_to_idx = {label: i for i, label in enumerate(labels)}
        label_index = np.array([label_to_idx[label] for label in label_of_image], np.int32)
        return Scan(
            list(map(os.fsdecode, labels)),
            label_index,
            names,
            Counter(map(suffix_of, others)),
            statuses,
            places,
            are_shards=True,
        )
    del scans  # frees the names as Python objects
    return _scan_of_folders(part_path, part_folder, names, places, others, statuses)


def _scan_of_folders(
    part_path: Path,
    part_folder: bytes,
    names: np.ndarray,
    places: np.ndarray,
    others: Sequence[bytes],
    statuses: Mapping[bytes, os.stat_result],
) -> Scan:
    """The scan of images in class folders, in the order of `index_folder`.

    part_folder: see `_prefix_of_classes`. names, places: of all images in the archives. others: the
    paths of the other files. Raises DataError, also for a repeated name.
    """
    folders = [name[: max(name.rfind(b"/"), 0)] for name in names.tolist()]
    prefix = _prefix_of_classes(set(folders), part_folder)
    class_of = {
        folder: os.fsdecode(folder.removeprefix(prefix).partition(b"/")[0])
        for folder in set(folders)
        if folder and folder.startswith(prefix)
    }
    if not class_of:
        found = join_names(sorted({decode_name(folder.partition(b"/")[0]) for folder in folders}))
        raise DataError(
            f"{part_path}: the images have neither labels nor class folders; they are in "
            f"{found or 'no folder'}.",
            _LAYOUT_REMEDY,
        )
    classes = sorted(set(class_of.values()))
    class_to_idx = {name: i for i, name in enumerate(classes)}
    in_order = sorted(class_of, key=lambda folder: (class_of[folder], folder))
    class_index = np.array([class_to_idx[class_of[folder]] for folder in in_order], np.int32)
    position_of = {folder: i for i, folder in enumerate(in_order)}
    positions = np.array([position_of.get(folder, -1) for folder in folders])
    del folders  # frees them before the names are Python objects, too
    order = np.lexsort((names, positions))
    order = order[np.count_nonzero(positions < 0) :]  # without those outside of `prefix`
    equal = np.flatnonzero(names[order[1:]] == names[order[:-1]])
    if len(equal):
        repeated = decode_name(names[order[equal[0]]])
        raise DataError(f"{part_path}: it contains {repeated} twice.", "Make the archive again.")
    return Scan(
        classes,
        class_index[positions[order]],
        np.array([name[len(prefix) :] for name in names[order].tolist()]),
        Counter(suffix_of(name) for name in others if name.startswith(prefix)),
        statuses,
        places[order],
    )


def _scan_each(archives: Sequence[Path], have_classes: bool = True) -> list[_ArchiveScan]:
    """List the images of each archive, in several threads.

    Where several tars have no class folders, each is a class. have_classes: the classes are needed.
    Raises DataError.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        scans = list(pool.map(_scan_archive, archives, range(len(archives))))
    if len(archives) > 1:
        for path, scan in zip(archives, scans, strict=True):
            # images at the top of a tar of one class, which may also have folders
            if scan.labels is None and any(b"/" not in name for name in scan.names):
                others = set(scan.others)
                has_text = any(name[: name.rfind(b".")] + b".txt" in others for name in scan.names)
                if have_classes and has_text:
                    raise DataError(
                        f"{path}: a shard with texts (.txt) and no labels.", _LAYOUT_REMEDY
                    )
                stem = os.fsencode(path.stem)
                scan.names = [b"%b/%b" % (stem, name) for name in scan.names]
    return scans


def _scan_archive(path: Path, archive_index: int) -> _ArchiveScan:
    """List the images of an archive, and read the labels of a shard. Raises DataError.

    archive_index: of the archive in the list of archives.
    """
    # WebDataset shards are tars. `_read_label` does not decompress members of a zip.
    label_suffixes = () if path.name.lower().endswith(".zip") else (b".cls", b".json")
    names: list[bytes] = []
    places = array("q")
    label_files: dict[bytes, Member] = {}
    others: list[bytes] = []
    with open_archive(str(path)) as file:
        for member in archive_members(file):
            parts = _parts(member.name)
            if any(map(is_hidden, parts)):
                continue
            name = b"/".join(parts)
            suffix = suffix_of(name)
            if suffix in IMAGE_SUFFIXES:
                _check_member(file.name, name, member)
                names.append(name)
                places.extend((archive_index, member.offset, member.size, member.compressed))
            elif suffix in label_suffixes:
                label_files[name] = member
            else:
                others.append(name)
        labels = _labels(file, names, label_files)
    placed = np.array(places, np.int64).reshape(-1, 4)
    if labels is None:
        return _ArchiveScan(names, None, placed, [*others, *label_files])
    kept = [i for i, label in enumerate(labels) if label is not None]
    return _ArchiveScan(
        [names[i] for i in kept],
        [label for label in labels if label is not None],
        placed[kept],
        others,
    )


def _parts(name: bytes) -> list[bytes]:
    return [part for part in name.split(b"/") if part not in (b"", b".")]


def _check_member(path: str, name: bytes, member: Member) -> None:
    """Raise DataError for a member that can't be read from its archive, or is too large."""
    problem = member.problem
    remedy = _PLAIN_REMEDY
    if max(member.size, member.compressed) > _MAX_MEMBER_BYTES:
        problem = f"has {member.size} bytes, more than {_MAX_MEMBER_BYTES}"
        remedy = "Make the archive again without it."
    if problem is not None:
        raise DataError(f"{path}: {decode_name(name)} {problem}.", remedy)


def _labels(
    file: FileIO, names: Sequence[bytes], label_files: Mapping[bytes, Member]
) -> list[bytes | None] | None:
    """The label of each image of a shard, empty for an empty .cls; None for further images of a
    sample, such as `KEY.mask.png`.

    None without labels, and if no image has a label and all are in folders: class folders with
    other files in them. As in WebDataset, a key ends at the first dot of the name.
    label_files: each .cls and .json. Raises DataError.
    """
    if not label_files:
        return None
    labels: list[bytes | None] = []
    keys: list[bytes] = []
    further: list[tuple[bytes, bytes]] = []  # keys and names of further images of samples
    unlabeled: list[bytes] = []
    for name in names:
        dot = name.find(b".", name.rfind(b"/") + 1)
        key = name[:dot]
        label = None
        if name[dot:].lower() in IMAGE_SUFFIXES:
            keys.append(key)
            label = _read_label(file, key, label_files)
            if label is None:
                unlabeled.append(key)
        else:
            further.append((key, name))
        labels.append(label)
    has_labels = any(label is not None for label in labels) or any(
        _read_label(file, key, label_files) is not None for key, _ in further
    )
    if not has_labels and all(b"/" in name for name in names):
        return None
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if repeated:
        raise DataError(
            f"{file.name}: two images have the key {decode_name(repeated[0])}.",
            "Give each sample its own key.",
        )
    if unlabeled:
        sample = decode_name(unlabeled[0])
        raise DataError(
            f"{file.name}: the sample {sample} has no label.",
            f"Add {sample}.cls, or `label` to its .json.",
        )
    samples = set(keys)
    for key, name in further:
        if key not in samples:
            raise DataError(
                f"{file.name}: the image {decode_name(name)} is of no sample: a key ends at the "
                f"first dot, so it is {decode_name(key)}.",
                "Make the shards again with keys without dots.",
            )
    return labels


def _read_label(file: FileIO, key: bytes, label_files: Mapping[bytes, Member]) -> bytes | None:
    """The label of a sample; None if it has none. Of a .cls the whole content, without white space
    around it; of a .json the first of `_JSON_LABELS`, if that is a number, text, or a list of them,
    which gets `;` between.
    """
    is_text = key + b".cls" in label_files
    name = key + (b".cls" if is_text else b".json")
    member = label_files.get(name)
    if member is None:
        return None
    _check_member(file.name, name, member)
    content = os.pread(file.fileno(), member.size, member.offset)
    if is_text:
        return content.strip()
    with contextlib.suppress(ValueError, AttributeError, RecursionError):  # not such a .json
        found = json.loads(content)
        # beside images of class folders, other keys are of metadata
        known = _JSON_LABELS[:2] if b"/" in key else _JSON_LABELS
        values = [found[key] for key in known if key in found][:1]
        labels = values[0] if values and isinstance(values[0], list) else values
        if labels and all(type(label) in (int, float, str) for label in labels):
            numbers = [int(x) if type(x) is float and x.is_integer() else x for x in labels]
            return ";".join(str(number).strip() for number in numbers).encode()
    return None


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
