"""Class folders: which files are images, their index in shared memory, and the usual mistakes in a layout."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from imagenet_cls.data.archive_files import ByteRanges
from imagenet_cls.data.classes import NO_VALIDATION, join_names, match_classes
from imagenet_cls.data.index_cache import Scan, open_status, read_scan, write_scan
from imagenet_cls.errors import DataError, command_line, printable, shorten

# Read by the first versions; torchvision's ImageFolder takes these, except .gif. In lower case.
FIRST_SUFFIXES = frozenset(
    {b".jpg", b".jpeg", b".png", b".bmp", b".gif", b".webp", b".ppm", b".pgm", b".tif", b".tiff"}
)
HEIF_SUFFIXES = frozenset({b".heic", b".heif"})
# A fixed list, so that a dataset does not depend on the installed packages. Pillow's own has EPS,
# whose reader starts Ghostscript.
IMAGE_SUFFIXES = FIRST_SUFFIXES | {b".jfif", b".jpe", b".avif", b".jp2", b".j2k"} | HEIF_SUFFIXES
_MAX_SUFFIXES = 5  # in a message
COMMON_SUFFIXES = (b".JPEG", b".jpg", b".jpeg", b".png")  # ImageNet's first
HIDDEN = ord(".")
SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})
PREPARE_COMMAND = f"{command_line('prepare-imagenet')} ARCHIVES OUT"


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """Images on disk and their classes.

    root: the folder that paths are relative to. names: (N,) paths of dtype S; reference counts would copy a list of
    Python objects into each forked worker. targets: int64 (N,). classes: name of each target. spans: where the images
    lie in archives; None: they are files. unread: the number of files, by suffix, that are beside
    the images and do not count as images (`describe_unread`).
    """

    root: Path
    names: np.ndarray
    targets: np.ndarray
    classes: tuple[str, ...]
    spans: ByteRanges | None = None
    unread: Mapping[bytes, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, i: int) -> str:
        """Path of image `i` relative to `root`, with `/` between folders."""
        return os.fsdecode(self.names[i])

    def path(self, i: int) -> Path:
        """Path of image `i`. A list may name absolute paths, which stay absolute."""
        return self.root / self.name(i)

    def describe(self, i: int) -> str:
        """Path and number of image `i`, and its archive, for a message."""
        path, archive = str(self.path(i)), self.spans.archive(i) if self.spans else ""
        return f"{path} (image {i}{'' if path.startswith(archive) else f' in {archive}'})"

    def select(self, rows: np.ndarray) -> "ImageIndex":
        """The same index with these rows only, in this order."""
        spans = self.spans and self.spans.select(rows)
        return replace(self, names=self.names[rows], targets=self.targets[rows], spans=spans)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, targets and classes, in hex. Not over `root`, so that a dataset can be moved."""
        characters = np.ascontiguousarray(self.names).view(np.uint8)
        digest = sha256(characters[characters != 0])  # numpy pads shorter names with zeros
        ends = np.cumsum(np.char.str_len(self.names))
        digest.update(np.concatenate(([0], ends)).astype("<i8").tobytes())
        digest.update(self.targets.astype("<i8").tobytes())
        digest.update("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def index_folder(folder: Path | str, classes: Sequence[str] | None = None) -> ImageIndex:
    """Index class folders, with images at any depth, in the order of torchvision's ImageFolder.

    Unlike there, hidden files and folders are skipped, and .gif is an image. classes: the training classes, which those
    of a validation folder are matched to. Raises DataError.
    """
    root = Path(folder)
    scan = read_scan(root)
    if scan is None:
        scan = scan_classes(root)
        write_scan(root, scan)
    found = scan.classes
    empty = [name for name, count in zip(found, scan.counts, strict=True) if count == 0]
    if empty:
        others = describe_unread(unread_from_arrays(scan.arrays))
        what = f"hold no image: {join_names(empty)}"
        if others:
            what += f"; files not read: {others}"
        raise DataError(
            f"{root}: {len(empty)} of {len(found)} class folders {what}\n"
            "remove these folders, or restore their images (an interrupted extraction leaves such folders)"
        )
    check_not_parts(root, found)
    return index_scan(scan, root, classes)


def index_scan(
    scan: Scan, root: Path, classes: Sequence[str] | None, spans: ByteRanges | None = None
) -> ImageIndex:
    """The index of what was listed in class folders. classes: to match them to; None: those that are there."""
    found = scan.classes
    positions = range(len(found)) if classes is None else match_classes(found, classes, root)
    targets = np.repeat(np.array(positions, np.int64), scan.counts)
    names = tuple(found if classes is None else classes)
    return ImageIndex(root, scan.names, targets, names, spans, unread_from_arrays(scan.arrays))


def scan_classes(root: Path) -> Scan:
    """List all class folders in `root`. Raises DataError."""
    started, base = time.time(), os.fsencode(root)
    folders: dict[bytes, os.stat_result | None] = {b"": None}
    with contextlib.suppress(OSError):  # `class_folders` raises an error that explains it
        status = open_status(base)
        _, _, _, is_cacheable = list_folder(base)
        folders[b""] = status if is_cacheable else None
    classes = class_folders(root)
    counts, names, unread = [], [], Counter[bytes]()
    for name in classes:
        images, others = scan_images(base, os.fsencode(name), folders)
        unread += others
        counts.append(len(images))
        names.append(np.array(images, f"S{max(map(len, images), default=1)}"))
    return Scan(classes, counts, np.concatenate(names), folders, started, unread_arrays(unread))


def is_image(name: bytes) -> bool:
    """Whether a file of this name counts as an image."""
    return name[name.rfind(b".") :].lower() in IMAGE_SUFFIXES and not name.startswith(b".")


def suffix_of(name: bytes) -> bytes:
    """The suffix of a path in lower case, with its dot; empty without one."""
    base = name[name.rfind(b"/") + 1 :]
    return base[base.rfind(b".") :].lower() if b"." in base else b""


def unread_arrays(unread: Mapping[bytes, int]) -> dict[str, np.ndarray]:
    """Numbers of files by suffix as arrays of a `Scan`."""
    counts = np.array(list(unread.values()), np.int64)
    return {"unread_suffixes": np.array(list(unread), bytes), "unread_counts": counts}


def unread_from_arrays(arrays: Mapping[str, np.ndarray]) -> dict[bytes, int]:
    """Numbers of files by suffix, from the arrays of `unread_arrays`."""
    pairs = zip(arrays["unread_suffixes"].tolist(), arrays["unread_counts"].tolist(), strict=True)
    return dict(pairs)


def describe_unread(unread: Mapping[bytes, int]) -> str:
    """Numbers of files by suffix, the largest first: `12 .txt, 3 .svg, 1 without a suffix`."""
    ranked = sorted(unread.items(), key=lambda item: (-item[1], item[0]))
    texts = []
    for suffix, count in ranked[:_MAX_SUFFIXES]:
        shown = shorten(printable(os.fsdecode(suffix)), 20) or "without a suffix"
        texts.append(f"{count:,} {shown}")
    if more := sum(count for _, count in ranked[_MAX_SUFFIXES:]):
        texts.append(f"{more:,} others")
    return ", ".join(texts)


def scan_images(
    base: bytes, folder: bytes, folders: dict[bytes, os.stat_result | None]
) -> tuple[list[bytes], Counter[bytes]]:
    """The images at any depth below `base/folder`, as paths relative to `base`, in the order of `index_folder`.

    Also returns the number of other files by suffix. Links are followed. folders: each folder is
    added to it, as in `Scan`. Raises DataError, also for a link to a folder that holds it.
    """
    found, unread = [], Counter[bytes]()
    pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while pending:
        path, parents = pending.pop()
        full_path = os.path.join(base, path)  # noqa: PTH118
        try:
            status = open_status(full_path)
            images, subfolders, others, is_cacheable = list_folder(full_path)
        except OSError as error:
            shown = os.path.normpath(os.fsdecode(full_path))
            raise DataError(
                f"{shown}: {error.strerror}\ncheck its permissions, or use another folder"
            ) from None
        here = status.st_dev, status.st_ino
        if here in parents:
            shown = os.path.normpath(os.fsdecode(full_path))
            raise DataError(f"{shown}: a link to a folder that holds it\nremove the link")
        folders[path] = status if is_cacheable else None
        found.append((path, images))
        unread.update(map(suffix_of, others))
        for name in subfolders:
            subfolder = os.path.normpath(os.path.join(path, name))  # noqa: PTH118
            pending.append((subfolder, parents | {here}))
    names = []
    for path, images in sorted(found):
        prefix = path + b"/"
        names += [prefix + name for name in images]
    return names, unread


def list_folder(path: bytes) -> tuple[list[bytes], list[bytes], list[bytes], bool]:
    """Names of the images, sorted, of the subfolders and of other files, without hidden ones.

    Also returns whether the folder can be cached. It can't if it holds a link that leads to no folder
    and is not named as an image: its target may become a folder, which changes no time of this
    folder. Links are followed. Raises OSError.
    """
    with os.scandir(path) as entries:
        found = list(entries)
    try:  # most folders hold images only, with few suffixes
        images = [
            n
            for e in found
            if (n := e.name).endswith(COMMON_SUFFIXES) and n[0] != HIDDEN and not e.is_dir()
        ]
    except OSError:
        images = []
    if len(images) == len(found):
        return sorted(images), [], [], True
    images, folders, others, is_cacheable = [], [], [], True
    for entry in found:
        try:
            is_folder = entry.is_dir()
        except OSError:  # a cycle of links, or no permission for the target of a link
            is_folder = is_cacheable = False
        if is_folder:
            folders += [entry.name] if entry.name[0] != HIDDEN else []
        elif is_image(entry.name):
            images.append(entry.name)
        else:
            others += [entry.name] if entry.name[0] != HIDDEN else []
            is_cacheable = is_cacheable and not entry.is_symlink()
    return sorted(images), folders, others, is_cacheable


def class_folders(root: Path) -> list[str]:
    """Names of the folders directly in `root`, sorted, without hidden ones. Raises DataError if there are none."""
    try:
        with os.scandir(root) as entries:
            found = sorted(
                entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError as error:
        raise DataError(f"{root}: {error.strerror}\n{_layout_remedy(root)}") from None
    if not found:
        images = [path.name for path in root.iterdir() if is_image(os.fsencode(path.name))]
        remedy = "set data.root, data.train and data.val"
        if any(name.startswith("ILSVRC2012_val_") for name in images):  # as in ImageNet's archive
            remedy = f"sort ImageNet's validation images into classes: {PREPARE_COMMAND}"
        elif images:
            remedy = "sort them into folders named as the classes, or list them with their classes: data.name=list"
        what = f"holds {len(images)} images and no class folders; each class needs a folder, {root}/CLASS/*"
        raise DataError(f"{root}: {what}\n{remedy}")
    return found


def _layout_remedy(missing: Path) -> str:
    """What to set where the folder of a part is missing."""
    root = missing.parent
    try:
        found = sorted(path.name for path in root.iterdir())
    except OSError:
        archives = (
            f"; from ImageNet's archives: {PREPARE_COMMAND}"
            if "imagenet" in root.name.lower()
            else ""
        )
        return f"set data.root to the folder that holds train/CLASS/* and val/CLASS/*{archives}"
    if SPLIT_NAMES.isdisjoint(map(str.lower, found)):
        otherwise = f"if these are classes: data.train=. {NO_VALIDATION}"
    else:
        otherwise = f"without validation images: {NO_VALIDATION}"
    return f"{root} holds {join_names(found) or 'nothing'}: set data.root, data.train and data.val; {otherwise}"


def check_not_parts(root: Path, found: Sequence[str]) -> None:
    """Raise DataError where the folders in `root` are `train` and `val`, or a single one, and hold the classes."""
    by_name = {name.lower(): name for name in found}
    if len(found) > 1 and not SPLIT_NAMES.issuperset(by_name):
        return
    entries = [path for name in found for path in (root / name).iterdir()]
    if any(path.is_dir() for path in entries) and not any(
        is_image(os.fsencode(path.name)) for path in entries
    ):
        train = next((by_name[name] for name in ("train", "training") if name in by_name), None)
        val = next(
            (by_name[name] for name in ("val", "valid", "validation", "test") if name in by_name),
            None,
        )
        val_keys = f"data.val={val} data.val_fraction=null" if val else NO_VALIDATION
        keys = f"data.train={train} {val_keys}" if train else "data.train=FOLDER, and data.val"
        what = f"its folders ({join_names(found)}) hold folders and no images: the classes are a level deeper"
        raise DataError(f"{root}: {what}\nset data.root={root} {keys}")
