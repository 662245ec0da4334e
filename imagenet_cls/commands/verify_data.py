"""Read every image of a dataset as training does, and write a list of the bad ones for `data.exclude`."""

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.commands import cli
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archives import find_archives, index_archives
from imagenet_cls.data.classes import join_names
from imagenet_cls.data.index import ImageIndex, scan_images
from imagenet_cls.data.lists import BAD_IMAGES_FILE
from imagenet_cls.errors import DataError, ResourceError, UsageError, first_line
from imagenet_cls.files import explain_write_errors, write_file
from imagenet_cls.parallel.environment import cpu_threads

if TYPE_CHECKING:
    from imagenet_cls.data.sources import FolderSource

FILE_SETS = ("folder", "list", "digits")
Image = tuple["FolderSource", int]  # image of a source


def verify_command(argv: Sequence[str]) -> None:
    parser = cli.build_parser(
        "verify-data",
        "Read and decode every image, and list the bad ones with the reason, for data.exclude. Exit code 0 if all are "
        "good, 3 if some are bad.",
        "ROOT | CONFIG [key=value ...] [--out FILE] [--threads N]",
    )
    parser.add_argument("data", metavar="ROOT | CONFIG", help="a folder or archive, with all images in it; or a config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with CONFIG, such as data.root=/my/images")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: ROOT/bad_images.txt")
    parser.add_argument("--threads", type=cli.positive, metavar="N", help="default: one for each core")
    arguments = parser.parse_intermixed_args(argv)
    verify_data(arguments.data, arguments.overrides, arguments.out, arguments.threads or cpu_threads(1))


def verify_data(data: str, overrides: Sequence[str], out: Path | None, num_threads: int) -> None:
    """Read the images of a folder, or of a config file, and write the list of bad ones to `out`.

    If all are good, an empty list is written only to a given `out` or over an earlier list. Prints each bad image.
    Raises DataError if there is one, ResourceError if `out` can't be written, and UsageError.
    """
    if Path(data).suffix in (".yaml", ".yml"):
        config = load_config(data, overrides).config
        root = Path(config.data.root).expanduser()
        images = images_of(config.data, root)
    elif overrides:
        raise UsageError(f"{overrides[0]!r}: an override of a config, and {data} is none\nname a .yaml file")
    else:
        root = Path(data).expanduser()
        images = images_below(root)
    if not images:
        raise DataError(f"{root}: no image in it\nname the folder that holds the dataset, or a config")
    names = sorted(images)
    path = out or (root.parent if root.is_file() else root) / BAD_IMAGES_FILE
    if not os.access(path.parent, os.W_OK):
        raise ResourceError(f"can't write {path}\nname another place with --out FILE")
    warnings.simplefilter("ignore")  # decode_rgb suppresses them, but not in several threads at once
    bad: dict[str, str] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for start in cli.track(range(0, len(names), 32 * num_threads), "reading"):
            chunk = names[start : start + 32 * num_threads]
            for name, reason in zip(chunk, pool.map(lambda name: image_problem(*images[name]), chunk), strict=True):
                if reason is not None:
                    bad[name] = reason
                    print(f"bad: {name}: {reason}")
    written = bool(bad) or out is not None or path.exists()  # an earlier list would leave out replaced images
    if written:
        with explain_write_errors(path, "name another place with --out FILE"):
            write_file(path, "".join(f"{name}\t{bad[name]}\n" for name in bad).encode("utf-8", "surrogateescape"))
    print(f"{len(names):,} images, {len(bad):,} bad" + (f"; wrote {path}" if written else ""))
    if bad:
        raise DataError(
            f"{len(bad)} of {len(names)} images are bad: {join_names(list(bad))}\n"
            f"replace them; or leave those of the training part out: data.exclude={path}"
        )


def images_below(root: Path) -> dict[str, Image]:
    """The images at any depth below a folder, or in archives, by their paths relative to it. Raises DataError."""
    from imagenet_cls.data.sources import FolderSource  # imports torch, which --help should not

    if archives := find_archives(root.parent, root.name):
        source = FolderSource(index_archives(root.parent, root.name, archives))
    else:
        names = np.array(scan_images(os.fsencode(root), b"."), bytes)
        source = FolderSource(ImageIndex(root, names, np.zeros(len(names), np.int64), ()))
    return {os.path.normpath(source.name(i)): (source, i) for i in range(len(source))}


def images_of(data: DataConfig, root: Path) -> dict[str, Image]:
    """The images of a config's training and validation parts, by their paths relative to `root`.

    Raises UsageError for a dataset that is not made of files, and DataError as `open_datasets` does.
    """
    from imagenet_cls.data.datasets import open_datasets
    from imagenet_cls.data.sources import FolderSource

    if data.name not in FILE_SETS:
        raise UsageError(
            f"data.name {data.name!r} is not made of image files\ngive a folder, or a config with one of "
            f"{', '.join(FILE_SETS)}"
        )
    opened = open_datasets(replace(data, exclude=None), subset=True)
    images: dict[str, Image] = {}
    for source in (opened.train, opened.val):
        assert isinstance(source, FolderSource)
        images |= {os.path.relpath(source.index.path(i), root): (source, i) for i in range(len(source))}
    return images


def image_problem(source: "FolderSource", i: int) -> str | None:
    """Why image `i` can't be used in training, or None. Reads and decodes it; raises nothing for a bad file."""
    from imagenet_cls.data.decode import decode_rgb

    try:
        if source.index.spans is None and not source.index.path(i).is_file():  # reading a pipe would never end
            return "missing, a broken link, or not a regular file"
        decode_rgb(source.read(i))
    except DataError as error:
        return str(error)
    except Exception as error:  # damaged files make decoders raise anything; training would end too
        return getattr(error, "strerror", None) or f"{type(error).__name__}: {first_line(error)}"
    return None
