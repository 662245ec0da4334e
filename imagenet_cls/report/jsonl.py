"""`metrics.jsonl`, the source of truth about a run: one JSON object on each line, appended and never changed.

Owns the file's form and its behaviour when a run is killed, resumed or meets a full disk. Refuses to interpret what it
holds: `console`, `tensorboard` and `plots` take the same records. Called by `reporter`, and by anyone who reads a run's
numbers.

Three kinds of records; `step` is the count of optimizer updates done, so the first is 1; `epoch` is the pass that it
belongs to, counted from 0 as samplers and schedules do (the screen counts from 1):

    {"kind": "train", "step", "epoch", "loss", "lr", "grad_norm"}  for every step; the last of each logging interval has
                                                                   "images_per_sec", "data_wait_pct", "memory_mib" too
    {"kind": "eval", "step", "epoch", "weights": "raw" | "ema", "top1_pct", "top5_pct", "loss", "images", "seconds"}
    {"kind": "event", "step", "message"}

A train record of an update that was left out, for a loss or gradient that is not finite, has "skipped": true.

JSON has no word for NaN and infinity. They are written as the strings "NaN", "Infinity" and "-Infinity", which
`float()` of Python and `Number()` of JavaScript take as they are, so that every line is valid JSON and nothing is lost;
`read_metrics` turns them back into numbers.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from imagenet_cls.errors import CheckpointError, ResourceError

Record = dict[str, Any]

_TEXT_KEYS = ("kind", "weights", "message")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError (full disk, lost permission, vanished share) into a ResourceError that says what to do."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"can't write {path}: {error.strerror or error}\n"
            "Make room or restore access; the same command with --resume then goes on from the last checkpoint."
        ) from error


class MetricsFile:
    """Appends records to one file. Lines reach the file at `flush`, and the disk at `sync`.

    path: made if missing, its folder too. What a killed run left of its last line is cut off, since no reader could use
    it. All methods but `write` raise ResourceError where the file system refuses. What it refused is kept, to the byte,
    for the next flush: where a run outlives a full disk, each record is still there once. Any thread may call.
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting = b""
        self._lock = Lock()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(path)
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record: a flat mapping of names to numbers and strings."""
        line = json.dumps({key: _encode(value) for key, value in record.items()}, allow_nan=False, ensure_ascii=False)
        with self._lock:
            self._waiting += line.encode() + b"\n"

    def flush(self) -> None:
        """Hand all records to the operating system: they now survive the death of this process."""
        with self._lock, writing(self.path):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]

    def sync(self) -> None:
        """Hand all records to the disk: they now survive a power cut. Called before each checkpoint."""
        self.flush()
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close; may be called again. The file is closed even where the flush fails."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            with writing(self.path):
                self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """All records of the file, in order; [] where there is no file. An unfinished last line is left out.

    Raises CheckpointError, with file and line, where any other line is not a JSON object with `kind` and `step`.
    """
    if not path.exists():
        return []
    return [record for _, record in _lines(path)]


def missing_steps(path: Path, step: int) -> str:
    """Which of the steps up to `step` have no record, as a sentence; "" if none lacks.

    A run that began from a checkpoint elsewhere has records from there on: a beginning that lacks is told only where
    there are no records at all. Raises as `truncate_after` does, which comes next.
    """
    with writing(path):
        records = (record for _, record in _lines(path)) if path.exists() else ()
        steps = {record["step"] for record in records if record["kind"] == "train" and 1 <= record["step"] <= step}
    expected = range(min(steps, default=1), step + 1)
    if len(steps) == len(expected):
        return ""
    first, lacking = next(number for number in expected if number not in steps), len(expected) - len(steps)
    return (
        f"{path} lacks {lacking} of the steps up to {step}, the first of them {first}: the run goes on "
        "in the same bits, but its curves have a gap"
    )


def truncate_after(path: Path, step: int, evaluated_step: int | None = None) -> None:
    """Drop the records of steps after `step`, which a resumed run is about to write again; no file is no error.

    evaluated_step: the last step whose evaluation the resumed run knows of; later results are dropped as well, since
    they came after its checkpoint. None: the same as `step`.
    Written beside, synced and renamed: a kill at any moment leaves the old file or the new one. Lines that stay keep
    their bytes. Raises CheckpointError for a file that `read_metrics` refuses, ResourceError where the file system
    does.
    """
    if not path.exists():
        return
    evaluated_step = step if evaluated_step is None else min(evaluated_step, step)
    last = {"eval": evaluated_step}
    beside = path.with_name(path.name + ".tmp")
    with writing(path):
        kept = b"".join(line for line, record in _lines(path) if record["step"] <= last.get(record["kind"], step))
        with beside.open("wb") as file:
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(path.parent)


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    """Each whole line with its record."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # only a last line can lack its end: the run was killed while it wrote
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # also not UTF-8
                record = None
            if not _is_record(record):
                raise CheckpointError(
                    f"{path}:{number}: not a record of this file\n"
                    "Remove this line; the rest of the file is independent of it."
                )
            yield line, {key: value if key in _TEXT_KEYS else _decode(value) for key, value in record.items()}


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("kind"), str) and type(value.get("step")) is int


def _encode(value: Any) -> Any:
    """A value that strict JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Any) -> Any:
    """The inverse of `_encode`."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _cut_unfinished_line(path: Path) -> None:
    """Shorten the file to its last line end."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _sync_folder(folder: Path) -> None:
    """Put a rename on the disk: it is the folder that records it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
