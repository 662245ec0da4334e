"""The files of predictions: a row for each image, as CSV or as lines of JSON."""

import csv
import json
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

from imagenet_cls.data.classes import readable_name
from imagenet_cls.text import printable

if TYPE_CHECKING:
    from imagenet_cls.tasks import Task


def write_predictions(
    file: IO[str], rows: Iterable[dict[str, Any]], as_csv: bool, task: "Task"
) -> None:
    """Write predictions. CSV has the column image, then those of `Task.csv_cells`. Where classes
    are named by WordNet ids, the last column, `name`, is what people call the likeliest one.
    """
    writer = csv.writer(file, lineterminator="\n")
    shown = printable if file.isatty() else str
    has_names = False
    for number, row in enumerate(rows):
        names = [readable_name(name) for name, _ in row["top"][:1]]
        has_names |= number == 0 and any(names)
        more = {"name": "".join(names)} if has_names else {}
        if not as_csv:
            file.write(json.dumps(row | more) + "\n")
            continue
        cells = {"image": row["image"], **task.csv_cells(row, shown), **more}
        if number == 0:
            writer.writerow(cells.keys())
        writer.writerow(cells.values())
