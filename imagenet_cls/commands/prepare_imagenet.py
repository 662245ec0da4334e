"""Unpack ImageNet (ILSVRC2012), from its archives or Kaggle's files, into `OUT/{train,val}/<wnid>/*.JPEG`.

Nothing of the source is changed. A second call continues: each class folder of training images appears when it is
complete, and so does the folder of validation images.
"""

import contextlib
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from imagenet_cls.commands import cli
from imagenet_cls.data.archives import TRAIN_TAR, VAL_TAR
from imagenet_cls.data.imagenet_labels import DEVKIT_NAMES, SOLUTION, validation_labels, wnid_of
from imagenet_cls.data.index import index_folder
from imagenet_cls.errors import DataError, ResourceError, first_line
from imagenet_cls.files import take_lock

KAGGLE_FOLDER = "ILSVRC/Data/CLS-LOC"


def prepare_command(argv: Sequence[str]) -> None:
    """Unpack ImageNet. Raises DataError for a source that is broken or incomplete."""
    parser = cli.build_parser(
        "prepare-imagenet",
        "Unpack ImageNet-1k into OUT/{train,val}/CLASS/*.JPEG. SOURCE is a folder with the ILSVRC2012 "
        "archives (img_train.tar, img_val.tar, devkit_t12.tar.gz), or with Kaggle's unpacked ILSVRC/Data/CLS-LOC and "
        "LOC_val_solution.csv, or a flat folder of validation images. The same command continues an interrupted one.",
    )
    parser.add_argument("source", type=cli.path, metavar="SOURCE")
    parser.add_argument("out", type=cli.path, metavar="OUT")
    labels_help = f"devkit (.tar.gz or folder) or {SOLUTION}, if not in SOURCE"
    parser.add_argument("--labels", type=cli.path, metavar="FILE", help=labels_help)
    parser.add_argument(
        "--copy", action="store_true", help="copy image files instead of linking to them"
    )
    parser.add_argument("--expect-classes", type=int, default=1000, metavar="N")
    parser.add_argument("--expect-train", type=int, default=1_281_167, metavar="N")
    parser.add_argument("--expect-val", type=int, default=50_000, metavar="N")
    parser.add_argument(
        "--no-count-check", action="store_true", help="do not compare the counts at the end"
    )
    arguments = parser.parse_args(argv)
    prepare(arguments.source, arguments.out, arguments.labels, arguments.copy)
    expected = (arguments.expect_classes, arguments.expect_train, arguments.expect_val)
    check_counts(arguments.out, None if arguments.no_count_check else expected)


def prepare(source: Path, out: Path, labels: Path | None, copy: bool) -> None:
    """Unpack or link the parts that `source` holds to `out`. Raises UsageError if another process writes there."""
    train = _first(source / TRAIN_TAR, source / KAGGLE_FOLDER / "train", source / "train")
    val = _first(source / VAL_TAR, source / KAGGLE_FOLDER / "val", source / "val")
    if train is None and val is None and source.is_dir() and _images(source):
        val = source
    if train is None and val is None:
        remedy = "give the folder that does; unpack Kaggle's zip first"
        raise DataError(
            f"{source}: holds neither {TRAIN_TAR} and {VAL_TAR} nor {KAGGLE_FOLDER} nor images\n{remedy}"
        )
    wnids: dict[str, str] = {}
    if val is not None:  # first: unpacking takes an hour
        # Kaggle's labels are next to ILSVRC, so above a SOURCE that is ILSVRC/Data/CLS-LOC itself.
        folders = [source, *source.resolve().parents[:3]]
        wnids = validation_labels(
            labels or _first(*(folder / name for folder in folders for name in DEVKIT_NAMES))
        )
    try:
        (out / "train").mkdir(parents=True, exist_ok=True)
        with take_lock(out, "Wait for that process, or stop it; then the same command continues."):
            if train is not None:
                _write_train(train, out / "train", copy)
            if val is not None and not (out / "val").exists():
                with _complete_folder(out / "val") as folder:
                    _write_val(val, folder, wnids, copy)
    except (tarfile.TarError, EOFError) as error:
        remedy = "compare its size and checksum with the publisher's, and download it again"
        text = f"{train} or {val}: broken, truncated or not the published archive ({first_line(error)})"
        raise DataError(f"{text}\n{remedy}") from None
    except OSError as error:
        text = f"{error.filename or out}: {error.strerror or error}"
        raise ResourceError(f"{text}\ncorrect that; the same command then continues") from None


def check_counts(out: Path, expected: tuple[int, int, int] | None) -> None:
    """Print the counts in `out`: classes, training and validation images. Raises DataError unless as expected."""
    train = index_folder(out / "train")
    val = index_folder(out / "val", None if expected is None else train.classes)
    found = (len(train.classes), len(train), len(val))
    text = "{:,} classes, {:,} training and {:,} validation images"
    if expected not in (None, found):
        raise DataError(
            f"{out}: {text.format(*found)}; expected {text.format(*expected)}\n"
            "remove incomplete folders and call this again; or use --no-count-check for a smaller set"
        )
    print(f"{out}: {text.format(*found)}")


def _write_train(source: Path, out: Path, copy: bool) -> None:
    """source: ILSVRC2012_img_train.tar, with one tar for each class, or class folders."""
    if not source.is_file():
        for class_folder in cli.track(
            sorted(path for path in source.iterdir() if path.is_dir()), "train"
        ):
            if not (out / class_folder.name).exists():
                with _complete_folder(out / class_folder.name) as partial:
                    for image in _images(class_folder):
                        _place(image, partial / image.name, copy)
        return
    with tarfile.open(source) as outer:
        for member in cli.track(
            [member for member in outer if member.name.endswith(".tar")], "train"
        ):
            folder = out / Path(member.name).stem
            if not folder.exists():
                with (
                    _complete_folder(folder) as partial,
                    tarfile.open(fileobj=outer.extractfile(member)) as inner,
                ):
                    inner.extractall(partial, filter="data")


def _write_val(source: Path, folder: Path, wnids: dict[str, str], copy: bool) -> None:
    """source: ILSVRC2012_img_val.tar, or a folder; either has all images at its top."""
    if not source.is_file():
        images = _images(source)
        if not images:
            raise DataError(
                f"{source}: holds no images\nunpack the validation images there, without class folders"
            )
        for image in cli.track(images, "val"):
            _place(image, folder / wnid_of(wnids, image.name) / image.name, copy)
        return
    with tarfile.open(source) as tar:
        for member in cli.track([member for member in tar if not member.isdir()], "val"):
            name = Path(member.name).name
            tar.extract(
                member.replace(name=f"{wnid_of(wnids, name)}/{name}"), folder, filter="data"
            )


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))


def _place(image: Path, target: Path, copy: bool) -> None:
    """A hard link, or where the file system has none, a symbolic one; with `copy`, a copy."""
    target.parent.mkdir(exist_ok=True)
    if copy:
        shutil.copyfile(image, target)
        return
    try:
        os.link(image.resolve(), target)
    except OSError:  # such as another file system
        target.symlink_to(image.resolve())


@contextlib.contextmanager
def _complete_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill, renamed to `folder` at the end. What an earlier call left of it is removed first."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    partial.rename(folder)
