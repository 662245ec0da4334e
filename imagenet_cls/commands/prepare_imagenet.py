"""Unpack ImageNet (ILSVRC2012), from its archives or Kaggle's files, into `OUT/{train,val}/<wnid>/*.JPEG`.

Nothing of the source is changed. A second call continues: each class folder of training images appears when it is
complete, and so does the folder of validation images.
"""

import argparse
import contextlib
import csv
import errno
import io
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagenet_cls.commands import program
from imagenet_cls.errors import DataError, ResourceError, first_line

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
SOLUTION = "LOC_val_solution.csv"
KAGGLE_FOLDERS = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC", ".")


@dataclass(frozen=True)
class Source:
    """Each part as a tar, a folder, or None; and the validation labels: a CSV, or the devkit (.tar.gz or folder)."""

    train: Path | None
    val: Path | None
    labels: Path | None


def main() -> None:
    """`tools/prepare_imagenet.py`."""
    program.main(prepare_command)


def prepare_command(argv: Sequence[str]) -> None:
    """The tool. Raises DataError for a source that is broken or incomplete, and ResourceError for a full disk."""
    parser = program.build_parser(
        "prepare_imagenet.py",
        "Unpack ImageNet-1k into OUT/{train,val}/CLASS/*.JPEG. SOURCE is a folder with the ILSVRC2012 "
        "archives (img_train.tar, img_val.tar, devkit_t12.tar.gz), or with Kaggle's unpacked ILSVRC/Data/CLS-LOC and "
        "LOC_val_solution.csv, or a flat folder of validation images. The same command continues an interrupted one.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("out", type=Path, metavar="OUT")
    labels_help = f"devkit (.tar.gz or folder) or {SOLUTION}, if not in SOURCE"
    parser.add_argument("--labels", type=Path, metavar="FILE", help=labels_help)
    parser.add_argument("--copy", action="store_true", help="copy image files instead of linking to them")
    parser.add_argument("--expect-classes", type=int, default=1000, metavar="N")
    parser.add_argument("--expect-train", type=int, default=1_281_167, metavar="N")
    parser.add_argument("--expect-val", type=int, default=50_000, metavar="N")
    parser.add_argument("--no-count-check", action="store_true", help="do not compare the counts at the end")
    arguments = parser.parse_args(argv)
    prepare(find_source(arguments.source, arguments.labels), arguments.out, arguments.copy)
    check_counts(arguments)


def find_source(folder: Path, labels: Path | None = None) -> Source:
    """What `folder` holds. labels: the validation labels, if not in there. Raises DataError."""
    if labels is not None and not labels.exists():
        raise DataError(f"{labels}: no such file\n--labels takes the devkit (.tar.gz or its folder) or {SOLUTION}")
    parents = [folder / name for name in KAGGLE_FOLDERS]
    train = [folder / TRAIN_TAR, *(parent / "train" for parent in parents)]
    val = [folder / VAL_TAR, *(parent / "val" for parent in parents)]
    # The labels lie next to Kaggle's ILSVRC folder, up to three folders above the images.
    nearby = [
        place / n for place in [folder, *folder.resolve().parents[:3]] for n in (SOLUTION, f"{DEVKIT}.tar.gz", DEVKIT)
    ]
    first = lambda paths: next((path for path in paths if path.exists()), None)  # noqa: E731
    source = Source(first(train), first(val), labels or first(nearby))
    if source.train is None and source.val is None and _images(folder):
        source = replace(source, val=folder)  # a flat folder of validation images
    if source.train is None and source.val is None:
        raise DataError(
            f"{folder}: holds neither {TRAIN_TAR} and {VAL_TAR} nor ILSVRC/Data/CLS-LOC nor train and val folders\n"
            "give the folder that does; unpack Kaggle's zip first"
        )
    return source


def prepare(source: Source, out: Path, copy: bool) -> None:
    """Unpack or link every part of `source` to `out`. Raises DataError and ResourceError."""
    is_flat = source.val is not None and (source.val.is_file() or bool(_images(source.val)))
    labels = validation_labels(source) if is_flat else {}  # first: unpacking takes an hour
    try:
        (out / "train").mkdir(parents=True, exist_ok=True)
        if source.train is not None and source.train.is_file():
            _extract_train(source.train, out / "train")
        elif source.train is not None:
            _link_classes(source.train, out / "train", copy, "train")
        if source.val is None or (out / "val").exists():
            return
        with _complete_folder(out / "val") as folder:
            if source.val.is_file():
                _extract_val(source.val, folder, labels)
            elif is_flat:
                for image in program.track(_images(source.val), "val"):
                    (folder / _label(labels, image.name)).mkdir(exist_ok=True)
                    _place(image, folder / labels[image.stem] / image.name, copy)
            else:
                _link_classes(source.val, folder, copy, "val")
    except (tarfile.TarError, EOFError) as error:
        raise DataError(
            f"{source.train} or {source.val}: broken, truncated or not the published archive ({first_line(error)})\n"
            "compare its size and checksum with the publisher's, and download it again"
        ) from None
    except OSError as error:
        remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "correct that"
        where = error.filename or out
        raise ResourceError(f"{where}: {error.strerror or error}\n{remedy}; the same command then continues") from None


def check_counts(arguments: argparse.Namespace) -> None:
    """Print the counts in OUT. Raises DataError where they are not the expected ones."""
    from imagenet_cls.data.index import index_folder  # takes seconds to import, which --help should not

    train = index_folder(arguments.out / "train")
    val = index_folder(arguments.out / "val", None if arguments.no_count_check else train.classes)
    found = (len(train.classes), len(train), len(val))
    expected = (arguments.expect_classes, arguments.expect_train, arguments.expect_val)
    text = f"{arguments.out}: {found[0]:,} classes, {found[1]:,} training and {found[2]:,} validation images"
    if not arguments.no_count_check and found != expected:
        raise DataError(
            f"{text}; expected {expected[0]:,}, {expected[1]:,} and {expected[2]:,}\n"
            "remove incomplete folders and call this again; or use --no-count-check for a smaller set"
        )
    print(text)


def validation_labels(source: Source) -> dict[str, str]:
    """WordNet ID of each validation image, by its name without suffix. Raises DataError."""
    if source.labels is None:
        raise DataError(
            f"{source.val}: the classes of its images are unknown\n"
            f"put {DEVKIT}.tar.gz or {SOLUTION} into SOURCE, or give it with --labels FILE"
        )
    try:
        if source.labels.suffix == ".csv":  # ImageId, and a PredictionString that starts with the WordNet ID
            with source.labels.open(newline="", encoding="utf-8-sig") as lines:
                return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(lines)}
        return _devkit_labels(source.labels)
    except (tarfile.TarError, csv.Error, EOFError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{source.labels}: broken labels ({first_line(error)})\ndownload it again") from None


def _devkit_labels(devkit: Path) -> dict[str, str]:
    """Line i of the ground truth is the ILSVRC2012_ID of image i; `meta.mat` has the WordNet ID of each."""
    import numpy as np
    from scipy.io import loadmat

    def content(name: str) -> bytes:
        if devkit.is_dir():
            return (devkit / "data" / name).read_bytes()
        with tarfile.open(devkit) as tar:
            file = tar.extractfile(next(member for member in tar.getmembers() if member.name.endswith(f"data/{name}")))
            assert file is not None
            return file.read()

    synsets = np.atleast_1d(loadmat(io.BytesIO(content("meta.mat")), squeeze_me=True)["synsets"])
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    numbers = content(GROUND_TRUTH).split()
    return {f"ILSVRC2012_val_{i:08d}": wnids[int(number)] for i, number in enumerate(numbers, 1)}


def _extract_train(archive: Path, out: Path) -> None:
    """ILSVRC2012_img_train.tar: one tar for each class."""
    with tarfile.open(archive) as outer:
        for member in program.track([member for member in outer if member.name.endswith(".tar")], "train"):
            folder = out / Path(member.name).stem
            if not folder.exists():
                with _complete_folder(folder) as partial, tarfile.open(fileobj=outer.extractfile(member)) as inner:
                    inner.extractall(partial, filter="data")


def _extract_val(archive: Path, folder: Path, labels: dict[str, str]) -> None:
    """ILSVRC2012_img_val.tar: all images in one flat tar."""
    with tarfile.open(archive) as tar:
        for member in program.track([member for member in tar if not member.isdir()], "val"):
            name = Path(member.name).name
            tar.extract(member.replace(name=f"{_label(labels, name)}/{name}"), folder, filter="data")


def _link_classes(source: Path, out: Path, copy: bool, description: str) -> None:
    for class_folder in program.track(sorted(path for path in source.iterdir() if path.is_dir()), description):
        if not (out / class_folder.name).exists():
            with _complete_folder(out / class_folder.name) as partial:
                for image in _images(class_folder):
                    _place(image, partial / image.name, copy)


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))


def _label(labels: dict[str, str], name: str) -> str:
    label = labels.get(Path(name).stem)
    if label is None:
        raise DataError(f"{name}: not one of the {len(labels)} labelled images\ngive its labels with --labels FILE")
    return label


def _place(image: Path, target: Path, copy: bool) -> None:
    """A hard link; else a symbolic link; else, or with `copy`, a copy. The file system decides."""
    for link in () if copy else (os.link, os.symlink):
        try:
            link(image.resolve(), target)
            return
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
    shutil.copyfile(image, target)


@contextlib.contextmanager
def _complete_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill, renamed to `folder` at the end. What an earlier call left of it is removed first."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    partial.rename(folder)
