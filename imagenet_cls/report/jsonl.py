"""`metrics.jsonl`: one JSON object on each line, appended. A resumed run first drops the records that it writes again.

`step` counts optimizer steps from 1, skipped ones included; `epoch` counts from 0:

    {"kind": "train", "step", "epoch", "loss", "lr", "grad_norm"}  for every step; the last of each logging interval has
                                                                   "images_per_sec", "data_wait_pct", "memory_mib" too
    {"kind": "eval", "step", "epoch", "weights": "raw" | "ema", "top1_pct", "top5_pct", "loss", "images", "seconds"}
    {"kind": "event", "step", "message"}

The train record of a step whose update was skipped, because the gradient norm was not finite, has "skipped": true.

JSON has no NaN and infinity: they are written as the strings "NaN", "Infinity" and "-Infinity", which `float()` of
Python and `Number()` of JavaScript accept. `read_metrics` converts them back to numbers.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from imagenet_cls.errors import CheckpointError
from imagenet_cls.files import explain_write_errors, write_file

Record = dict[str, Any]

WRITE_REMEDY = "Make room or restore access, then resume from the last checkpoint with --resume."
_TEXT_KEYS = ("kind", "weights", "message")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """Appends records to one file. Lines reach the file at `flush`, and the disk at `sync`.

    path: created if missing, with its folder. To append to the file of a killed run, call `truncate_after` first: it
    drops an incomplete last line. All methods but `write` raise ResourceError where the file system fails. Records that
    could not be written are kept for the next flush, so each is written once. Thread-safe.
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting = b""
        self._lock = Lock()
        with explain_write_errors(path, WRITE_REMEDY):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record: a flat mapping of names to numbers and strings."""
        line = json.dumps({key: _encode(value) for key, value in record.items()}, allow_nan=False, ensure_ascii=False)
        with self._lock:
            self._waiting += line.encode() + b"\n"

    def flush(self) -> None:
        """Write all records to the file: they survive if this process is killed."""
        with self._lock, explain_write_errors(self.path, WRITE_REMEDY):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]

    def sync(self) -> None:
        """Flush and call fsync: the records survive a power failure."""
        self.flush()
        with explain_write_errors(self.path, WRITE_REMEDY):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close; may be called again. The file is closed even where the flush fails."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            with explain_write_errors(self.path, WRITE_REMEDY):
                self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """All records of the file, in order; [] if there is no file. An unfinished last line is left out.

    Raises CheckpointError, with file and line, where any other line is not a JSON object with `kind` and `step`.
    """
    return [record for _, record in _read_lines(path)]


def missing_steps(path: Path, step: int) -> str:
    """A message that names the steps up to `step` without a train record; "" if each has one.

    A run that was started from another run's checkpoint has records from that step on: steps before the first record
    count as missing only if there are no records at all. Raises as `truncate_after` does.
    """
    with explain_write_errors(path, WRITE_REMEDY):
        kinds = ((record["kind"], record["step"]) for record in read_metrics(path))
        steps = {number for kind, number in kinds if kind == "train" and 1 <= number <= step}
    missing = [number for number in range(min(steps, default=1), step + 1) if number not in steps]
    if not missing:
        return ""
    return (
        f"{path}: {len(missing)} of the steps up to {step} are missing, the first is {missing[0]}: "
        "the result is the same, but the curves have a gap"
    )


def truncate_after(path: Path, step: int, evaluated_step: int | None = None) -> None:
    """Drop the records of steps after `step`, which a resumed run is about to write again.

    evaluated_step: the last step whose evaluation the resumed run knows of; later results are dropped, too. None: the
    same as `step`. Lines that stay keep their bytes. A kill at any moment leaves the old file or the new one. Raises
    CheckpointError as `read_metrics` does, ResourceError where the file system fails.
    """
    if not path.exists():
        return
    last = {"eval": step if evaluated_step is None else min(evaluated_step, step)}
    with explain_write_errors(path, WRITE_REMEDY):
        kept = [line for line, record in _read_lines(path) if record["step"] <= last.get(record["kind"], step)]
        write_file(path, b"".join(kept))


def _read_lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    """Each finished line with its record."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # the last line of a run that was killed while it wrote
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # also not UTF-8
                record = None
            if not (
                isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int
            ):
                raise CheckpointError(
                    f"{path}:{number}: not a record of this file\nRemove this line; the others do not depend on it."
                )
            yield line, {key: value if key in _TEXT_KEYS else _decode(value) for key, value in record.items()}


def _encode(value: Any) -> Any:
    """A value that strict JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Any) -> Any:
    """The inverse of `_encode`."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
