"""The forms in which ImageNet (ILSVRC2012) is handed out: finding them, their labels, and what a tar member may be.

Owns file names and formats of the publisher and of Kaggle. Refuses archives that would write outside their folder.
Called by `prepare`.
"""

import csv
import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from imagenet_cls.data.layout import class_folders, images_in
from imagenet_cls.errors import DataError

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12"
SOLUTION = "LOC_val_solution.csv"
KAGGLE_FOLDERS = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC", ".")
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


@dataclass(frozen=True)
class Source:
    """What was found: each part as a tar or as a folder, and where the validation labels are (a CSV, or the devkit)."""

    train_tar: Path | None
    train_folder: Path | None
    val_tar: Path | None
    val_folder: Path | None
    labels: Path | None


def find_source(folder: Path, labels: Path | None = None) -> Source:
    """Recognise what `folder` holds. labels: where the validation labels are, if not there. Raises DataError."""
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder\ngive the folder that holds the archives, or Kaggle's unpacked files"
        )
    if labels is not None and not labels.exists():
        raise DataError(f"{labels}: no such file\n--labels takes the devkit (.tar.gz or its folder) or {SOLUTION}")
    train_tar, val_tar = folder / TRAIN_TAR, folder / VAL_TAR
    bases = [folder / name for name in KAGGLE_FOLDERS]
    train = next((base / "train" for base in bases if (base / "train").is_dir()), None)
    val = next((base / "val" for base in bases if (base / "val").is_dir()), None)
    if val is None and not train and images_in(folder):
        val = folder
    source = Source(
        train_tar if train_tar.is_file() else None,
        train,
        val_tar if val_tar.is_file() else None,
        val,
        labels or _find_labels(folder),
    )
    if not any((source.train_tar, source.train_folder, source.val_tar, source.val_folder)):
        raise DataError(
            f"{folder}: holds neither {TRAIN_TAR} and {VAL_TAR} nor ILSVRC/Data/CLS-LOC nor train and val folders\n"
            "give the folder that does; unpack Kaggle's zip first"
        )
    return source


def _find_labels(folder: Path) -> Path | None:
    """The solution or the devkit, in `folder` or up to three folders above (it lies beside Kaggle's ILSVRC folder)."""
    for place in [folder, *folder.resolve().parents[:3]]:
        for name in (SOLUTION, f"{DEVKIT}.tar.gz", DEVKIT):
            if (place / name).exists():
                return place / name
    return None


def validation_labels(source: Source) -> dict[str, str]:
    """WordNet ID of each validation image, by its name without suffix; empty where the images are sorted already.

    Raises DataError where labels are needed and missing, or cannot be read.
    """
    flat = source.val_tar is not None or (source.val_folder is not None and images_in(source.val_folder) > 0)
    if not flat or (source.val_tar is None and source.val_folder is not None and class_folders(source.val_folder)):
        return {}
    if source.labels is None:
        raise DataError(
            f"{source.val_tar or source.val_folder}: the classes of its images are not known\n"
            f"put {DEVKIT}.tar.gz or {SOLUTION} into SOURCE, or give it with --labels FILE"
        )
    try:
        if source.labels.suffix == ".csv":
            return _labels_from_solution(source.labels)
        return _labels_from_devkit(source.labels)
    except (tarfile.TarError, csv.Error, EOFError, LookupError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{source.labels}: broken as validation labels ({reason})\ndownload it again") from None


def _labels_from_solution(file: Path) -> dict[str, str]:
    """Kaggle's CSV: ImageId, and a PredictionString that begins with the WordNet ID."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(lines)}


def _labels_from_devkit(devkit: Path) -> dict[str, str]:
    """Line i of the ground truth is the ILSVRC2012_ID of image i; `meta.mat` has the WordNet ID of each."""
    from scipy.io import loadmat  # here: only this needs it

    def content(name: str) -> bytes:
        if devkit.is_dir():
            return (devkit / "data" / name).read_bytes()
        with tarfile.open(devkit) as tar:
            member = next((m for m in tar if m.isfile() and m.name.endswith(f"data/{name}")), None)
            if member is None:
                raise ValueError(f"holds no data/{name}")
            file = tar.extractfile(member)
            assert file is not None
            return file.read()

    synsets = np.atleast_1d(loadmat(io.BytesIO(content("meta.mat")), squeeze_me=True)["synsets"])
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    numbers = content(GROUND_TRUTH).split()
    return {f"ILSVRC2012_val_{i:08d}": wnids[int(number)] for i, number in enumerate(numbers, 1)}


def safe_members(tar: tarfile.TarFile, archive: Path) -> Iterable[tarfile.TarInfo]:
    """The regular files of a tar. Raises DataError for links and names that point outside: ImageNet's have none."""
    for member in tar:
        name = PurePosixPath(member.name)
        if member.isdir():
            continue
        if not member.isfile() or name.is_absolute() or ".." in name.parts or "\\" in member.name:
            raise DataError(
                f"{archive}: its member {member.name!r} is a link or points outside the archive\n"
                "this is not ImageNet as it was published: download it from the publisher"
            )
        yield member
