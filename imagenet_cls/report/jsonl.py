"""Reads and writes `metrics.jsonl`: a record on each line, as a JSON object.

A resumed run first drops the records that it writes again.

All records:
    kind                    "train", "eval" or "event"
    step                    optimizer steps so far, skipped ones included
Records of kind "train", one for every step:
    epoch                   from 0
    loss
    top1_pct                not with data.labels multi
    sample_f1_pct           the mean F1 of an image's labels; only with data.labels multi
    lr
    grad_norm
    skipped                 true; only where the update was skipped
    images_per_sec          only in the last step of each logging interval
    data_wait_pct           likewise
    memory_mib              likewise
Records of kind "eval":
    epoch
    weights                 "raw" or "ema"
    top1_pct                not with data.labels multi
    top5_pct                likewise
    balanced_accuracy_pct   likewise
    map_pct                 mean average precision; only with data.labels multi
    micro_f1_pct            F1 at eval.threshold; likewise
    macro_f1_pct            likewise
    best_threshold          with the highest micro F1; likewise
    best_micro_f1_pct       micro F1 there; likewise
    loss
    images
    seconds
    classes                 such as "200 of 1000"; only with eval.classes=present
    left_out                only where data.exclude leaves images out
    further fields          the values of eval.metrics
Records of kind "event":
    message

NaN and infinity are the strings "NaN", "Infinity" and "-Infinity", which JSON lacks as numbers.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from imagenet_cls.config.metrics import BY_FIELD, TRAIN_METRICS, metrics_of
from imagenet_cls.errors import CheckpointError, explain_content_errors
from imagenet_cls.files import write_file

Record = dict[str, Any]

TEXT_KEYS = ("kind", "weights", "message", "classes")
NO_SCALARS = (
    *TEXT_KEYS,
    *("step", "epoch", "skipped", "images", "seconds", "left_out"),
    *("best_threshold", "best_micro_f1_pct"),
)
EVAL_FIELDS = (*NO_SCALARS, *BY_FIELD)


def user_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The values of `eval.metrics` in the result of an evaluation."""
    return {field: value for field, value in record.items() if field not in EVAL_FIELDS}


def describe_step(record: Mapping[str, Any]) -> str:
    """`loss 0.5123  top-1 85.2 %` of a record of kind "train"."""
    texts = [f"loss {record['loss']:.4f}"]
    for metric in TRAIN_METRICS.values():
        if metric.field in record:
            texts.append(f"{metric.title} {metric.format(record[metric.field], 1)}")
    return "  ".join(texts)


def describe_result(result: Mapping[str, Any], digits: int, num_classes: int) -> list[str]:
    """Texts about the result of an evaluation, its main metric first.

    digits: after the decimal point of percentages.
    """
    shown = [metric for metric in metrics_of(result) if metric.is_shown(result, num_classes)]
    images = result["images"]
    texts = [f"{m.title} {m.format(result[m.field], digits, images)}" for m in shown]
    if "best_threshold" in result:
        texts.append(
            f"best micro F1 {result['best_micro_f1_pct']:.{digits}f} % at threshold "
            f"{result['best_threshold']:.2f}"
        )
    texts += [f"{name} {value:.{digits + 2}f}" for name, value in user_metrics(result).items()]
    if "classes" in result:
        texts.append(f"classes: {result['classes']}")
    left_out = f" ({result['left_out']} left out)" if "left_out" in result else ""
    return [*texts, f"over {images} images{left_out} in {result['seconds']:.1f} s"]


def finite_json(value: Any) -> str:
    """A value as JSON; NaN and infinite numbers, which JSON lacks, as null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=1) + "\n"


class MetricsFile:
    """Appends records to a file, which is created if missing. Methods raise OSError. Thread-safe.

    Records that could not be written are written by the next call.
    """

    def __init__(self, path: Path):
        self.path = path
        self._unwritten = b""
        self._lock = Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)

    def write(self, records: Sequence[Record]) -> None:
        """Append records. They survive if this process is killed."""
        lines = b""
        for record in records:
            nonfinite = {
                k: json.dumps(v)
                for k, v in record.items()
                if isinstance(v, float) and not math.isfinite(v)
            }
            lines += json.dumps(record | nonfinite).encode() + b"\n"
        with self._lock:
            self._unwritten += lines
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def sync(self) -> None:
        """Write what is left and call fsync. A removed file is written again."""
        self.write([])
        with self._lock:
            if not self.path.exists():
                self._file.seek(0)
                write_file(self.path, self._file.read())
                self._file.close()
                self._file = self.path.open("a+b", buffering=0)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is left and close, even if that fails; may be called again."""
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()


def read_metrics(path: str | Path, kind: str | None = None) -> list[Record]:
    """All records of a file, or of the one in a run folder, without an unfinished last line.

    kind: the kind of records to return; others are not parsed. Raises CheckpointError if there is
    no file, and, with file and line, for any other line that is no record. Fields are not checked.
    """
    file = Path(path, "metrics.jsonl") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file.", "Name a run folder, or its metrics.jsonl.")
    if kind is None:
        return [record for _, record in _read_lines(file)]
    text = json.dumps(kind).encode()
    return [record for _, record in _read_lines(file, text) if record["kind"] == kind]


def truncate_after(path: Path, step: int, evaluated_step: int) -> None:
    """Drop the records of steps after `step`, the evaluations after `evaluated_step`, and an
    unfinished last line.

    A kill at any moment leaves the old file or the new one. Raises CheckpointError as
    `read_metrics`, and OSError.
    """
    if path.exists():
        last = {"eval": evaluated_step}
        kept = [
            line
            for line, record in _read_lines(path)
            if record["step"] <= last.get(record["kind"], step)
        ]
        write_file(path, b"".join(kept))


def _read_lines(path: Path, containing: bytes = b"") -> Iterator[tuple[bytes, Record]]:
    """Each finished line that contains these bytes, with its record."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # the last line of a run that was killed while it wrote
            if containing not in line:
                continue
            with explain_content_errors(
                CheckpointError,
                f"{path}:{number}",
                "not a record of this file",
                "Remove this line; the others do not depend on it.",
            ):
                record = json.loads(line)
                # what else a reader needs is checked where it is used
                record |= {"kind": record["kind"], "step": int(record["step"])}
                for key in record.keys() - {*TEXT_KEYS}:
                    if isinstance(record[key], str):
                        record[key] = float(record[key])
            yield line, record
