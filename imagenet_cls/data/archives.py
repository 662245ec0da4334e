"""Index images in tar and zip archives.

The archives hold class folders or are WebDataset shards, which have `KEY.jpg` and `KEY.cls` or
`KEY.json`. ImageNet's own tars are read, too. Members are listed once, and then read by their
offsets.
"""

import contextlib
import glob
import json
import os
import re
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from imagenet_cls.data.archive_files import (
    ByteRanges,
    archive_members,
    archive_status,
    decode_name,
    open_archive,
    tar_members,
)
from imagenet_cls.data.classes import resolve_labels
from imagenet_cls.data.imagenet_labels import labels_beside, validation_labels, wnid_of
from imagenet_cls.data.index import IMAGE_SUFFIXES, ImageIndex, index_scan, list_folder, suffix_of
from imagenet_cls.data.index_cache import Scan, open_status, read_scan, write_scan
from imagenet_cls.errors import DataError
from imagenet_cls.text import format_value, join_names, shorten

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
_NUMBER_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")  # {0000..1023}
_MAX_FILES = 1_000_000
_PATTERN = re.compile(r"[*?\[]|\{\d+\.\.\d+\}")
_THREADS = 16  # they wait for the disk
_MAX_IMAGE_BYTES = 1 << 30  # a damaged zip may claim any size
_LABEL_SUFFIXES = (b".cls", b".json")
_LAYOUT_REMEDY = (
    "Name the images CLASS/NAME.jpg; or, in a WebDataset shard, KEY.jpg, each with its label in "
    "KEY.cls, or as `label` in KEY.json."
)


def find_archives(root: Path, part: str) -> list[Path] | None:
    """The archives that hold a part of a dataset, in order; None if there are none.

    `root/part` is an archive, a folder of archives, or a pattern (`*`, `?`, `{0000..1023}`); or
    `root` is an archive with the folder `part`; or ImageNet's own archive lies in `root`. Raises
    DataError for class tars beside class folders, unless each tar was unpacked into a folder of its
    name.
    """
    if os.path.isfile(root):  # noqa: PTH113 (pathlib raises without permission)
        return [root]
    path = root / part
    if is_archive(path.name) and os.path.isfile(path):  # noqa: PTH113
        return [path]
    if os.path.isdir(path):  # noqa: PTH112
        return _archives_in(path)
    if _PATTERN.search(part):
        paths = _expand(root, part)
        return paths if paths and os.path.isfile(paths[0]) else None  # noqa: PTH113
    own = root / {"train": TRAIN_TAR, "val": VAL_TAR}.get(part, "")
    return [own] if os.path.isfile(own) else None  # noqa: PTH113


def is_archive(name: str) -> bool:
    return name.lower().endswith((".tar", ".zip"))


def _archives_in(folder: Path) -> list[Path] | None:
    """The archives directly in a folder, by name; None if it holds folders, or no archive."""
    try:
        content = list_folder(os.fsencode(folder))
    except OSError:  # the caller indexes it as class folders, and raises an error that explains it
        return None
    names = sorted(name for name in map(os.fsdecode, content.others) if is_archive(name))
    names = [name for name in names if (folder / name).is_file()]
    folders = set(map(os.fsdecode, content.folders))
    tars = [name for name in names if name.lower().endswith(".tar")]
    # A tar of a class may have been unpacked beside it, and its images count once.
    not_unpacked = [name for name in tars if name[:-4] not in folders]
    if folders and not_unpacked:
        raise DataError(
            f"{folder}: holds class folders, and archives that are not unpacked: "
            f"{join_names(not_unpacked)}.",
            "Unpack them, move them elsewhere, or keep the archives only.",
        )
    return None if folders or not names else [folder / name for name in names]


def _expand(root: Path, pattern: str) -> list[Path]:
    """The files that a pattern names, relative to `root` or absolute, some of which may be
    missing.
    """
    numbers = _NUMBER_RANGE.search(pattern)
    if numbers is not None:
        first, last = numbers.groups()
        if int(last) - int(first) >= _MAX_FILES:
            raise DataError(
                f"{root}/{shorten(pattern, 100)} names more than {_MAX_FILES:,} files.",
                "Correct the range.",
            )
        paths = []
        for number in range(int(first), int(last) + 1):
            padded = f"{number:0{len(first)}}"
            paths += _expand(root, _NUMBER_RANGE.sub(padded, pattern, count=1))
        return paths
    names = glob.glob(pattern, root_dir=root)  # noqa: PTH207 (may be absolute)
    return [root / name for name in sorted(names) or [pattern]]


def index_archives(
    root: Path,
    part: str,
    archives: Sequence[Path],
    classes: Sequence[str] | None = None,
) -> ImageIndex:
    """Index the images in what `find_archives` found: in the order of class folders on disk, or of
    the shards.

    classes: the training classes, for the labels of shards in a validation part (see
    `resolve_labels`). Raises DataError.
    """
    part_path = root / part
    paths = [Path(os.path.abspath(path)) for path in archives]  # noqa: PTH100 (keeps links)
    devkit = labels_beside(paths[0]) if archives[0].name == VAL_TAR else None
    listed = paths if devkit is None else [*paths, devkit]
    scan = read_scan(part_path, listed)
    if scan is None:
        started = time.time()
        scan = _scan_archives(root, part, archives, listed, devkit)
        write_scan(part_path, scan, started)
    arrays = dict(scan.arrays)
    label_index = arrays.pop("label_index", None)
    statuses = []
    for path in paths:
        status = scan.statuses[os.fsencode(path)]
        assert status is not None, path  # only folders may have none
        statuses.append(archive_status(status))
    byte_ranges = ByteRanges(tuple(map(str, archives)), tuple(statuses), **arrays)
    if label_index is None:
        return index_scan(scan, part_path, byte_ranges)
    targets = label_index.astype(np.int64)
    index = ImageIndex(part_path, scan.names, targets, (), byte_ranges, scan.unread)
    return _with_labels_resolved(index, scan.labels, archives[0].with_name("classes.txt"), classes)


def _with_labels_resolved(
    index: ImageIndex, labels: Sequence[str], class_file: Path, classes: Sequence[str] | None
) -> ImageIndex:
    """The index of shards, whose targets are indices into `labels`, with targets that are classes.

    classes: the training classes, for a validation part. Raises DataError.
    """
    # In WebDataset `KEY.cls` holds an integer, so that numbers are lines of a classes.txt.
    target_of, names = resolve_labels(
        labels, classes, index.root, class_file, numbers_are_indices=True
    )
    for number, label in enumerate(labels):
        if label not in target_of:
            image = index.describe(int(np.argmax(index.targets == number)))
            raise DataError(
                f"{image}: its label {format_value(label)} is none of the {len(names)} classes.",
                f"Correct the shards, or list all classes, one per line, in {class_file}",
            )
    targets = np.array([target_of[label] for label in labels], np.int64)[index.targets]
    return replace(index, targets=targets, classes=names)


@dataclass(frozen=True)
class _Piece:
    """An archive, or a tar in it: the bytes from `start` to `end` (None: to its end) of `path`.

    archive_index: of the archive in the list of archives. stem: the file name without suffix.
    """

    path: str
    archive_index: int
    stem: bytes
    start: int = 0
    end: int | None = None


@dataclass(eq=False)
class _PieceScan:
    """The images of a piece, in its order.

    groups: the folder of each image, or in a shard its label. offset, size, compressed: see
    `ByteRanges`. others: paths of files that are neither images nor labels.
    """

    names: list[bytes]
    groups: list[bytes]
    is_shard: bool
    offset: np.ndarray
    size: np.ndarray
    compressed: np.ndarray
    others: list[bytes]

    def put_into(self, folders: Sequence[bytes]) -> None:
        """Put a folder before the path of each image."""
        self.names = [b"%b/%b" % pair for pair in zip(folders, self.names, strict=True)]
        self.groups = _folders_of(self.names)


def _scan_archives(
    root: Path, part: str, archives: Sequence[Path], listed: Sequence[Path], devkit: Path | None
) -> Scan:
    """List the archives, and combine their images into one scan: class folders in sorted order, or
    shards in theirs.
    """
    part_path = root / part
    statuses: dict[bytes, os.stat_result | None] = {}
    for path in map(os.fsencode, listed):
        try:
            statuses[path] = open_status(path)
        except OSError as error:
            raise DataError(
                f"{os.fsdecode(path)}: {error.strerror}.",
                "Check data.root, data.train and data.val, and the permissions.",
            ) from None
    pieces, scans = _scan_pieces(archives)
    _add_class_folders(pieces, scans, devkit)
    are_shards = [scan.is_shard for scan in scans if scan.names]
    if not are_shards:
        raise DataError(f"{part_path}: it contains no images.", _LAYOUT_REMEDY)
    if any(are_shards) != all(are_shards):
        count = are_shards.count(False)
        raise DataError(
            f"{part_path}: {count} of {len(are_shards)} archives have no labels.", _LAYOUT_REMEDY
        )
    names = np.concatenate([np.array(scan.names, bytes) for scan in scans])
    groups, group_of_image = _unique([group for scan in scans for group in scan.groups])
    archive_indices = np.array([piece.archive_index for piece in pieces], np.uint32)
    arrays = {
        "archive_index": np.repeat(archive_indices, [len(scan.names) for scan in scans]),
        "offset": np.concatenate([scan.offset for scan in scans]),
        "size": np.concatenate([scan.size for scan in scans]),
        "compressed": np.concatenate([scan.compressed for scan in scans]),
    }
    others = [name for scan in scans for name in scan.others]
    del scans  # frees all names, which they hold as Python objects
    if are_shards[0]:
        arrays["label_index"] = group_of_image
        unread = Counter(map(suffix_of, others))
        labels = list(map(os.fsdecode, groups))
        return Scan(labels, [], names, unread, statuses, arrays)
    part_folder = os.fsencode(os.path.normpath(part)) if root.is_file() else b"."
    prefix = _prefix_of_classes(groups, part_folder)
    classes, counts, order = _order_of_folders(part_path, prefix, groups, group_of_image, names)
    names = names[order]
    equal = np.flatnonzero(names[1:] == names[:-1])
    if len(equal):
        repeated = decode_name(names[equal[0]])
        raise DataError(f"{part_path}: it contains {repeated} twice.", "Make the archive again.")
    if prefix:
        names = np.array([name[len(prefix) :] for name in names.tolist()])
    unread = Counter(suffix_of(name) for name in others if name.startswith(prefix))
    arrays = {key: values[order] for key, values in arrays.items()}
    return Scan(classes, counts, names, unread, statuses, arrays)


def _add_class_folders(
    pieces: Sequence[_Piece], scans: Sequence[_PieceScan], devkit: Path | None
) -> None:
    """Put the class before the path of each image, where the devkit or the name of a tar tells
    it.
    """
    if devkit is not None:
        wnids = validation_labels(devkit)
        for scan in scans:
            scan.put_into([wnid_of(wnids, os.fsdecode(name)).encode() for name in scan.names])
    elif len(pieces) > 1:
        for piece, scan in zip(pieces, scans, strict=True):
            if b"" in scan.groups and not scan.is_shard:  # images at the top of a tar of one class
                scan.put_into([piece.stem] * len(scan.names))


def _scan_pieces(archives: Sequence[Path]) -> tuple[list[_Piece], list[_PieceScan]]:
    """List all archives, in several threads, with a progress bar on a terminal."""
    from rich.console import Console  # most runs have the list in the cache
    from rich.progress import track

    console = Console(stderr=True)
    with ThreadPoolExecutor(_THREADS) as pool:
        pieces = []
        for found in pool.map(_pieces, archives, range(len(archives))):
            pieces += found
        scans = track(
            pool.map(_scan_piece, pieces),
            "listing archives",
            len(pieces),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        return pieces, list(scans)


def _pieces(path: Path, archive_index: int) -> list[_Piece]:
    """The whole archive; of a tar of tars, as ImageNet's, each inner tar, so that several threads
    read it. Files beside the inner tars are ignored.
    """
    whole = _Piece(str(path), archive_index, os.fsencode(path.stem))
    if path.suffix.lower() == ".zip":
        return [whole]
    with open_archive(whole.path) as file:
        members = tar_members(file, whole.path)
        first = next(members, None)
        if first is None or not first.name.endswith(b".tar"):
            return [whole]
        tars = [member for member in (first, *members) if member.name.endswith(b".tar")]
    pieces = []
    for tar in tars:
        stem = tar.name.rpartition(b"/")[2][:-4]
        end = tar.offset + tar.size
        pieces.append(_Piece(whole.path, archive_index, stem, tar.offset, end))
    return pieces


def _scan_piece(piece: _Piece) -> _PieceScan:
    """List the images of a piece, and read the labels of a shard. Raises DataError."""
    names: list[bytes] = []
    offset = array("q")
    size = array("I")
    compressed = array("I")
    label_files: dict[bytes, tuple[int, int]] = {}
    others: list[bytes] = []
    with open_archive(piece.path) as file:
        for member in archive_members(file, piece.path, piece.start, piece.end):
            suffix = suffix_of(member.name)
            is_image = suffix in IMAGE_SUFFIXES
            # WebDataset shards are tars. `_read_label` does not decompress members of a zip.
            is_label = suffix in _LABEL_SUFFIXES and not piece.path.lower().endswith(".zip")
            if not is_image and not is_label:
                others.append(member.name)
                continue
            name = _checked_name(member.name, piece.path)
            if not name:
                continue
            if is_label:
                label_files[name] = member.offset, member.size
                continue
            if member.problem is not None:
                raise DataError(
                    f"{piece.path}: {decode_name(name)} {member.problem}.", member.remedy
                )
            if max(member.size, member.compressed) > _MAX_IMAGE_BYTES:
                raise DataError(
                    f"{piece.path}: {decode_name(name)} has {member.size} bytes, more than "
                    f"{_MAX_IMAGE_BYTES}.",
                    "Make the archive again without it.",
                )
            names.append(name)
            offset.append(member.offset)
            size.append(member.size)
            compressed.append(member.compressed)
        labels = _labels(file, piece.path, names, label_files) if label_files else []
    arrays = np.asarray(offset), np.asarray(size), np.asarray(compressed)
    others = [name.removeprefix(b"./") for name in others]
    others = [name for name in others if b"/." not in b"/" + name]
    if not any(labels):
        others += label_files
        return _PieceScan(names, _folders_of(names), False, *arrays, others)
    kept = [i for i, label in enumerate(labels) if label is not None]
    offsets, sizes, compressed_sizes = (values[kept] for values in arrays)
    return _PieceScan(
        [names[i] for i in kept],
        [label for label in labels if label is not None],
        True,
        offsets,
        sizes,
        compressed_sizes,
        others,
    )


def _folders_of(names: Sequence[bytes]) -> list[bytes]:
    """The folder of each path, empty for none. Equal ones are one object, to save memory."""
    folders: dict[bytes, bytes] = {}
    found = (name[: max(name.rfind(b"/"), 0)] for name in names)
    return [folders.setdefault(folder, folder) for folder in found]


def _unique(values: Sequence[bytes]) -> tuple[list[bytes], np.ndarray]:
    """The different values, in the order in which they appear, and the index of each value: int32
    (N,).
    """
    index_of: dict[bytes, int] = {}
    indices = [index_of.setdefault(value, len(index_of)) for value in values]
    return list(index_of), np.array(indices, np.int32)


def _checked_name(name: bytes, path: str) -> bytes:
    """A member's path without `.` in it; empty for a hidden file. Raises DataError for one that
    leads elsewhere.
    """
    parts = name.split(b"/")
    if name.startswith(b"/") or b".." in parts:
        raise DataError(
            f"{path}: the member {decode_name(name)} has an absolute path, or one with `..`.",
            "Make the archive again with paths relative to the folder that holds the classes.",
        )
    parts = [part for part in parts if part not in (b"", b".")]
    return b"" if any(part.startswith(b".") for part in parts) else b"/".join(parts)


def _labels(
    file: int, path: str, names: Sequence[bytes], label_files: Mapping[bytes, tuple[int, int]]
) -> list[bytes | None]:
    """The label of each image of a shard; None for further images of a sample, such as
    `KEY.mask.png`.

    Empty if no image has a label, and all are in folders: class folders with other files in them.
    As in WebDataset, a key ends at the first dot of the name.

    label_files: offset and size of each .cls and .json. Raises DataError.
    """
    labels: list[bytes | None] = []
    keys: list[bytes] = []
    unlabeled: list[bytes] = []
    for name in names:
        dot = name.find(b".", name.rfind(b"/") + 1)
        key = name[:dot]
        label = None
        if name[dot:].lower() in IMAGE_SUFFIXES:
            keys.append(key)
            label = _read_label(file, key, label_files)
            if not label:
                unlabeled.append(key)
        labels.append(label)
    if not any(labels) and all(b"/" in name for name in names):
        return []
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if repeated:
        raise DataError(
            f"{path}: two images have the key {decode_name(repeated[0])}.",
            "Give each sample its own key.",
        )
    if unlabeled:
        sample = decode_name(unlabeled[0])
        raise DataError(
            f"{path}: the sample {sample} has no label.",
            f"Add {sample}.cls, or `label` to its .json.",
        )
    return labels


def _read_label(
    file: int, key: bytes, label_files: Mapping[bytes, tuple[int, int]]
) -> bytes | None:
    """The label of a sample; None if it has none. Of a .cls the whole content, without white space
    around it; of a .json `label`, or else `cls`, if that is a whole number or text.
    """
    if key + b".cls" in label_files:
        offset, size = label_files[key + b".cls"]
        return os.pread(file, size, offset).strip()
    if key + b".json" not in label_files:
        return None
    offset, size = label_files[key + b".json"]
    with contextlib.suppress(ValueError, AttributeError, RecursionError):  # not such a .json
        found = json.loads(os.pread(file, size, offset))
        label = found.get("label", found.get("cls"))
        if isinstance(label, (int, str)) and not isinstance(label, bool):
            return str(label).encode()
    return None


def _prefix_of_classes(folders: Sequence[bytes], part_folder: bytes) -> bytes:
    """The path above the class folders, with `/` at its end; empty if they are at the top.

    folders: the folders of the images. part_folder: the path of the folder that holds the classes;
    it may be in the only folder at the top. `.`: the classes are at the top, or in a single folder.
    """
    tops = {folder.partition(b"/")[0] for folder in folders}
    top = tops.pop() + b"/" if len(tops) == 1 else b""
    if part_folder != b".":
        prefix = part_folder + b"/"
        is_part_at_top = any(folder.startswith(prefix) for folder in folders)
        return prefix if is_part_at_top else top + prefix
    return top if all(b"/" in folder for folder in folders) else b""


def _order_of_folders(
    path: Path,
    prefix: bytes,
    folders: Sequence[bytes],
    folder_of_image: np.ndarray,
    names: np.ndarray,
) -> tuple[list[str], list[int], np.ndarray]:
    """The classes below `prefix`, the number of images of each, and the rows of `names` in the
    order of `index_folder`; images outside of `prefix` are left out.

    folder_of_image: indices into `folders`, (N,).
    """
    class_of: dict[int, str] = {}
    for number, folder in enumerate(folders):
        name = folder.removeprefix(prefix).partition(b"/")[0]
        if folder.startswith(prefix) and name:
            class_of[number] = os.fsdecode(name)
    if not class_of:
        found = join_names(sorted({decode_name(folder.partition(b"/")[0]) for folder in folders}))
        raise DataError(
            f"{path}: the images have neither labels nor class folders; they are in "
            f"{found or 'no folder'}.",
            _LAYOUT_REMEDY,
        )
    in_order = sorted(class_of, key=lambda number: (class_of[number], folders[number]))
    position_of_folder = np.full(len(folders), -1, np.int32)
    position_of_folder[in_order] = np.arange(len(in_order))
    position_of_image = position_of_folder[folder_of_image]
    order = np.lexsort((names, position_of_image))
    order = order[np.count_nonzero(position_of_image < 0) :]  # without those outside of `prefix`
    images = np.bincount(folder_of_image, minlength=len(folders))
    counts = Counter[str]()
    for number, class_name in class_of.items():
        counts[class_name] += int(images[number])
    classes = sorted(counts)
    return classes, [counts[class_name] for class_name in classes], order
