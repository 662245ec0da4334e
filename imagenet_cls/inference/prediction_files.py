"""The files of predictions: a row for each image, as CSV or as lines of JSON."""

import csv
import json
from collections.abc import Iterable
from typing import IO, Any

from imagenet_cls.text import printable


def write_predictions(file: IO[str], rows: Iterable[dict], as_csv: bool) -> None:
    """CSV has the columns image, target (if known), then class and probability, likeliest first."""
    if not as_csv:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    writer = csv.writer(file, lineterminator="\n")
    shown = printable if file.isatty() else str
    for number, row in enumerate(rows):
        cells: dict[str, Any] = {"image": row["image"]}
        if "target" in row:
            cells["target"] = row["target"]
        for rank, (name, probability) in enumerate(row["top"], 1):
            cells[f"class_{rank}"] = shown(name)
            cells[f"probability_{rank}"] = probability
        if number == 0:
            writer.writerow(cells.keys())
        writer.writerow(cells.values())


def write_labels(file: IO[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write predictions of several labels as CSV: image, target (if known), labels and
    probabilities, likeliest first, with `;` between several. `data.name` list reads it: the targets
    if it has them, else the labels.
    """
    shown = printable if file.isatty() else str
    writer = csv.writer(file, lineterminator="\n")
    for number, row in enumerate(rows):
        cells = {"image": row["image"]}
        if "target" in row:
            cells["target"] = "; ".join(row["target"])
        cells["labels"] = "; ".join(shown(name) for name, _ in row["top"])
        cells["probabilities"] = "; ".join(str(probability) for _, probability in row["top"])
        if number == 0:
            writer.writerow(cells.keys())
        writer.writerow(cells.values())
