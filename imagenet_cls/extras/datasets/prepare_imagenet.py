"""`tools/prepare_imagenet.py`: unpack ImageNet (ILSVRC2012).

From its archives or Kaggle's files, into `OUT/{train,val}/<wnid>/*.JPEG`.

Nothing of the source is changed. A second call continues: each class folder of training images
appears when it is complete, and so does the folder of validation images.
"""

import contextlib
import csv
import io
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.errors import DataError, ResourceError, explain_content_errors
from imagenet_cls.extras.datasets.arguments import track
from imagenet_cls.files import take_lock
from imagenet_cls.text import first_line

COUNTS = (1000, 1_281_167, 50_000)  # classes, training and validation images of ImageNet-1k
TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
KAGGLE_FOLDER = "ILSVRC/Data/CLS-LOC"
SOLUTION = "LOC_val_solution.csv"  # Kaggle's labels of the validation images


def prepare_command(argv: Sequence[str]) -> None:
    """Unpack ImageNet. Raises DataError for a source that is broken or incomplete."""
    parser = cli.build_parser(
        "prepare-imagenet",
        "Unpack ImageNet-1k into OUT/{train,val}/CLASS/*.JPEG. SOURCE is a folder with the "
        "ILSVRC2012 archives (img_train.tar, img_val.tar, devkit_t12.tar.gz), or with Kaggle's "
        "unpacked ILSVRC/Data/CLS-LOC and LOC_val_solution.csv, or with a folder val that has the "
        "validation images. The same command continues an interrupted one.",
    )
    parser.add_argument("source", type=cli.path, metavar="SOURCE")
    parser.add_argument("words", nargs="*", metavar="OUT")
    parser.add_argument("--out", type=cli.path, metavar="DIR", help="the same as OUT")
    labels_help = f"devkit (.tar.gz or folder) or {SOLUTION}, if not in SOURCE"
    parser.add_argument("--labels", type=cli.path, metavar="FILE", help=labels_help)
    parser.add_argument(
        "--no-count-check",
        action="store_true",
        help="do not compare the counts with ImageNet's at the end",
    )
    arguments = parser.parse_intermixed_args(argv)
    out = cli.output_folder(arguments.out, arguments.words)
    prepare(arguments.source, out, arguments.labels)
    check_counts(out, must_be_imagenet=not arguments.no_count_check)


def prepare(source: Path, out: Path, labels: Path | None) -> None:
    """Unpack or link the parts that `source` holds to `out`. Raises UsageError if another process
    writes there.
    """
    train = _first(source / TRAIN_TAR, source / KAGGLE_FOLDER / "train", source / "train")
    val = _first(source / VAL_TAR, source / KAGGLE_FOLDER / "val", source / "val")
    if train is None and val is None:
        raise DataError(
            f"{source}: holds neither {TRAIN_TAR} and {VAL_TAR} nor {KAGGLE_FOLDER}.",
            "Give the folder that does; unpack Kaggle's zip first.",
        )
    wnids: dict[str, str] = {}
    if val is not None:  # first: unpacking takes an hour
        # Kaggle's labels are next to ILSVRC, so above a SOURCE that is ILSVRC/Data/CLS-LOC itself.
        wnids = validation_labels(labels or find_labels(source, *source.resolve().parents[:3]))
    try:
        out.mkdir(parents=True, exist_ok=True)
        with take_lock(out, "Wait for that process, or stop it; then the same command continues."):
            if train is not None:
                (out / "train").mkdir(exist_ok=True)
                _write_train(train, out / "train")
            if val is not None and not (out / "val").exists():
                with _complete_folder(out / "val") as folder:
                    _write_val(val, folder, wnids)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(
            f"{train} or {val}: broken, truncated or not the published archive "
            f"({first_line(error)}).",
            "Compare its size and checksum with the publisher's, and download it again.",
        ) from None
    except OSError as error:
        raise ResourceError(
            f"{error.filename or out}: {error.strerror or error}.",
            "Repair the cause; the same command then continues.",
        ) from None


def validation_labels(file: Path) -> dict[str, str]:
    """WordNet ID of each validation image, by its name without suffix. Raises DataError."""
    if not (file.is_file() or file.is_dir()):
        raise DataError(f"{file}: neither a file nor a folder.", "Correct --labels.")
    with explain_content_errors(DataError, file, "broken labels", "Download it again."):
        if file.suffix != ".csv":
            return _devkit_labels(file)
        # ImageId, and a PredictionString that starts with the WordNet ID
        with file.open(newline="", encoding="utf-8-sig") as lines:
            return {
                row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(lines)
            }


def _devkit_labels(devkit: Path) -> dict[str, str]:
    """Line i of the ground truth is the ILSVRC2012_ID of image i; `meta.mat` has the WordNet ID of
    each.
    """
    from scipy.io import loadmat

    def content(name: str) -> bytes:
        if devkit.is_dir():
            return (devkit / "data" / name).read_bytes()
        with tarfile.open(devkit) as tar:
            file = tar.extractfile(f"{DEVKIT}/data/{name}")
            assert file is not None
            return file.read()

    synsets = np.atleast_1d(loadmat(io.BytesIO(content("meta.mat")), squeeze_me=True)["synsets"])
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    numbers = content(GROUND_TRUTH).split()
    return {f"ILSVRC2012_val_{i:08d}": wnids[int(number)] for i, number in enumerate(numbers, 1)}


def find_labels(*folders: Path) -> Path:
    """The file with the labels of ImageNet's validation images in the first folder that has one.
    Raises DataError.
    """
    for folder in folders:
        for name in (SOLUTION, f"{DEVKIT}.tar.gz", DEVKIT):
            if (folder / name).exists():
                return folder / name
    raise DataError(
        f"{folders[0]}: the labels of the validation images are not there.",
        f"Put {DEVKIT}.tar.gz or {SOLUTION} there.",
    )


def wnid_of(wnids: dict[str, str], name: str) -> str:
    """The WordNet ID of a validation image. Raises DataError."""
    if Path(name).stem not in wnids:
        raise DataError(
            f"{name}: not one of the {len(wnids)} labeled images.",
            f"Put the {DEVKIT}.tar.gz of these images there, or use --labels FILE.",
        )
    return wnids[Path(name).stem]


def check_counts(out: Path, must_be_imagenet: bool) -> None:
    """Print the counts in `out`: classes, training and validation images. Raises DataError unless
    they are ImageNet's. The images of a single part are not counted.
    """
    missing = [part for part in ("train", "val") if not (out / part).is_dir()]
    if missing:
        print(f"{out}: no folder {missing[0]} yet")
        return
    from imagenet_cls.data.datasets import open_datasets  # imports torch

    opened = open_datasets(DataConfig(root=str(out)), allow_missing=not must_be_imagenet)
    train, val = opened.train, opened.val
    text = "{:,} classes, {:,} training and {:,} validation images"
    found = text.format(len(train.classes), len(train), len(val))
    expected = text.format(*COUNTS)
    if must_be_imagenet and found != expected:
        raise DataError(
            f"{out}: {found}; expected {expected}.",
            "Remove incomplete folders and call this again; or use --no-count-check for a smaller "
            "set.",
        )
    print(f"{out}: {found}")


def _write_train(source: Path, out: Path) -> None:
    """source: ILSVRC2012_img_train.tar, with one tar for each class, or class folders."""
    if not source.is_file():
        folders = sorted(path for path in source.iterdir() if path.is_dir())
        for class_folder in track(folders, "train"):
            if not (out / class_folder.name).exists():
                with _complete_folder(out / class_folder.name) as partial:
                    for image in _images(class_folder):
                        _place(image, partial / image.name)
        return
    with tarfile.open(source) as outer:
        class_tars = [member for member in outer if member.name.endswith(".tar")]
        for member in track(class_tars, "train"):
            folder = out / Path(member.name).stem
            if not folder.exists():
                content = outer.extractfile(member)
                with _complete_folder(folder) as partial, tarfile.open(fileobj=content) as inner:
                    inner.extractall(partial, filter="data")


def _write_val(source: Path, folder: Path, wnids: dict[str, str]) -> None:
    """source: ILSVRC2012_img_val.tar, or a folder; either has all images at its top."""
    if not source.is_file():
        images = _images(source)
        if not images:
            raise DataError(
                f"{source}: holds no images.",
                "Unpack the validation images there, without class folders.",
            )
        for image in track(images, "val"):
            _place(image, folder / wnid_of(wnids, image.name) / image.name)
        return
    with tarfile.open(source) as tar:
        for member in track([member for member in tar if not member.isdir()], "val"):
            name = Path(member.name).name
            placed = member.replace(name=f"{wnid_of(wnids, name)}/{name}")
            tar.extract(placed, folder, filter="data")


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))


def _place(image: Path, target: Path) -> None:
    """A hard link, or where the file system has none, a symbolic one."""
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(image.resolve(), target)
    except OSError:  # such as another file system
        target.symlink_to(image.resolve())


@contextlib.contextmanager
def _complete_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill, renamed to `folder` at the end. What an earlier call left of it is
    removed first.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    partial.rename(folder)
