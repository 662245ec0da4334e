"""Passes everything that a run reports to `metrics.jsonl`, the writers and the console."""

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from imagenet_cls.config.schema import Config
from imagenet_cls.entry_points import load_extra
from imagenet_cls.errors import ResourceError
from imagenet_cls.files import explain_write_errors, write_file
from imagenet_cls.report.console import WRITE_REMEDY, Console
from imagenet_cls.report.jsonl import (
    NO_SCALARS,
    MetricsFile,
    Record,
    finite_json,
    read_metrics,
    truncate_after,
)
from imagenet_cls.report.writers import Row, Writer, open_writers
from imagenet_cls.text import first_line, format_columns


class Reporter:
    """All outputs of a run but its checkpoints. A context manager that closes itself.

    folder: the run folder; None for the console only. resume_step: the step of the checkpoint that
    the run resumes from, or 0. evaluated_step: see `truncate_after`. is_main: False makes every
    method a no-op.

    Methods raise ResourceError if the file system fails.
    """

    def __init__(
        self,
        folder: Path | None,
        resume_step: int,
        config: Config,
        is_main: bool,
        total_steps: int,
        total_epochs: int,
        evaluated_step: int = 0,
    ):
        self._folder = folder if is_main else None
        self._total_steps = total_steps
        self._total_epochs = total_epochs
        self._console = Console() if is_main else Console(open(os.devnull, "w"))  # noqa: SIM115, PTH123
        self._metrics: MetricsFile | None = None
        self._writers: dict[str, Writer] = {}
        self._last_row: Row | None = None  # of the newest step: an evaluation may still follow
        if self._folder is not None:
            path = self._folder / "metrics.jsonl"
            with explain_write_errors(path, WRITE_REMEDY):
                truncate_after(path, resume_step, evaluated_step)
                self._metrics = MetricsFile(path)
            self._writers = open_writers(self._folder, config, resume_step)
            if self._writers:
                self._write_scalars(read_metrics(path))

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the start-up table of names and values."""
        self._console.message(format_columns(rows))

    def message(self, text: str) -> None:
        self._console.message(text)

    def event(self, step: int, message: str) -> None:
        """Print and record an event of the run, such as a resume or skipped steps."""
        self._record([{"kind": "event", "step": step, "message": message}])
        self.message(message)

    def report_steps(self, records: Sequence[Record]) -> None:
        """Report the steps since the last call, if any: one record for each; the last one also has
        the speed.
        """
        if records:
            self._record(records)
            self._console.show_step(records[-1], self._total_steps, self._total_epochs)

    def eval_progress(self, images_done: int, images_total: int) -> None:
        """Show the progress of an evaluation; images_done is 0 in the first call."""
        self._console.eval_progress(images_done, images_total)

    def eval_results(self, records: Sequence[Record], text: str) -> None:
        """Report an evaluation: a record of kind "eval" for each kind of weights. text: what is
        printed.
        """
        self._record(records)
        self._console.eval_result(text)

    def write_classes(self, result: Record, classes: Sequence[str]) -> None:
        """Write `classes.json`: the results of each class in the last evaluation. An error is a
        message: the next save of the run names what can't be written.
        """
        if self._folder:
            path = self._folder / "classes.json"
            try:
                write_file(path, finite_json({"classes": list(classes), **result}))
            except OSError as error:
                self.message(f"warning: {path}: {error.strerror}")

    def write_pages(self, extras: Sequence[str], *parts: object) -> None:
        """Call extras, such as `log.report`, with the run folder and what they need. One that fails
        is a message: the run does not need it.
        """
        for name in extras if self._folder else ():
            try:
                load_extra(name)(self._folder, *parts)
            except Exception as error:
                logging.getLogger("imagenet_cls").exception("%s failed", name)
                self.message(f"warning: {name}: {type(error).__name__}: {first_line(error)}")

    def sync(self) -> None:
        """Write every record to the disk, before a checkpoint. For the thread that writes it, which
        must not print.
        """
        if self._metrics:
            with explain_write_errors(self._metrics.path, WRITE_REMEDY):
                self._metrics.sync()
        for writer in list(self._writers.values()):
            with contextlib.suppress(Exception, SystemExit):  # its next call raises it again
                writer.flush()

    def close(self, finished: bool = True) -> None:
        """Release the terminal, then close the files. May be called again. finished: see
        `Writer.close`.
        """
        self._console.close()
        if finished and self._last_row:
            self._write_rows([self._last_row])
        self._to_writers(lambda writer: writer.close(finished))
        self._writers = {}
        self._console.close()  # a writer that failed was reported
        if self._metrics:
            with explain_write_errors(self._metrics.path, WRITE_REMEDY):
                self._metrics.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(ResourceError):  # the first error is the one to report
            self.close(finished=False)

    def _record(self, records: Sequence[Record]) -> None:
        """Write records to every file."""
        if self._metrics:
            with explain_write_errors(self._metrics.path, WRITE_REMEDY):
                self._metrics.write(records)
        self._write_scalars(records)

    def _write_scalars(self, records: Sequence[Record]) -> None:
        """Merge the records of a step into one row, and pass all rows but the newest to the
        writers: an evaluation of the newest step may follow.
        """
        rows = []
        for record in records:
            values = scalars(record)
            if not values:
                continue
            if self._last_row is not None and record["step"] == self._last_row[0]:
                self._last_row[1].update(values)
                continue
            if self._last_row is not None:
                rows.append(self._last_row)
            self._last_row = (record["step"], values)
        self._write_rows(rows)

    def _write_rows(self, rows: Sequence[Row]) -> None:
        self._to_writers(
            lambda writer: writer.write([row for row in rows if row[0] > writer.last_step])
        )

    def _to_writers(self, call: Callable[[Writer], None]) -> None:
        """Call each writer. One that raises is reported and not called again."""
        for name, writer in list(self._writers.items()):
            try:
                call(writer)
            except (Exception, SystemExit) as error:
                del self._writers[name]
                logging.getLogger("imagenet_cls").exception("log.writers: %r failed", name)
                self.message(
                    f"warning: log.writers: {name!r} failed and gets no more steps in this "
                    f"process: {type(error).__name__}: {first_line(error)}"
                )


def scalars(record: Record) -> dict[str, float]:
    """The scalars of a record of metrics.jsonl by tag, such as `train/loss`; none of an event."""
    if record["kind"] == "event":
        return {}
    group = {"raw": "val", "ema": "val_ema"}[record["weights"]] if "weights" in record else "train"
    return {f"{group}/{field}": v for field, v in record.items() if field not in NO_SCALARS}
