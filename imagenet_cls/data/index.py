"""Class folders: an index of their images, and errors for mistakes in a layout."""

import os
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from imagenet_cls.data.archive_files import ByteRanges
from imagenet_cls.data.classes import HOLD_OUT_ADVICE
from imagenet_cls.data.targets import target_bytes
from imagenet_cls.errors import DataError
from imagenet_cls.text import command_line, join_names, shorten

# In lower case. A fixed list, so that a dataset does not depend on the installed packages. Pillow's
# own has EPS, whose reader starts Ghostscript.
IMAGE_SUFFIXES = frozenset(
    {b".jpg", b".jpeg", b".jfif", b".jpe", b".png", b".bmp", b".gif", b".webp", b".heic", b".heif"}
    | {b".ppm", b".pgm", b".tif", b".tiff", b".avif", b".jp2", b".j2k"}
)
# Of macOS in zips, Synology, Windows and Linux. They hold thumbnails, forks and deleted files.
_SYSTEM_FOLDERS = frozenset(
    {b"__MACOSX", b"@eaDir", b"#recycle", b"$RECYCLE.BIN", b"lost+found"}
    | {b"System Volume Information"}
)
# a word for a part, as in seg_train, TestImages and val2017
_PART = re.compile(
    r"(?<![a-z])(train|trn|trainval|val|test|tst|dev|eval|holdout)(?:ing|id|idation|idate|uation)?"
    r"(?:set|dataset|data|image|img|split|folder|dir)?s?(?![a-z])"
)
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")
PREPARE_COMMAND = f"{command_line('prepare-imagenet')} ARCHIVES OUT"
_LAYOUT_REMEDY = (
    "Give the folder above class folders, such as cat/1.jpg and dog/1.jpg, or list the images with "
    f"their labels (data.name=list). Sort ImageNet's by {PREPARE_COMMAND}\nA config names the "
    f"folders by data.train and data.val in data.root. Without validation images: "
    f"{HOLD_OUT_ADVICE}; for class folders in data.root itself: data.train=."
)


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """Images on disk and their classes.

    root: the folder that paths are relative to. names: (N,) paths of dtype S; reference counts
    would copy a list of Python objects into each forked worker. targets: see `data.targets`.
    classes: name of each target. byte_ranges: where the images lie in archives; None: they are
    files. unread: the number of files, by suffix, that are beside the images and do not count as
    images (`describe_unread`).
    """

    root: Path
    names: np.ndarray
    targets: np.ndarray
    classes: tuple[str, ...]
    byte_ranges: ByteRanges | None = None
    unread: Mapping[bytes, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, i: int) -> str:
        """Path of image `i` relative to `root`, with `/` between folders."""
        return os.fsdecode(self.names[i])

    def path(self, i: int) -> Path:
        """Path of image `i`. A list may name absolute paths, which stay absolute."""
        return self.root / self.name(i)

    def full_paths(self) -> list[str]:
        """Absolute paths without `.` and `..`, so that equal ones are of one image. Links are not
        followed.
        """
        root = os.path.abspath(self.root)  # noqa: PTH100
        paths = (os.path.join(root, name) for name in map(os.fsdecode, self.names))  # noqa: PTH118
        return list(map(os.path.normpath, paths))

    def image_ids(self) -> Sequence[Hashable]:
        """What identifies each image: its full path, with the links of its folder followed, or
        archive and offset, since shards reuse names.
        """
        if self.byte_ranges is not None:
            archives = list(map(os.path.realpath, self.byte_ranges.archives))
            places = self.byte_ranges.places[:, :2].tolist()
            return [(archives[archive], offset) for archive, offset in places]
        root = os.fsencode(self.root)

        @cache
        def real_folder(folder: bytes) -> bytes:
            return os.path.realpath(os.path.join(root, folder))  # noqa: PTH118

        parts = (name.rpartition(b"/") for name in self.names.tolist())
        return [(real_folder(folder), name) for folder, _, name in parts]

    def describe(self, i: int) -> str:
        """Path and number of image `i`, and its archive, for a message."""
        place = "" if self.byte_ranges is None else f" in {self.byte_ranges.archive(i)}"
        return f"{self.path(i)} (image {i}{place})"

    def select(self, rows: np.ndarray) -> "ImageIndex":
        """The same index with these rows only, in this order."""
        selected = replace(self, names=self.names[rows], targets=self.targets[rows])
        if self.byte_ranges is None:
            return selected
        return replace(selected, byte_ranges=self.byte_ranges.select(rows))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, targets and classes, in hex. Not over `root`, so that a dataset can
        be moved.
        """
        characters = np.ascontiguousarray(self.names).view(np.uint8)
        digest = sha256(characters[characters != 0])  # numpy pads shorter names with zeros
        ends = np.cumsum(np.char.str_len(self.names))
        digest.update(np.concatenate(([0], ends)).astype("<i8").tobytes())
        digest.update(target_bytes(self.targets))
        digest.update("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


class FolderContent(NamedTuple):
    """What is directly in a folder, as names without hidden ones. Links are followed.

    images: sorted. others: other files.
    """

    images: list[bytes]
    folders: list[bytes]
    others: list[bytes]


def index_folder(folder: Path | str) -> ImageIndex:
    """Index class folders, with images at any depth, in the order of torchvision's ImageFolder.

    Unlike there, hidden files and folders are skipped, and .gif is an image. Raises DataError.
    """
    root = Path(folder)
    classes, content = list_classes(root)
    counts = []
    names = []
    # images in no class folder
    unread = Counter(suffix_of(name) for name in content.images)
    for name in classes:
        tree = list_tree(os.fsencode(root), os.fsencode(name))
        images = images_of_tree(tree)
        counts.append(len(images))
        # an array for each class, since all names as Python objects take 100 MB
        names.append(np.array(images, bytes))
        unread += count_others(tree)
    packed = np.concatenate(names)
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    check_level(root, [name for name in classes if name not in empty], packed)
    if empty:
        others = f"; files not read: {describe_unread(unread)}" if unread else ""
        raise DataError(
            f"{root}: {len(empty)} of {len(classes)} class folders hold no image: "
            f"{join_names(empty)}{others}.",
            "Remove these folders, or restore their images (an interrupted extraction leaves such "
            "folders).",
        )
    targets = np.repeat(np.arange(len(classes)), counts)
    return ImageIndex(root, packed, targets, tuple(classes), unread=unread)


def list_tree(base: bytes, folder: bytes) -> dict[bytes, FolderContent]:
    """The content of `base/folder` and of all folders below it, by their paths relative to `base`.

    Links are followed. Raises DataError, also for a link to a folder that holds it, which the
    system does not follow without end.
    """
    tree: dict[bytes, FolderContent] = {}
    pending = [folder]
    while pending:
        path = pending.pop()
        full_path = base + b"/" + path
        try:
            tree[path] = content = list_folder(full_path)
        except OSError as error:
            raise DataError(
                f"{os.fsdecode(full_path)}: {error.strerror}.",
                "Give a path that exists, check its permissions, or remove the link.",
            ) from None
        pending += [path + b"/" + name for name in content.folders]
    return tree


def images_of_tree(tree: Mapping[bytes, FolderContent]) -> list[bytes]:
    """The paths of the images in a tree, in the order of `index_folder`."""
    names = []
    for path in sorted(tree):
        prefix = path + b"/"
        names += [prefix + name for name in tree[path].images]
    return names


def count_others(tree: Mapping[bytes, FolderContent]) -> Counter[bytes]:
    """The number of files in a tree that are no images, by suffix."""
    return Counter(suffix_of(name) for content in tree.values() for name in content.others)


def list_folder(path: bytes) -> FolderContent:
    """List one folder. Raises OSError, also for a cycle of links."""
    images = []
    folders = []
    others = []
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if is_hidden(name):
                continue
            if entry.is_dir():
                folders.append(name)
            elif suffix_of(name) in IMAGE_SUFFIXES:
                images.append(name)
            elif entry.is_symlink() and not suffix_of(name) and not os.path.exists(entry.path):  # noqa: PTH110
                folders.append(name)  # perhaps a class, and an error when it is listed
            else:
                others.append(name)
    return FolderContent(sorted(images), folders, others)


def is_hidden(name: bytes) -> bool:
    """Whether a file or folder is hidden, or is one that a system makes by itself."""
    return name.startswith(b".") or name in _SYSTEM_FOLDERS


def suffix_of(name: bytes) -> bytes:
    """The suffix of a path in lower case, with its dot; empty without one."""
    base = name[name.rfind(b"/") + 1 :]
    return base[base.rfind(b".") :].lower() if b"." in base else b""


def has_image_suffix(name: str) -> bool:
    return suffix_of(os.fsencode(name)) in IMAGE_SUFFIXES


def describe_unread(unread: Mapping[bytes, int]) -> str:
    """Numbers of files by suffix, the largest first: `12 .txt, 3 .svg, 1 without a suffix`."""
    ranked = sorted(unread.items(), key=lambda item: (-item[1], item[0]))
    return join_names(
        [f"{count:,} {os.fsdecode(suffix) or 'without a suffix'}" for suffix, count in ranked], 5
    )


def list_classes(root: Path) -> tuple[list[str], FolderContent]:
    """Names of the folders directly in `root`, sorted, without hidden ones, and its content. Raises
    DataError if there are none.
    """
    try:
        content = list_folder(os.fsencode(root))
    except OSError as error:
        path = shorten(str(root), 300)
        raise DataError(f"{path}: {error.strerror}.", _LAYOUT_REMEDY) from None
    classes = sorted(map(os.fsdecode, content.folders))
    if not classes:
        count = len(content.images)
        raise DataError(f"{root}: holds {count} images and no class folders.", _LAYOUT_REMEDY)
    return classes, content


def may_be_parts(folders: Collection[str]) -> bool:
    """Whether the names of all folders hold a word for a part, such as `seg_train` and `seg_test`,
    and not the same one.
    """
    words = {_part_word(name) for name in folders}
    return None not in words and len(words) > 1


def _part_word(folder: str) -> str | None:
    """The word for a part in the name of a folder: `val` of Val2017."""
    match = _PART.search(_CAMEL_CASE.sub("_", folder).lower())
    return None if match is None else match[1]


def check_level(root: Path, classes: Sequence[str], names: np.ndarray) -> None:
    """Raise DataError where the folders in `root`, taken for classes, are a single one that holds
    the classes, or parts: all are named so, or those that are have class folders in common. names:
    of the images.
    """
    parts = [name for name in classes if _part_word(name)]
    if len(classes) != 1 and not may_be_parts(parts):
        return
    below: dict[str, set[bytes]] = {}  # the names of the folders of the images below each
    for name in names.tolist():
        top, *folders, _ = name.split(b"/")
        below.setdefault(os.fsdecode(top), set()).add(folders[-1] if folders else b"")
    if len(classes) == 1:
        if b"" not in below[classes[0]]:
            raise DataError(
                f"{root}: its folder {classes[0]} holds folders and no images: the classes are a "
                "level deeper.",
                _LAYOUT_REMEDY,
            )
        return
    shared = Counter(folder for name in parts for folder in below[name] - {b""})
    if len(parts) == len(classes) or max(shared.values(), default=1) > 1:
        raise DataError(
            f"{root}: its folders ({join_names(classes)}) are parts of a dataset.",
            f"{_LAYOUT_REMEDY} If they are classes, rename them.",
        )
