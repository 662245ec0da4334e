"""The digits with several labels for an image: in lists, and as the dataset
`labeled_digits:Listed`.
"""

import csv
from pathlib import Path
from typing import Any

LABELS = {"even": "02468", "large": "56789", "prime": "2357"}  # 1 has none


def labels_of(digit: str) -> list[str]:
    return [label for label, digits in LABELS.items() if digit in digits]


def write_lists(digits: Path, root: Path) -> None:
    """`train.csv` and `val.csv` with the paths and labels of some digits, in no order of these."""
    paths = sorted((digits / "train").glob("*/*"), key=lambda path: path.name[::-1])
    for part, chosen in (("train", paths[:300]), ("val", paths[300:360])):
        with (root / f"{part}.csv").open("w", newline="") as file:
            rows = ((path, ";".join(labels_of(path.parent.name))) for path in chosen)
            csv.writer(file).writerows([("path", "labels"), *rows])


class Listed:
    """Map-style: the images of a list of `write_lists`, and rows of zeros and ones."""

    classes = tuple(LABELS)

    def __init__(self, root: str, part: str):
        with (Path(root) / f"{part}.csv").open(newline="") as file:
            self.rows = list(csv.DictReader(file))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Any, list[float]]:
        from PIL import Image

        labels = self.rows[i]["labels"].split(";")
        image = Image.open(self.rows[i]["path"])
        return image, [float(label in labels) for label in LABELS]
