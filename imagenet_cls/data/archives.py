"""Datasets in tar and zip archives: archives of class folders, WebDataset shards, ImageNet's own tars.

Members are listed once, and then read by their offsets. A WebDataset shard has `KEY.jpg` and `KEY.cls` or `KEY.json`.
"""

import contextlib
import glob
import json
import os
import re
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from imagenet_cls.data.archive_files import (
    ByteRanges,
    archive_status,
    decode_name,
    open_archive,
    tar_members,
    zip_members,
)
from imagenet_cls.data.classes import (
    join_names,
    label_positions,
    read_classes,
    targets_by_name,
)
from imagenet_cls.data.imagenet_labels import labels_beside, validation_labels, wnid_of
from imagenet_cls.data.index import (
    IMAGE_SUFFIXES,
    SPLIT_NAMES,
    ImageIndex,
    index_scan,
    suffix_of,
    unread_arrays,
    unread_from_arrays,
)
from imagenet_cls.data.index_cache import Scan, open_status, read_scan, write_scan
from imagenet_cls.errors import DataError, format_value, shorten

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
_MAX_DIGITS = 9  # of the numbers in a pattern
_THREADS = 16  # they wait for the disk
_MAX_IMAGE_BYTES = 1 << 30  # a damaged zip may claim any size
_CHUNK = 65_536  # names that are Python objects at a time
_LABELS = (b".cls", b".json")
_LAYOUTS = "an archive holds CLASS/NAME.jpg; a shard KEY.jpg, and beside each KEY.cls or KEY.json with `label`"


def find_archives(root: Path, part: str) -> list[Path] | None:
    """The archives that hold a part of a dataset, in order; None if there are none.

    `root/part` is an archive, a folder of archives, or a pattern (`*`, `?`, `{0000..1023}`); or `root` is an archive
    with the folder `part`; or ImageNet's own archive lies in `root`. Raises DataError for a pattern without a match,
    and for class tars beside class folders, unless each tar was unpacked into a folder of its name.
    """
    if os.path.isfile(root):  # noqa: PTH113 (pathlib raises without permission)
        return [root]
    place = root / part
    if is_archive(place.name) and os.path.isfile(place):  # noqa: PTH113
        return [place]
    if os.path.isdir(place):  # noqa: PTH112
        found = []
        with (
            contextlib.suppress(PermissionError),
            os.scandir(place) as entries,
        ):  # `class_folders` raises an error
            found = [entry for entry in entries if not entry.name.startswith(".")]
        archives = sorted(
            entry.name for entry in found if is_archive(entry.name) and entry.is_file()
        )
        folders = {entry.name for entry in found if entry.is_dir()}
        packed = [
            name for name in archives if name.lower().endswith(".tar") and name[:-4] not in folders
        ]
        if folders and packed:
            raise DataError(
                f"{place}: holds class folders, and archives that are not unpacked: {join_names(packed)}\n"
                "unpack them, move them elsewhere, or keep the archives only"
            )
        return None if folders or not archives else [place / name for name in archives]
    if re.search(r"[*?\[]|\{\d+\.\.\d+\}", part):
        return _expand(root, part)
    own = root / {"train": TRAIN_TAR, "val": VAL_TAR}.get(part, "")
    return [own] if os.path.isfile(own) else None  # noqa: PTH113


def is_archive(name: str) -> bool:
    return name.lower().endswith((".tar", ".zip"))


def _expand(root: Path, pattern: str) -> list[Path]:
    if found := re.search(r"\{(\d+)\.\.(\d+)\}", pattern):
        first, last = found.groups()
        if max(len(first), len(last)) > _MAX_DIGITS:
            what = f"{root}/{shorten(pattern, 100)}: numbers of more than {_MAX_DIGITS} digits"
            raise DataError(f"{what}\nset data.root, data.train and data.val to archives")
        numbers = range(int(first), int(last) + 1)
        names = (
            f"{pattern[: found.start()]}{n:0{len(first)}}{pattern[found.end() :]}" for n in numbers
        )
        paths = [path for name in names for path in _expand(root, name)]
    elif re.search(r"[*?\[]", pattern):
        paths = [root / name for name in sorted(glob.glob(pattern, root_dir=root))]  # noqa: PTH207 (may be absolute)
    else:
        paths = [root / pattern]
    if not paths or not paths[0].is_file():
        raise DataError(
            f"{root / pattern}: no such file\nset data.root, data.train and data.val to archives"
        )
    return paths


def index_archives(
    root: Path,
    part: str,
    archives: Sequence[Path],
    classes: Sequence[str] | None = None,
    must_match: bool = True,
) -> ImageIndex:
    """Index the images in what `find_archives` found: in the order of class folders on disk, or of the shards.

    classes: the training classes, for a validation part. must_match: class folders have to be these; otherwise the
    index has the classes that are there. For the classes of shards see `label_positions`. Raises DataError.
    """
    place = root / part
    devkit = labels_beside(archives[0]) if archives[0].name == VAL_TAR else None
    listed = [Path(os.path.abspath(path)) for path in (*archives, *filter(None, [devkit]))]  # noqa: PTH100
    scan = read_scan(place, listed)
    if scan is None:
        scan = _scan(root, part, archives, listed, devkit)
        write_scan(place, scan)
    arrays = dict(scan.arrays)
    labels = arrays.pop("labels", None)
    unread = unread_from_arrays(arrays)
    del arrays["unread_suffixes"], arrays["unread_counts"]
    statuses = [scan.folders[os.fsencode(path)] for path in listed[: len(archives)]]
    spans = ByteRanges(
        tuple(map(str, archives)),
        tuple(archive_status(status) for status in statuses if status is not None),
        **arrays,
    )
    if labels is None:
        return index_scan(scan, place, classes if must_match else None, spans)
    index = ImageIndex(place, scan.names, labels.astype(np.int64), (), spans, unread)
    return _with_labels_resolved(index, scan.classes, archives[0].with_name("classes.txt"), classes)


def _with_labels_resolved(
    index: ImageIndex, labels: Sequence[str], class_file: Path, classes: Sequence[str] | None
) -> ImageIndex:
    """index: of shards, whose targets are indices into `labels`."""
    own = read_classes(class_file) if class_file.is_file() else None
    # In WebDataset `KEY.cls` holds an integer, so that numbers are positions in a classes.txt.
    names = own or classes
    position, names = label_positions(set(labels), names, index.root, by_position=own is not None)
    unknown = next((i for i, label in enumerate(labels) if label not in position), None)
    if unknown is not None:
        image = index.describe(int(np.argmax(index.targets == unknown)))
        raise DataError(
            f"{image}: its label {format_value(labels[unknown])} is none of the {len(names)} classes\n"
            f"correct the shards, or list all classes, one per line, in {class_file}"
        )
    targets = np.array([position[label] for label in labels], np.int64)[index.targets]
    if own is not None and classes is not None:
        targets, names = targets_by_name(targets, names, classes, class_file), list(classes)
    return replace(index, targets=targets, classes=tuple(names))


@dataclass(frozen=True)
class _Piece:
    """A zip, a tar, or a tar in a tar: the bytes from `start` to `end` (None: to its end) of archive `number`."""

    path: str
    number: int
    stem: bytes
    start: int = 0
    end: int | None = None


@dataclass(frozen=True, eq=False)
class _Rows:
    """The images of a piece, in its order.

    group: index into `groups`: the folders, or in a shard the labels. unread: the number of other
    files, by folder (with `/` at its end) and suffix.
    """

    names: np.ndarray
    group: np.ndarray
    groups: list[bytes]
    is_shard: bool
    arrays: dict[str, np.ndarray]
    unread: Counter[tuple[bytes, bytes]]


def _scan(
    root: Path, part: str, archives: Sequence[Path], listed: Sequence[Path], devkit: Path | None
) -> Scan:
    """List the images of all archives.

    Of shards, the classes are the labels, in the order in which they appear; `labels` are indices into them.
    """
    from rich.console import Console
    from rich.progress import track

    started, place = time.time(), root / part
    try:
        statuses: dict[bytes, os.stat_result | None] = {
            p: open_status(p) for p in map(os.fsencode, listed)
        }
    except OSError as error:
        raise DataError(
            f"{os.fsdecode(error.filename)}: {error.strerror}\ncheck its permissions"
        ) from None
    with ThreadPoolExecutor(_THREADS) as pool:
        pieces = [
            piece for found in pool.map(_pieces, archives, range(len(archives))) for piece in found
        ]
        console, scans = Console(stderr=True), pool.map(_scan_piece, pieces)
        is_terminal = sys.stderr.isatty()
        bar = track(
            scans,
            "listing archives",
            len(pieces),
            console=console,
            transient=True,
            disable=not is_terminal,
        )
        scanned = list(bar)
    if devkit is not None:
        wnids = validation_labels(devkit)
        scanned = [
            _in_folders(r, [wnid_of(wnids, os.fsdecode(n)).encode() for n in r.names.tolist()])
            for r in scanned
        ]
    elif len(pieces) > 1:
        for i, (rows, piece) in enumerate(zip(scanned, pieces, strict=True)):
            if b"" in rows.groups and not rows.is_shard:  # images at the top of a tar of one class
                scanned[i] = _in_folders(rows, [piece.stem] * len(rows.names))
    shards = [rows.is_shard for rows in scanned if len(rows.names)]
    if not shards or any(shards) != all(shards):
        what = (
            f"no labels in {shards.count(False)} of {len(shards)} archives"
            if shards
            else "no image in it"
        )
        raise DataError(f"{place}: {what}\n{_LAYOUTS}")
    table = {
        group: i
        for i, group in enumerate(dict.fromkeys(group for rows in scanned for group in rows.groups))
    }
    group = np.concatenate(
        [np.array([table[g] for g in rows.groups], np.int32)[rows.group] for rows in scanned]
    )
    number = np.repeat(
        np.array([piece.number for piece in pieces], np.uint32),
        [len(rows.names) for rows in scanned],
    )
    arrays = {"number": number}
    for key in ("offset", "size", "packed"):
        arrays[key] = _joined([rows.arrays.pop(key) for rows in scanned])
    names = _joined([rows.names for rows in scanned])
    unread: Counter[tuple[bytes, bytes]] = sum((rows.unread for rows in scanned), Counter())
    del scanned
    if shards[0]:
        arrays |= {"labels": group} | _unread_arrays(unread)
        return Scan([os.fsdecode(label) for label in table], [], names, statuses, started, arrays)
    inside = os.fsencode(part) if root.is_file() and os.path.normpath(part) != "." else b""
    classes, counts, order, skipped = _order_of_folders(place, list(table), group, names, inside)
    del group
    names = names[order]
    equal = np.flatnonzero(names[1:] == names[:-1])
    if len(equal):
        repeated = decode_name(names[equal[0]])
        raise DataError(f"{place}: {repeated} is in it twice\nmake the archive again")
    prefix = names[0][:skipped]
    if skipped:
        characters = names.view(np.uint8).reshape(len(names), -1)[:, skipped:]
        names = np.ascontiguousarray(characters).view(f"S{characters.shape[1]}")[:, 0]
    arrays = {key: values[order] for key, values in arrays.items()} | _unread_arrays(unread, prefix)
    return Scan(classes, counts, names, statuses, started, arrays)


def _unread_arrays(
    unread: Counter[tuple[bytes, bytes]], prefix: bytes = b""
) -> dict[str, np.ndarray]:
    """Numbers of files by suffix, in folders that begin with `prefix`, as arrays of a `Scan`."""
    counts = Counter[bytes]()
    for (folder, suffix), count in unread.items():
        if folder.startswith(prefix):
            counts[suffix] += count
    return unread_arrays(counts)


def _pieces(path: Path, number: int) -> list[_Piece]:
    """The whole archive; of a tar of tars, as ImageNet's, each of them, so that several threads read it."""
    whole = _Piece(str(path), number, os.fsencode(path.stem))
    if path.suffix.lower() == ".zip":
        return [whole]
    with open_archive(whole.path) as file:
        members = tar_members(file, whole.path)
        first = next(members, None)
        if first is None or not first[0].endswith(b".tar"):
            return [whole]
        tars = [member for member in (first, *members) if member[0].endswith(b".tar")]
    return [
        _Piece(whole.path, number, name.rpartition(b"/")[2][:-4], offset, offset + size)
        for name, offset, size, *_ in tars
    ]


def _scan_piece(piece: _Piece) -> _Rows:
    names: list[bytes] = []
    parts: list[np.ndarray] = []
    folders: dict[bytes, int] = {}
    folder, offset, size, packed = array("i"), array("q"), array("I"), array("I")
    others: dict[bytes, tuple[int, int]] = {}
    unread = Counter[tuple[bytes, bytes]]()
    is_zip = piece.path.lower().endswith(".zip")
    with open_archive(piece.path) as file:
        members = (
            zip_members(file, piece.path)
            if is_zip
            else tar_members(file, piece.path, piece.start, piece.end)
        )
        for name, start, length, compressed, problem in members:
            suffix = name[name.rfind(b".") :].lower()
            if suffix not in IMAGE_SUFFIXES:
                name = name.removeprefix(b"./")
                if suffix in _LABELS and not is_zip:
                    others[_checked_name(name, piece.path)] = start, length
                if not name.endswith(b"/") and b"/." not in b"/" + name:
                    unread[name[: name.rfind(b"/") + 1], suffix_of(name)] += 1
                continue
            if b"/." in name or b"//" in name or name[0] in b"./":
                name = _checked_name(name, piece.path)
                if not name:
                    continue
            if problem:
                raise DataError(f"{piece.path}: {decode_name(name)} {problem}")
            if max(length, compressed) > _MAX_IMAGE_BYTES:
                what = f"{decode_name(name)} has {length} bytes, more than {_MAX_IMAGE_BYTES}"
                raise DataError(f"{piece.path}: {what}\nmake the archive again without it")
            names.append(name)
            offset.append(start)
            size.append(length)
            packed.append(compressed)
            folder.append(folders.setdefault(name[: max(name.rfind(b"/"), 0)], len(folders)))
            if len(names) == _CHUNK and not others:
                parts.append(np.array(names))
                names.clear()
        labels = _labels(file, piece.path, names, others) if others and not parts else []
    parts.append(np.array(names or [b""])[: len(names)])
    arrays = {"offset": np.asarray(offset), "size": np.asarray(size), "packed": np.asarray(packed)}
    rows = _Rows(_joined(parts), np.asarray(folder), list(folders), False, arrays, unread)
    if not any(labels):
        return rows
    chosen = np.array([label is not None for label in labels])
    groups, group = _unique(label for label in labels if label is not None)
    unread = Counter({key: count for key, count in unread.items() if key[1] not in _LABELS})
    arrays = {key: array[chosen] for key, array in arrays.items()}
    return _Rows(rows.names[chosen], group, groups, True, arrays, unread)


def _unique(values: Iterable[bytes]) -> tuple[list[bytes], np.ndarray]:
    """The different values, in the order in which they appear, and the index of each value: int32 (N,)."""
    indices: dict[bytes, int] = {}
    group = np.array([indices.setdefault(value, len(indices)) for value in values], np.int32)
    return list(indices), group


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """The concatenation; of one array, itself, since a copy of the names of ImageNet takes 38 MB."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _checked_name(name: bytes, path: str) -> bytes:
    """A member's path without `.` in it; empty for a hidden file. Raises DataError for one that leads elsewhere."""
    parts = name.split(b"/")
    if name.startswith(b"/") or b".." in parts:
        what = f"{path}: {decode_name(name)}: an absolute path, or one with `..`"
        raise DataError(
            f"{what}\nmake the archive again with paths relative to the folder that holds the classes"
        )
    parts = [part for part in parts if part not in (b"", b".")]
    return b"" if any(part.startswith(b".") for part in parts) else b"/".join(parts)


def _labels(
    file: int, path: str, names: Sequence[bytes], others: Mapping[bytes, tuple[int, int]]
) -> list[bytes | None]:
    """The label of each image of a shard; None for further images of a sample, such as `KEY.mask.png`.

    Empty if no image has a label, and all are in folders. As in WebDataset, a key ends at the first dot of the name.
    """
    labels: list[bytes | None] = []
    used: set[bytes] = set()
    repeated, unlabeled = b"", b""
    for name in names:
        dot = name.find(b".", name.rfind(b"/") + 1)
        key, label = name[:dot], None
        if name[dot:].lower() not in IMAGE_SUFFIXES:
            labels.append(None)
            continue
        repeated = key if key in used else repeated
        used.add(key)
        if (member := others.get(key + b".cls")) is not None:
            label = os.pread(file, member[1], member[0]).strip()
        elif (member := others.get(key + b".json")) is not None:
            label = _json_label(os.pread(file, member[1], member[0]))
        unlabeled = unlabeled if label else key
        labels.append(label)
    if not any(labels) and all(
        b"/" in name for name in names
    ):  # class folders with further files in them
        return []
    if repeated:
        what = f"{path}: {decode_name(repeated)}: two images have this key"
        raise DataError(f"{what}\ngive each sample its own key")
    if unlabeled:
        sample = decode_name(unlabeled)
        raise DataError(f"{path}: {sample}: no label\nadd {sample}.cls, or `label` to its .json")
    return labels


def _json_label(content: bytes) -> bytes | None:
    """The label in a .json: a whole number, or a text that UTF-8 can encode; None without one."""
    try:
        found = json.loads(content)
        label = found.get("label", found.get("cls"))
        is_label = isinstance(label, (int, str)) and not isinstance(label, bool)
        return str(label).encode() if is_label else None
    except (ValueError, AttributeError, RecursionError):
        return None


def _in_folders(rows: _Rows, folders: Sequence[bytes]) -> _Rows:
    """The images with a folder before each path."""
    names = [b"%b/%b" % pair for pair in zip(folders, rows.names.tolist(), strict=True)]
    groups, group = _unique(name.rpartition(b"/")[0] for name in names)
    return replace(rows, names=np.array(names or rows.names), group=group, groups=groups)


def _order_of_folders(
    place: Path, folders: list[bytes], group: np.ndarray, names: np.ndarray, inside: bytes
) -> tuple[list[str], list[int], np.ndarray, int]:
    """Classes, images in each, the order of `scan_images` as rows, and the length of the path above the classes.

    inside: the folder in the archive that holds the classes, perhaps in another one; empty: the top, or a single
    folder in it.
    """
    tops = {folder.partition(b"/")[0] for folder in folders}
    top = tops.pop() + b"/" if len(tops) == 1 else b""
    prefix = top if all(b"/" in folder for folder in folders) else b""
    if inside:
        prefix = (
            inside + b"/"
            if any(folder.startswith(inside + b"/") for folder in folders)
            else top + inside + b"/"
        )
    kept = [
        i
        for i, folder in enumerate(folders)
        if folder.startswith(prefix) and len(folder) > len(prefix)
    ]
    class_of = {i: os.fsdecode(folders[i][len(prefix) :].partition(b"/")[0]) for i in kept}
    if not kept:
        found = join_names(sorted({decode_name(folder.partition(b"/")[0]) for folder in folders}))
        raise DataError(
            f"{place}: images without labels or class folders, in {found or 'no folder'}\n{_LAYOUTS}"
        )
    kept.sort(key=lambda i: (class_of[i], folders[i]))
    classes = sorted(set(class_of.values()))
    position = {name: number for number, name in enumerate(classes)}
    rank, target = np.full(len(folders), -1, np.int32), np.zeros(len(folders), np.int64)
    rank[kept], target[kept] = np.arange(len(kept)), [position[class_of[i]] for i in kept]
    ranks = rank[group]
    order = np.lexsort((names, ranks))[np.count_nonzero(ranks < 0) :]
    return (
        classes,
        np.bincount(target[group[order]], minlength=len(classes)).tolist(),
        order,
        len(prefix),
    )


def check_level(index: ImageIndex) -> None:
    """As `index.check_not_parts`: raise DataError if the classes are `train` and `val`, or one, and hold no images."""
    if len(index.classes) > 1 and not SPLIT_NAMES.issuperset(map(str.lower, index.classes)):
        return
    if (np.char.count(index.names, b"/") > 1).all():
        what = f"its folders ({join_names(index.classes)}) hold folders and no images: the classes are a level deeper"
        remedy = "set data.root to the archive, and data.train and data.val to the folders in it that hold the classes"
        raise DataError(f"{index.root}: {what}\n{remedy}")
