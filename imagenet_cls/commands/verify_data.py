"""`tools/verify_data.py`: read every image of a dataset as training does.

Writes a list of the bad ones for `data.exclude`.
"""

import os
import shlex
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import DataConfig, EvalConfig
from imagenet_cls.data.archive_files import ArchiveChangedError
from imagenet_cls.data.archives import index_members, is_archive
from imagenet_cls.data.index import (
    ImageIndex,
    count_others,
    describe_unread,
    images_of_tree,
    list_tree,
)
from imagenet_cls.data.lists import BAD_IMAGES_FILE
from imagenet_cls.errors import DataError, ResourceError, UsageError
from imagenet_cls.files import check_replaced, is_device_or_fifo, write_output
from imagenet_cls.text import command_line, first_line, join_names

if TYPE_CHECKING:
    from imagenet_cls.data.sources import FolderSource

FILE_SETS = ("folder", "list", "digits")
Image = tuple["FolderSource", int]  # image of a source
# path in the list of bad images; archive and offset in it, since shards reuse paths
Key = tuple[str, str, int]


def verify_command(argv: Sequence[str]) -> None:
    parser = cli.build_parser(
        "verify-data",
        "Read and decode every image, and list the bad ones with the reason, for data.exclude. "
        "Exit code 0 if all are good, 3 if some are bad.",
        "ROOT | CONFIG [key=value ...] [--out FILE] [--threads N]",
    )
    parser.add_argument(
        "data",
        type=cli.not_empty,
        metavar="ROOT | CONFIG",
        help="a folder or archive, with all images and archives in it; or a config",
    )
    cli.add_data_options(parser)
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE",
        help="default: ROOT/bad_images.txt; only a file of this name is replaced",
    )
    arguments = parser.parse_intermixed_args(argv)
    verify_data(arguments.data, arguments.overrides, arguments.out, arguments.threads)


def verify_data(data: str, overrides: Sequence[str], out: Path | None, num_threads: int) -> None:
    """Read the images of a folder, or of a config file, print the bad ones, and write a list of
    them to `out`.

    If all are good, an empty list is written only to a given `out` or over an earlier list. Raises
    DataError if one is bad, ResourceError if `out` can't be written, and UsageError.
    """
    config = cli.load_config_if_given(data, overrides)
    root = Path(config.data.root if config else data).expanduser()
    indexes = indexes_of(config.data) if config else indexes_below(root)
    images = images_by_key(indexes, root)
    unread = Counter[bytes]()
    for index in indexes:
        unread.update(index.unread)
    if not images:
        others = f", and other files: {describe_unread(unread)}" if unread else ""
        raise DataError(
            f"{root}: no image in it{others}.",
            "Name the folder that holds the dataset, or a config.",
        )
    path = out or (root.parent if root.is_file() else root) / BAD_IMAGES_FILE
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", "Name a file with --out.")
    if not os.access(path if is_device_or_fifo(path) else path.parent, os.W_OK):
        raise ResourceError(f"Can't write {path}.", "Name another file with --out FILE.")
    if path.name != BAD_IMAGES_FILE:
        check_replaced(path)
    bad = find_bad_images(images, num_threads, config.eval if config else EvalConfig())
    # an earlier list would leave out replaced images
    is_written = bool(bad) or out is not None or path.exists()
    if is_written:
        lines = "".join(f"{name}\t{reason}\n" for name, reason in bad)
        write_output(path, lines.encode("utf-8", "surrogateescape"))
    print(f"{len(images):,} images, {len(bad):,} bad" + (f"; wrote {path}" if is_written else ""))
    if unread:
        print(f"files that are not read, by suffix: {describe_unread(unread)}")
    if bad:
        remedy = f"leave them out: data.exclude={shlex.quote(str(path))}"
        if config is None and any(index.byte_ranges is not None for index in indexes):
            # paths in data.exclude begin with data.train
            verify = f"{command_line('verify-data')} CONFIG"
            remedy = f"list them for data.exclude with the config: {verify}"
        names = list(dict.fromkeys(name for name, _ in bad))
        raise DataError(
            f"{len(bad)} of {len(images)} images are bad: {join_names(names)}.",
            f"Replace or delete them, or {remedy}",
        )


def find_bad_images(
    images: Mapping[Key, Image], num_threads: int, evaluation: EvalConfig
) -> list[tuple[str, str]]:
    """Path and reason of each bad image, in the order of the keys. Prints them, too."""
    # decode_rgb uses warnings.catch_warnings, which is not thread-safe
    warnings.simplefilter("ignore")
    keys = sorted(images)
    bad = []
    with ThreadPoolExecutor(num_threads) as pool:
        # in chunks, since a task for each image of ImageNet would take gigabytes
        for start in cli.track(range(0, len(keys), 32 * num_threads), "reading"):
            chunk = keys[start : start + 32 * num_threads]
            problems = pool.map(lambda key: image_problem(*images[key], evaluation), chunk)
            for (name, archive, _), reason in zip(chunk, problems, strict=True):
                if reason is not None:
                    where = f" (in {archive})" if archive else ""
                    bad.append((name, reason + where))
                    print(f"bad: {name}: {reason}{where}")
    return bad


def indexes_below(root: Path) -> list[ImageIndex]:
    """The images at any depth below a folder, also in archives there, or in the archive `root`.
    Raises DataError.
    """
    if root.is_file():
        if not is_archive(root.name):
            raise DataError(
                f"{root}: a file, but no .tar or .zip.",
                "Give a folder, an archive that ends so, or a config.",
            )
        return [index_members(root, [root])]
    tree = list_tree(os.fsencode(root), b".")
    unread = count_others(tree)
    for suffix in (b".tar", b".zip"):  # they are read below
        del unread[suffix]
    names = np.array(images_of_tree(tree), bytes)
    images = ImageIndex(root, names, np.zeros(len(names), np.int64), (), unread=unread)
    archives = sorted(
        path
        for folder, content in tree.items()
        for path in (root / os.fsdecode(folder) / os.fsdecode(name) for name in content.others)
        if is_archive(path.name) and path.is_file()
    )
    return [images, index_members(root, archives)] if archives else [images]


def indexes_of(data: DataConfig) -> list[ImageIndex]:
    """The training and validation part of a config. Raises UsageError for a dataset not made of
    files.
    """
    from imagenet_cls.data.datasets import open_datasets
    from imagenet_cls.data.sources import FolderSource

    if data.name not in FILE_SETS:
        raise UsageError(
            f"data.name {data.name!r} is not made of image files.",
            f"Give a folder, or a config with one of {', '.join(FILE_SETS)}.",
        )
    sets = open_datasets(replace(data, exclude=None), allow_missing=True)
    assert isinstance(sets.train, FolderSource) and isinstance(sets.val, FolderSource)
    val = sets.val.index
    if data.val is None:  # both parts are of one folder, whose other files count once
        val = replace(val, unread={})
    return [sets.train.index, val]


def images_by_key(indexes: Sequence[ImageIndex], root: Path) -> dict[Key, Image]:
    """Each image once, with its path relative to `root`."""
    from imagenet_cls.data.sources import FolderSource  # imports torch, which --help should not

    images: dict[Key, Image] = {}
    for index in indexes:
        source = FolderSource(index)
        for i in range(len(index)):
            archive = ""
            offset = 0
            if index.byte_ranges is not None:
                archive = index.byte_ranges.archive(i)
                offset = int(index.byte_ranges.places[i, 1])
            images[os.path.relpath(index.path(i), root), archive, offset] = source, i
    return images


def image_problem(source: "FolderSource", i: int, evaluation: EvalConfig) -> str | None:
    """Read and decode image `i`: why it can't be used in training or evaluation, or None."""
    from imagenet_cls.data.decode import decode_rgb
    from imagenet_cls.data.sources import reason_of
    from imagenet_cls.data.transforms import EvalTransform

    try:
        image = decode_rgb(source.read(i))
        EvalTransform(evaluation).resized_size(*image.shape[1:])
    except ArchiveChangedError:
        raise
    except (OSError, DataError) as error:
        return reason_of(error)
    except Exception as error:  # damaged files make decoders raise anything; training would end too
        return f"{type(error).__name__}: {first_line(error)}"
    return None
