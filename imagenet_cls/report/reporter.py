"""Passes everything that a run reports to `metrics.jsonl`, TensorBoard and the console."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from imagenet_cls.errors import ResourceError, first_line
from imagenet_cls.files import explain_write_errors
from imagenet_cls.report.console import Console
from imagenet_cls.report.jsonl import WRITE_REMEDY, MetricsFile, Record, read_metrics, truncate_after
from imagenet_cls.report.plots import draw_batch, plot_run

if TYPE_CHECKING:
    from torch import Tensor

_MOST_IMAGES = 32
_TRAIN_FIELDS = ("loss", "lr", "grad_norm", "images_per_sec", "data_wait_pct", "memory_mib")
_EVAL_FIELDS = ("top1_pct", "top5_pct", "loss")
_EVAL_GROUPS = {"raw": "val", "ema": "val_ema"}


class TensorBoard:
    """TensorBoard's event files in one folder: the records of `metrics.jsonl`, the config, and the first batch.

    They are never shortened on a resume: `purge_step` makes TensorBoard forget the steps that are written again.

    resume_step: the step of the checkpoint that the run resumes from, 0 for a new run. Tags: `train/FIELD`, and
    `val/FIELD` or `val_ema/FIELD`, at the steps of their records; `config` (text), `train/first_batch` (image) and
    `train/first_batch_labels` (text) at the first step of this process. All methods raise OSError where the file system
    fails, perhaps late: event files are written by a thread.
    """

    def __init__(self, folder: Path, resume_step: int):
        from torch.utils.tensorboard import SummaryWriter  # here: takes over a second, and may be switched off

        self._first_step = resume_step + 1
        # A new run purges, too: it may follow one that died before its first checkpoint.
        self._writer = SummaryWriter(str(folder), purge_step=self._first_step, max_queue=1000)

    def write(self, record: Record) -> None:
        """Add a record's scalars. Events have none."""
        if record["kind"] not in ("train", "eval"):
            return
        group = "train" if record["kind"] == "train" else _EVAL_GROUPS[record["weights"]]
        for field in _TRAIN_FIELDS if group == "train" else _EVAL_FIELDS:
            if field in record:
                self._writer.add_scalar(f"{group}/{field}", record[field], record["step"])

    def config(self, config: str) -> None:
        """Show the resolved config, as YAML."""
        code = "\n".join("    " + line for line in config.splitlines())  # indented by four, Markdown takes it as code
        self._writer.add_text("config", code, self._first_step)

    def first_batch(self, images: np.ndarray, labels: Sequence[str]) -> None:
        """Show images as the model sees them, before normalising, each under its label.

        images: uint8 (B, 3, H, W); labels: B class names, which the text tag holds in full, numbered in reading order.
        """
        listing = "\n".join(f"{number}. {label}" for number, label in enumerate(labels, start=1))
        self._writer.add_image("train/first_batch", draw_batch(images, labels), self._first_step, dataformats="HWC")
        self._writer.add_text("train/first_batch_labels", listing, self._first_step)

    def flush(self) -> None:
        """Write everything so far to the files."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close; may be called again."""
        self._writer.close()


class Reporter:
    """All outputs of a run but its checkpoints. A context manager that closes itself.

    folder: the run folder; None for the console only. resume_step: the step of the checkpoint that the run resumes
    from, 0 for a new run; records of later steps are dropped. tensorboard: whether to write event files. is_main:
    False makes every method a no-op. total_steps, total_epochs: of the whole run. evaluated_step:
    see `truncate_after`. Methods raise ResourceError where the file system fails. With continue_on_error, only `sync`
    and `close` do, and the others print it once: metrics.jsonl catches up when there is room again, TensorBoard's files
    end.
    """

    def __init__(
        self,
        folder: Path | None,
        resume_step: int,
        tensorboard: bool,
        is_main: bool,
        total_steps: int,
        total_epochs: int,
        evaluated_step: int | None = None,
        continue_on_error: bool = False,
    ):
        self._folder = folder if is_main else None
        self._total_steps, self._total_epochs = total_steps, total_epochs
        self._continue_on_error, self._write_failed = continue_on_error, False
        self._console = Console(start_step=resume_step) if is_main else None
        self._metrics: MetricsFile | None = None
        self._tensorboard: TensorBoard | None = None
        if self._folder is not None:
            path = self._folder / "metrics.jsonl"
            truncate_after(path, resume_step, evaluated_step)
            self._metrics = MetricsFile(path)
            if tensorboard:
                with self._tensorboard_errors():
                    self._tensorboard = self._open_tensorboard(path, resume_step)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the start-up table: (name, value) for device, ranks, batch, steps, parameters, seed, ..."""
        if self._console:
            self._console.table(rows)

    def message(self, text: str) -> None:
        """Print a message."""
        if self._console:
            self._console.message(text)

    def event(self, step: int, message: str) -> None:
        """Print and record an event of the run, such as a resume or skipped steps."""
        self._record([{"kind": "event", "step": step, "message": message}])
        self.message(message)

    def config(self, config: str) -> None:
        """Show the resolved config, as YAML, in TensorBoard."""
        self._to_tensorboard(lambda board: board.config(config))

    def first_batch(self, images: "Tensor", targets: "Tensor", classes: Sequence[str]) -> None:
        """Show the first augmented images, at most 32, under their class names in TensorBoard.

        images: uint8 (B, 3, H, W), on any device. targets: int64 (B,). classes: the name of each target.
        """
        if self._tensorboard:
            labels = [classes[target] for target in targets[:_MOST_IMAGES].tolist()]
            pixels = images[:_MOST_IMAGES].cpu().numpy()
            self._to_tensorboard(lambda board: board.first_batch(pixels, labels))

    def train(self, records: Sequence[Record]) -> None:
        """Report the steps since the last call, a record each, in order; the last also has the speed. May be empty."""
        if records:
            self._record(records)
            if self._console:
                self._console.train(records[-1], self._total_steps, self._total_epochs)

    def eval_progress(self, images_done: int, images_total: int) -> None:
        """Show the progress of an evaluation. Cheap enough for every batch; images_done is 0 in the first call."""
        if self._console:
            self._console.eval_progress(images_done, images_total)

    def eval_result(self, record: Record) -> None:
        """Report the result of an evaluation: a record of kind "eval"."""
        self._record([record])
        if self._console:
            self._console.eval_result(record, self._total_epochs)

    def plot(self) -> None:
        """Draw `plots/*.png` from all records of the run, those before a resume included."""
        if self._folder and self._metrics:
            try:
                self._metrics.flush()
                plot_run(read_metrics(self._metrics.path), self._folder / "plots")
            except ResourceError as error:
                self._handle(error)

    def sync(self) -> None:
        """Write every record to the disk, before a checkpoint, so that none is newer than its records.

        Called by the thread that writes checkpoints, which must not print.
        """
        if self._metrics:
            self._metrics.sync()
        if self._tensorboard:
            # With continue_on_error the next record reports the error.
            with suppress(OSError) if self._continue_on_error else self._tensorboard_errors():
                self._tensorboard.flush()

    def close(self) -> None:
        """Release the terminal first, then close the files. May be called again."""
        if self._console:
            self._console.close()
        try:
            if self._metrics:
                self._metrics.close()
        finally:
            if self._tensorboard:
                with self._tensorboard_errors():
                    self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ResourceError) if error is not None else nullcontext():  # the first error is raised
            self.close()

    def _open_tensorboard(self, metrics: Path, resume_step: int) -> TensorBoard:
        """Event files with the same history as metrics.jsonl.

        An evaluation of the resumed step may have been dropped. TensorBoard can only purge whole steps: that one is
        purged, and what was kept of it is written again.
        """
        folder = metrics.with_name("tensorboard")
        if not resume_step:
            return TensorBoard(folder, 0)
        board = TensorBoard(folder, resume_step - 1)
        for record in read_metrics(metrics):
            if record["step"] == resume_step:
                board.write(record)
        return board

    def _record(self, records: Sequence[Record]) -> None:
        """Write records to every file. A killed process loses none of them."""
        if self._metrics:
            for record in records:
                self._metrics.write(record)
            try:
                self._metrics.flush()
                self._write_failed = False
            except ResourceError as error:
                if not self._write_failed:
                    self._handle(error)
                self._write_failed = True
        for record in records:
            self._to_tensorboard(partial(TensorBoard.write, record=record))

    def _to_tensorboard(self, write: Callable[[TensorBoard], None]) -> None:
        if self._tensorboard:
            try:
                with self._tensorboard_errors():
                    write(self._tensorboard)
            except ResourceError as error:
                self._tensorboard = None  # its thread has ended
                self._handle(error)

    def _tensorboard_errors(self) -> AbstractContextManager[None]:
        assert self._folder is not None
        return explain_write_errors(self._folder / "tensorboard", WRITE_REMEDY)

    def _handle(self, error: ResourceError) -> None:
        """Print a write error if the run continues without the output; else raise it."""
        if not self._continue_on_error:
            raise error
        self.message(f"{first_line(error)}; training continues (checkpoint.on_error)")
