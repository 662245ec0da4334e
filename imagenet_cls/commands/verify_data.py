"""Read every image of a dataset as training does, and write a list of the bad ones for `data.exclude`."""

import os
import shlex
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archive_files import (
    ArchiveChangedError,
    open_archive,
    tar_members,
    zip_members,
)
from imagenet_cls.data.archives import index_archives, is_archive
from imagenet_cls.data.classes import join_names
from imagenet_cls.data.index import ImageIndex, describe_unread, is_image, scan_images
from imagenet_cls.data.lists import BAD_IMAGES_FILE
from imagenet_cls.errors import DataError, ResourceError, UsageError, command_line, first_line
from imagenet_cls.files import is_device_or_fifo, write_output
from imagenet_cls.parallel.environment import RankInfo, cpu_threads

if TYPE_CHECKING:
    from imagenet_cls.data.sources import FolderSource

FILE_SETS = ("folder", "list", "digits")
Image = tuple["FolderSource", int]  # image of a source
Key = tuple[
    str, str, int
]  # path in the list of bad images; archive and offset in it, since shards reuse paths


def verify_command(argv: Sequence[str]) -> None:
    parser = cli.build_parser(
        "verify-data",
        "Read and decode every image, and list the bad ones with the reason, for data.exclude. Exit code 0 if all are "
        "good, 3 if some are bad.",
        "ROOT | CONFIG [key=value ...] [--out FILE] [--threads N]",
    )
    parser.add_argument(
        "data", type=cli.not_empty, metavar="ROOT | CONFIG",
        help="a folder or archive, with all images and archives in it; or a config",
    )  # fmt: skip
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="with CONFIG, such as data.root=/my/images",
    )
    parser.add_argument("--out", type=cli.path, metavar="FILE", help="default: ROOT/bad_images.txt")
    parser.add_argument(
        "--threads",
        type=cli.positive,
        metavar="N",
        help="default: one for each CPU that it may use",
    )
    arguments = parser.parse_intermixed_args(argv)
    verify_data(
        arguments.data,
        arguments.overrides,
        arguments.out,
        arguments.threads or cpu_threads(RankInfo()),
    )


def verify_data(data: str, overrides: Sequence[str], out: Path | None, num_threads: int) -> None:
    """Read the images of a folder, or of a config file, print the bad ones, and write a list of them to `out`.

    If all are good, an empty list is written only to a given `out` or over an earlier list. Raises DataError if one is
    bad, ResourceError if `out` can't be written, and UsageError.
    """
    config = cli.load_data_config(data, overrides)
    root = Path(config.root if config else data).expanduser()
    images, unread = images_of(config, root) if config else images_below(root)
    if not images:
        others = f", and other files: {describe_unread(unread)}" if unread else ""
        remedy = "name the folder that holds the dataset, or a config"
        raise DataError(f"{root}: no image in it{others}\n{remedy}")
    keys = sorted(images)
    path = out or (root.parent if root.is_file() else root) / BAD_IMAGES_FILE
    if path.is_dir():
        raise UsageError(f"{path} is a folder.\nName a file with --out.")
    if not os.access(path if is_device_or_fifo(path) else path.parent, os.W_OK):
        raise ResourceError(f"can't write {path}\nname another place with --out FILE")
    warnings.simplefilter(
        "ignore"
    )  # decode_rgb suppresses them, but not in several threads at once
    bad: list[tuple[str, str]] = []
    with ThreadPoolExecutor(num_threads) as pool:
        for start in cli.track(range(0, len(keys), 32 * num_threads), "reading"):
            chunk = keys[start : start + 32 * num_threads]
            problems = pool.map(lambda key: image_problem(*images[key]), chunk)
            for (name, archive, _), reason in zip(chunk, problems, strict=True):
                if reason is not None:
                    bad.append((name, f"{reason} (in {archive})" if archive else reason))
                    print(f"bad: {name}: {bad[-1][1]}")
    written = (
        bool(bad) or out is not None or path.exists()
    )  # an earlier list would leave out replaced images
    if written:
        lines = "".join(f"{name}\t{reason}\n" for name, reason in bad)
        write_output(path, lines.encode("utf-8", "surrogateescape"))
    print(f"{len(keys):,} images, {len(bad):,} bad" + (f"; wrote {path}" if written else ""))
    if unread:
        print(f"files that are not read, by suffix: {describe_unread(unread)}")
    if bad:
        names = list(dict.fromkeys(name for name, _ in bad))
        remedy = f"leave them out: data.exclude={shlex.quote(str(path))}"
        if config is None and any(
            archive for _, archive, _ in keys
        ):  # paths in data.exclude begin with data.train
            remedy = (
                f"list them for data.exclude with the config: {command_line('verify-data')} CONFIG"
            )
        what = f"{len(bad)} of {len(keys)} images are bad: {join_names(names)}"
        raise DataError(f"{what}\nreplace or delete them, or {remedy}")


def images_below(root: Path) -> tuple[dict[Key, Image], Counter[bytes]]:
    """The images at any depth below a folder, also in archives there, or in the archive `root`.

    Also returns the number of other files by suffix. Raises DataError.
    """
    if root.is_file():
        if not is_archive(root.name):
            raise DataError(
                f"{root}: a file, but no .tar or .zip\ngive a folder, an archive that ends so, or a config"
            )
        return _images([index_archives(root.parent, root.name, [root])], root)
    folders: dict[bytes, os.stat_result | None] = {}
    found, unread = scan_images(os.fsencode(root), b".", folders)
    for suffix in (b".tar", b".zip"):  # they are read below
        del unread[suffix]
    names = np.array(found, bytes)
    indexes = [ImageIndex(root, names, np.zeros(len(names), np.int64), (), unread=unread)]
    for folder in sorted(root / os.fsdecode(name) for name in folders):
        names_here = sorted(
            name for name in os.listdir(folder) if is_archive(name) and name[0] != "."
        )  # noqa: PTH208
        archives = [
            folder / name
            for name in names_here
            if (folder / name).is_file() and has_images(folder / name)
        ]
        if not archives:
            continue
        try:
            indexes.append(index_archives(folder.parent, folder.name, archives))
        except DataError:  # not the shards, or the class tars, of one part
            indexes += [index_archives(folder, path.name, [path]) for path in archives]
    return _images(indexes, root)


def has_images(archive: Path) -> bool:
    """Whether an archive holds images, or tars. Raises DataError if it is damaged before the first one."""
    with open_archive(str(archive)) as file:
        members = (zip_members if archive.suffix.lower() == ".zip" else tar_members)(
            file, str(archive)
        )
        return any(
            is_image(name.rpartition(b"/")[2]) or name.endswith(b".tar") for name, *_ in members
        )


def images_of(data: DataConfig, root: Path) -> tuple[dict[Key, Image], Counter[bytes]]:
    """The images of a config's training and validation parts.

    Also returns the number of other files there by suffix. Raises UsageError for a dataset not made
    of files.
    """
    from imagenet_cls.data.datasets import open_datasets
    from imagenet_cls.data.sources import FolderSource

    if data.name not in FILE_SETS:
        remedy = f"give a folder, or a config with one of {', '.join(FILE_SETS)}"
        raise UsageError(f"data.name {data.name!r} is not made of image files\n{remedy}")
    sets = open_datasets(replace(data, exclude=None), subset=True)
    assert isinstance(sets.train, FolderSource) and isinstance(sets.val, FolderSource)
    images, unread = _images([sets.train.index, sets.val.index], root)
    return images, unread if data.val is not None else Counter(sets.train.index.unread)


def _images(indexes: Sequence[ImageIndex], root: Path) -> tuple[dict[Key, Image], Counter[bytes]]:
    """Each image once, with its path relative to `root`; and the number of other files by suffix."""
    from imagenet_cls.data.sources import FolderSource  # imports torch, which --help should not

    images: dict[Key, Image] = {}
    unread = Counter[bytes]()
    for index in indexes:
        unread.update(index.unread)
        source, spans = FolderSource(index), index.spans
        for i in range(len(index)):
            archive, offset = ("", 0) if spans is None else (spans.archive(i), int(spans.offset[i]))
            images[os.path.relpath(index.path(i), root), archive, offset] = source, i
    return images, unread


def image_problem(source: "FolderSource", i: int) -> str | None:
    """Read and decode image `i`: why it can't be used in training, or None."""
    from imagenet_cls.data.decode import decode_rgb

    try:
        if (
            source.index.spans is None and not source.index.path(i).is_file()
        ):  # reading a pipe would never end
            return "missing, a broken link, or not a regular file"
        decode_rgb(source.read(i))
    except ArchiveChangedError:
        raise
    except DataError as error:
        return str(error)
    except Exception as error:  # damaged files make decoders raise anything; training would end too
        return getattr(error, "strerror", None) or f"{type(error).__name__}: {first_line(error)}"
    return None
