"""The labels of ImageNet's validation images, from its development kit or Kaggle's list."""

import csv
import io
import tarfile
from pathlib import Path

import numpy as np

from imagenet_cls.errors import DataError
from imagenet_cls.text import first_line

DEVKIT = "ILSVRC2012_devkit_t12"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
SOLUTION = "LOC_val_solution.csv"  # Kaggle's

DEVKIT_NAMES = (SOLUTION, f"{DEVKIT}.tar.gz", DEVKIT)


def validation_labels(file: Path | None) -> dict[str, str]:
    """WordNet ID of each validation image, by its name without suffix. Raises DataError."""
    if file is None or not (file.is_file() or file.is_dir()):
        raise DataError(
            f"The classes of the validation images are unknown: no {file or 'labels in SOURCE'}.",
            f"Put {DEVKIT}.tar.gz or {SOLUTION} into SOURCE, or give one with --labels FILE.",
        )
    try:
        if file.suffix == ".csv":  # ImageId, and a PredictionString that starts with the WordNet ID
            with file.open(newline="", encoding="utf-8-sig") as lines:
                return {
                    row["ImageId"]: row["PredictionString"].split()[0]
                    for row in csv.DictReader(lines)
                }
        return _devkit_labels(file)
    except (
        FileNotFoundError,
        tarfile.TarError,
        csv.Error,
        EOFError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        raise DataError(
            f"{file}: broken labels ({first_line(error)}).", "Download it again."
        ) from None


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


def labels_beside(archive: Path) -> Path:
    """The file with the labels of ImageNet's validation images. Raises DataError."""
    for name in DEVKIT_NAMES:
        if archive.with_name(name).exists():
            return archive.with_name(name)
    raise DataError(
        f"{archive}: its labels are not beside it.", f"Put {DEVKIT}.tar.gz or {SOLUTION} there."
    )


def wnid_of(wnids: dict[str, str], name: str) -> str:
    """The WordNet ID of a validation image. Raises DataError."""
    if Path(name).stem not in wnids:
        raise DataError(
            f"{name}: not one of the {len(wnids)} labeled images.",
            "Give its labels with --labels FILE.",
        )
    return wnids[Path(name).stem]
