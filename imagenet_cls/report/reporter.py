"""One object that takes everything a run has to tell, and passes it to `metrics.jsonl`, TensorBoard and the console.

Owns which output gets what, and that only one rank speaks: on the others a `Reporter` does nothing, so that the loop
has no `if rank == 0`. Refuses to compute: the numbers arrive on the host, finished. Called by `engine`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from imagenet_cls.errors import ResourceError
from imagenet_cls.report.console import Console
from imagenet_cls.report.jsonl import MetricsFile, Record, read_metrics, truncate_after
from imagenet_cls.report.plots import plot_run
from imagenet_cls.report.tensorboard import TensorBoard

if TYPE_CHECKING:
    from torch import Tensor

_MOST_IMAGES = 32


class Reporter:
    """The outside of a run. As a context manager it closes itself, whatever happened.

    folder: the run folder; None for the console only (a dry run, an evaluation). resume_step: the step of the
    checkpoint that the run goes on from, None for a new run; records of later steps are dropped, since they are about
    to be made again. tensorboard: whether to write event files. is_main: False makes every method a no-op. total_steps,
    total_epochs: of the whole run, for the progress; 0 outside training. evaluated_step: as
    `truncate_after` has it. Methods raise ResourceError where the file system refuses; with goes_on, only `sync` and
    `close` do, and the others say it once: metrics.jsonl catches up when there is room again, TensorBoard's files end.
    """

    def __init__(
        self,
        folder: Path | None,
        resume_step: int | None,
        tensorboard: bool,
        is_main: bool,
        total_steps: int,
        total_epochs: int,
        evaluated_step: int | None = None,
        goes_on: bool = False,
    ):
        self._folder = folder if is_main else None
        self._total_steps, self._total_epochs = total_steps, total_epochs
        self._goes_on, self._is_late = goes_on, False
        self._console = Console(start_step=resume_step or 0) if is_main else None
        self._metrics: MetricsFile | None = None
        self._tensorboard: TensorBoard | None = None
        if self._folder is not None:
            truncate_after(self._folder / "metrics.jsonl", resume_step or 0, evaluated_step)
            self._metrics = MetricsFile(self._folder / "metrics.jsonl")
            if tensorboard:
                self._tensorboard = self._open_tensorboard(
                    self._folder / "tensorboard", self._metrics.path, resume_step
                )

    def banner(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print what is about to run: (name, value) for device, ranks, batch, steps, parameters, seed, ..."""
        if self._console:
            self._console.banner(rows)

    def say(self, message: str) -> None:
        """Print a message."""
        if self._console:
            self._console.say(message)

    def event(self, step: int, message: str) -> None:
        """Print something that happened to the run (a resume, skipped steps), and keep it among the records."""
        self._record([{"kind": "event", "step": step, "message": message}])
        self.say(message)

    def config_text(self, config: str) -> None:
        """Show the resolved config, as YAML, in TensorBoard."""
        self._show(lambda board: board.config_text(config))

    def first_batch(self, images: "Tensor", targets: "Tensor", classes: Sequence[str]) -> None:
        """Show the first augmented images, at most 32 of them, under their class names in TensorBoard.

        images: uint8 (B, 3, H, W), on any device. targets: int64 (B,). classes: the name of each target.
        """
        if self._tensorboard:
            labels = [classes[target] for target in targets[:_MOST_IMAGES].tolist()]
            pixels = images[:_MOST_IMAGES].cpu().numpy()
            self._show(lambda board: board.first_batch(pixels, labels))

    def train(self, records: Sequence[Record]) -> None:
        """Report all steps since the last call, a record each, in order; the last also has the speed. Empty: no-op."""
        if records:
            self._record(records)
            if self._console:
                self._console.train(records[-1], self._total_steps, self._total_epochs)

    def evaluating(self, images_done: int, images_total: int) -> None:
        """Report the progress of an evaluation. Cheap enough to call for every batch; the first call says 0 done."""
        if self._console:
            self._console.evaluating(images_done, images_total)

    def evaluation(self, record: Record) -> None:
        """Report the result of an evaluation: a record of kind "eval"."""
        self._record([record])
        if self._console:
            self._console.evaluation(record, self._total_epochs)

    def plot(self) -> None:
        """Draw `plots/*.png` from all records of the run, those before a resume included."""
        if self._folder and self._metrics:
            try:
                self._metrics.flush()
                plot_run(read_metrics(self._metrics.path), self._folder / "plots")
            except ResourceError as error:
                self._go_on_after(error)

    def sync(self) -> None:
        """Put every record on the disk. Called before each checkpoint, so that none is newer than its records; by the
        thread that writes it, which must not print.
        """
        if self._metrics:
            self._metrics.sync()
        if self._tensorboard:
            with suppress(ResourceError) if self._goes_on else nullcontext():  # the next record finds and says it
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
                self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ResourceError:
            if error is None:  # what is on its way up came first
                raise

    def _open_tensorboard(self, folder: Path, metrics: Path, resume_step: int | None) -> TensorBoard:
        """Event files that show the same history as metrics.jsonl.

        An evaluation of the resumed step may have been dropped. TensorBoard can only forget whole steps: it forgets
        that one, and is told again what was kept of it.
        """
        if not resume_step:
            return TensorBoard(folder, None)
        board = TensorBoard(folder, resume_step - 1)
        for record in read_metrics(metrics):
            if record["step"] == resume_step:
                board.write(record)
        return board

    def _record(self, records: Sequence[Record]) -> None:
        """Keep records in every file. They reach the operating system here: a killed process loses none."""
        if self._metrics:
            for record in records:
                self._metrics.write(record)
            try:
                self._metrics.flush()
                self._is_late = False
            except ResourceError as error:
                if not self._is_late:
                    self._go_on_after(error)
                self._is_late = True
        for record in records:
            self._show(partial(TensorBoard.write, record=record))

    def _show(self, what: Callable[[TensorBoard], None]) -> None:
        if self._tensorboard:
            try:
                what(self._tensorboard)
            except ResourceError as error:
                self._tensorboard = None  # its thread has ended
                self._go_on_after(error)

    def _go_on_after(self, error: ResourceError) -> None:
        """Say what the file system refused, where the run is to go on without it; else raise it."""
        if not self._goes_on:
            raise error
        self.say(f"{str(error).splitlines()[0]}; training goes on (checkpoint.on_error)")
