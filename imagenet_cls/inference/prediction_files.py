"""The files of predictions: a row for each image, as CSV or as lines of JSON."""

import csv
import json
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

from imagenet_cls.text import printable

if TYPE_CHECKING:
    from imagenet_cls.tasks import Task


def write_predictions(
    file: IO[str], rows: Iterable[dict[str, Any]], as_csv: bool, task: "Task"
) -> None:
    """Write predictions. CSV has the column image, then those of `Task.csv_cells`."""
    if not as_csv:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    writer = csv.writer(file, lineterminator="\n")
    shown = printable if file.isatty() else str
    for number, row in enumerate(rows):
        cells = {"image": row["image"], **task.csv_cells(row, shown)}
        if number == 0:
            writer.writerow(cells.keys())
        writer.writerow(cells.values())
