"""Read every image of a data set as training does, and write a list of the bad ones for `data.exclude`."""

import os
import stat
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from imagenet_cls.commands import program
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.errors import DataError, ResourceError, UsageError, first_line
from imagenet_cls.files import explain_write_errors, write_file
from imagenet_cls.parallel.environment import cpu_threads

FILE_SETS = ("folder", "list", "digits")


def main() -> None:
    """`tools/verify_data.py`."""
    program.main(verify_command)


def verify_command(argv: Sequence[str]) -> None:
    parser = program.build_parser(
        "verify_data.py",
        "Read and decode every image, and list the bad ones with the reason, for data.exclude. Exit code 0 if all are "
        "good, 3 if some are bad.",
        "ROOT | CONFIG [key=value ...] [--out FILE] [--threads N]",
    )
    parser.add_argument("data", metavar="ROOT | CONFIG", help="a folder, with all images in it; or a config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with CONFIG, such as data.root=/my/images")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: ROOT/bad_images.txt")
    parser.add_argument("--threads", type=program.positive, metavar="N", help="default: one for each core")
    arguments = parser.parse_intermixed_args(argv)
    verify_data(arguments.data, arguments.overrides, arguments.out, arguments.threads or cpu_threads(1))


def verify_data(data: str, overrides: Sequence[str], out: Path | None, num_threads: int) -> None:
    """Read the images of a folder, or of a config file, and write the list of bad ones to `out`.

    Prints each bad image. Raises DataError if there is one, ResourceError if `out` can't be written, and UsageError.
    """
    from imagenet_cls.data.index import listed
    from imagenet_cls.data.lists import BAD_IMAGES_FILE  # takes seconds to import, which --help should not

    if Path(data).suffix in (".yaml", ".yml"):
        config = load_config(data, overrides).config
        root, names = Path(config.data.root).expanduser(), images_of(config.data)
    elif overrides:
        raise UsageError(f"{overrides[0]!r}: an override of a config, and {data} is none\nname a .yaml file")
    else:
        root = Path(data).expanduser()
        names = images_below(root)
    path = out or root / BAD_IMAGES_FILE
    if not os.access(path.parent, os.W_OK):
        raise ResourceError(f"can't write {path}\nname another place with --out FILE")
    warnings.simplefilter("ignore")  # decode_rgb suppresses them, but not in several threads at once
    bad: dict[str, str] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for start in program.track(range(0, len(names), 32 * num_threads), "reading"):
            chunk = names[start : start + 32 * num_threads]
            for name, reason in zip(chunk, pool.map(lambda name: image_problem(root, name), chunk), strict=True):
                if reason is not None:
                    bad[os.fsdecode(name)] = reason
                    print(f"bad: {os.fsdecode(name)}: {reason}")
    with explain_write_errors(path, "name another place with --out FILE"):
        write_file(path, "".join(f"{name}\t{bad[name]}\n" for name in bad).encode("utf-8", "surrogateescape"))
    print(f"{len(names):,} images, {len(bad):,} bad; wrote {path}")
    if bad:
        raise DataError(
            f"{len(bad)} of {len(names)} images are bad: {listed(list(bad))}\n"
            f"replace them; or leave those of the training part out: data.exclude={path}"
        )


def images_below(root: Path) -> list[bytes]:
    """Every image at any depth below `root`, as sorted paths relative to it. Raises DataError."""
    from imagenet_cls.data.index import scan_images

    names = sorted(name.removeprefix(b"./") for name in scan_images(os.fsencode(root), b"."))
    if not names:
        raise DataError(f"{root}: no image in it\nname the folder that holds the data set, or a config")
    return names


def images_of(data: DataConfig) -> list[bytes]:
    """The images of a config's training and validation parts: sorted paths relative to its root, or absolute.

    Raises UsageError for a data set that is not made of files, and DataError as `open_datasets` does.
    """
    from imagenet_cls.data import open_datasets
    from imagenet_cls.data.sources import FolderSource

    if data.name not in FILE_SETS:
        raise UsageError(
            f"data.name {data.name!r} is not made of image files\ngive a folder, or a config with one of "
            f"{', '.join(FILE_SETS)}"
        )
    opened = open_datasets(replace(data, exclude=None))
    base = os.fsencode(os.path.abspath(Path(data.root).expanduser())) + b"/"  # noqa: PTH100 (no links resolved)
    names = set()
    for source in (opened.train, opened.val):
        assert isinstance(source, FolderSource)
        start = os.fsencode(os.path.abspath(source.index.root))  # noqa: PTH100
        for i in range(len(source)):
            path = os.path.normpath(os.path.join(start, source.index.raw_name(i)))  # noqa: PTH118
            names.add(path.removeprefix(base))
    return sorted(names)


def image_problem(root: Path, name: bytes) -> str | None:
    """Why an image can't be used in training, or None. Reads and decodes it; raises nothing for a bad file."""
    from imagenet_cls.data import decode_rgb

    path = os.path.join(os.fsencode(root), name)  # noqa: PTH118
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return "not a regular file"  # reading a pipe would never end
        with open(path, "rb") as file:  # noqa: PTH123
            decode_rgb(file.read())
    except OSError as error:
        return error.strerror or str(error)
    except DataError as error:
        return str(error)
    except Exception as error:  # damaged files make decoders raise anything; training would end too
        return f"{type(error).__name__}: {first_line(error)}"
    return None
