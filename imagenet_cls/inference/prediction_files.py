"""The files of predictions: a row for each image, as CSV or as lines of JSON."""

import csv
import json
from collections.abc import Iterable
from typing import IO, Any

from imagenet_cls.text import printable


def write_predictions(
    file: IO[str], rows: Iterable[dict[str, Any]], as_csv: bool, multilabel: bool = False
) -> None:
    """Write predictions. CSV has the columns image and target (if known), then class and
    probability, likeliest first.

    multilabel: the columns are image, target, labels and probabilities, with `;` between several.
    `data.name` list reads such a file: the targets if it has them, else the labels.
    """
    if not as_csv:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    writer = csv.writer(file, lineterminator="\n")
    shown = printable if file.isatty() else str
    for number, row in enumerate(rows):
        cells: dict[str, Any] = {"image": row["image"]}
        if "target" in row:
            cells["target"] = "; ".join(row["target"]) if multilabel else row["target"]
        if multilabel:
            cells["labels"] = "; ".join(shown(name) for name, _ in row["top"])
            cells["probabilities"] = "; ".join(str(probability) for _, probability in row["top"])
        else:
            for rank, (name, probability) in enumerate(row["top"], 1):
                cells[f"class_{rank}"] = shown(name)
                cells[f"probability_{rank}"] = probability
        if number == 0:
            writer.writerow(cells.keys())
        writer.writerow(cells.values())
