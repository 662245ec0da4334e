"""`tools/verify_data.py`: read every image of a dataset as training does.

Writes a list of the bad ones for `data.exclude`.
"""

import os
import shlex
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import Config
from imagenet_cls.data.index import describe_unread
from imagenet_cls.data.lists import BAD_IMAGES_FILE
from imagenet_cls.errors import DataError, ResourceError, UsageError
from imagenet_cls.extras.datasets.arguments import add_data_options, load_config_if_given, track
from imagenet_cls.files import check_replaced, write_output
from imagenet_cls.text import command_line, join_names

if TYPE_CHECKING:
    from imagenet_cls.data.image_set import FileImages, ImageSet

Image = tuple["FileImages", int]  # what reads an image, and its number
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
        type=cli.path,
        metavar="ROOT | CONFIG",
        help="a folder or archive, with all images and archives in it; or a config",
    )
    add_data_options(parser)
    parser.add_argument(
        "--out",
        type=cli.path,
        metavar="FILE",
        help="default: ROOT/bad_images.txt; only a file of this name is replaced",
    )
    arguments = parser.parse_intermixed_args(argv)
    verify_data(str(arguments.data), arguments.overrides, arguments.out, arguments.threads)


def verify_data(data: str, overrides: Sequence[str], out: Path | None, num_threads: int) -> None:
    """Read the images of a folder, or of a config file, print the bad ones, and write a list of
    them to `out`.

    If all are good, an empty list is written only to a given `out` or over an earlier list. Raises
    DataError if one is bad, ResourceError if `out` can't be written, and UsageError.
    """
    config = load_config_if_given(data, overrides)
    root = Path(config.data.root if config else data).expanduser()
    from imagenet_cls.data.every_image import every_image  # imports torch

    sets = every_image(config.data if config else root)
    images = images_by_key(sets, root)
    unread = Counter[bytes]()
    files = {chosen.files for chosen in sets}  # two parts may be of the same ones
    for part in files:
        unread.update(part.index.unread)
    if not images:
        others = f", and other files: {describe_unread(unread)}" if unread else ""
        raise DataError(
            f"{root}: no image in it{others}.",
            "Name the folder that holds the dataset, or a config.",
        )
    path = out or (root.parent if root.is_file() else root) / BAD_IMAGES_FILE
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", "Name a file with --out.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ResourceError(f"Can't write {path}.", "Name another file with --out FILE.")
    if path.name != BAD_IMAGES_FILE:
        check_replaced(path)
    bad = find_bad_images(images, num_threads, config or Config())
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
        if config is None and any(part.index.byte_ranges is not None for part in files):
            # paths in data.exclude begin with data.train
            verify = f"{command_line('verify-data')} CONFIG"
            remedy = f"list them for data.exclude with the config: {verify}"
        names = list(dict.fromkeys(name for name, _ in bad))
        raise DataError(
            f"{len(bad)} of {len(images)} images are bad: {join_names(names)}.",
            f"Replace or delete them, or {remedy}",
        )


def find_bad_images(
    images: Mapping[Key, Image], num_threads: int, config: Config
) -> list[tuple[str, str]]:
    """Path and reason of each bad image, in the order of the keys. Prints them, too."""
    from imagenet_cls.data.every_image import image_problem

    # decoding uses warnings.catch_warnings, which is not thread-safe
    warnings.simplefilter("ignore")
    keys = sorted(images)
    bad = []
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
