"""The labels of ImageNet's validation images, from its development kit or Kaggle's list."""

import csv
import io
import tarfile
from pathlib import Path

import numpy as np

from imagenet_cls.errors import DataError, explain_content_errors

DEVKIT = "ILSVRC2012_devkit_t12"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
SOLUTION = "LOC_val_solution.csv"  # Kaggle's


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
            f"Put the {DEVKIT}.tar.gz of these images there, or use --labels FILE of "
            "prepare-imagenet.",
        )
    return wnids[Path(name).stem]
