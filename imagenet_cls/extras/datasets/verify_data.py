"""`tools/verify_data.py`: read every image of a dataset as training does.

Writes a list of the bad ones for `data.exclude`.
"""

import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import Config
from imagenet_cls.data.lists import BAD_IMAGES_FILE
from imagenet_cls.errors import DataError, ResourceError, UsageError
from imagenet_cls.extras.datasets.arguments import track
from imagenet_cls.files import check_replaced, write_output
from imagenet_cls.parallel.cpus import cpu_threads
from imagenet_cls.text import join_names

if TYPE_CHECKING:
    from imagenet_cls.data.image_set import FileImages, ImageSet

Image = tuple["FileImages", int]  # what reads an image, and its number
# path in the list of bad images; archive and offset in it, since shards reuse paths
Key = tuple[str, str, int]


def verify_command(argv: Sequence[str]) -> None:
    """Read the images of both parts of a dataset, print the bad ones, and write a list of them.

    If all are good, an empty list is written only to a given --out or over an earlier list. Raises
    DataError if one is bad, ResourceError if the list can't be written, and UsageError.
    """
    parser = cli.build_parser(
        "verify-data",
        "Read and decode every image, and list the bad ones with the reason, for data.exclude. "
        "Exit code 0 if all are good, 3 if some are bad.",
        "CONFIG|DATA [key=value ...] [--out FILE]",
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE",
        help="default: bad_images.txt in data.root; only a file of this name is replaced",
    )
    arguments = cli.parse(parser, argv)
    config = cli.load_one_config(arguments, parser).config
    from imagenet_cls.data.every_image import every_image  # imports torch

    root = Path(config.data.root).expanduser()
    images = images_by_key(every_image(config.data), root)
    out = arguments.out
    path = out or (root.parent if root.is_file() else root) / BAD_IMAGES_FILE
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", "Name a file with --out.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ResourceError(f"Can't write {path}.", "Name another file with --out FILE.")
    if path.name != BAD_IMAGES_FILE:
        check_replaced(path)
    bad = find_bad_images(images, config)
    # an earlier list would leave out replaced images
    is_written = bool(bad) or out is not None or path.exists()
    if is_written:
        lines = "".join(f"{name}\t{reason}\n" for name, reason in bad)
        write_output(path, lines.encode("utf-8", "surrogateescape"))
    print(f"{len(images):,} images, {len(bad):,} bad" + (f"; wrote {path}" if is_written else ""))
    if bad:
        names = list(dict.fromkeys(name for name, _ in bad))
        raise DataError(
            f"{len(bad)} of {len(images)} images are bad: {join_names(names)}.",
            f"Replace or delete them, or leave them out: data.exclude={shlex.quote(str(path))}",
        )


def find_bad_images(images: Mapping[Key, Image], config: Config) -> list[tuple[str, str]]:
    """Path and reason of each bad image, in the order of the keys. Prints them, too."""
    from imagenet_cls.data.every_image import image_problem

    # decoding uses warnings.catch_warnings, which is not thread-safe
    warnings.simplefilter("ignore")
    keys = sorted(images)
    bad = []
    num_threads = cpu_threads()
    with ThreadPoolExecutor(num_threads) as pool:
        # in chunks, since a task for each image of ImageNet would take gigabytes
        for start in track(range(0, len(keys), 32 * num_threads), "reading"):
            chunk = keys[start : start + 32 * num_threads]
            problems = pool.map(lambda key: image_problem(*images[key], config.eval), chunk)
            for (name, archive, _), reason in zip(chunk, problems, strict=True):
                if reason is not None:
                    where = f" (in {archive})" if archive else ""
                    bad.append((name, reason + where))
                    print(f"bad: {name}: {reason}{where}")
    return bad


def images_by_key(sets: "Sequence[ImageSet]", root: Path) -> dict[Key, Image]:
    """Each image once, with its path relative to `root`."""
    images: dict[Key, Image] = {}
    for chosen in sets:
        index = chosen.files.index
        for i in chosen.numbers.tolist():
            archive = ""
            offset = 0
            if index.byte_ranges is not None:
                archive = index.byte_ranges.archive(i)
                offset = int(index.byte_ranges.places[i, 1])
            images[os.path.relpath(index.path(i), root), archive, offset] = chosen.files, i
    return images
