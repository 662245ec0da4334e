"""Asynchronous saving: training waits for a copy in host memory, and a background thread writes it."""

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

from imagenet_cls.checkpoint.format import Progress, Snapshot, list_checkpoints, prune, step_of, write_checkpoint
from imagenet_cls.checkpoint.select import best_on_disk
from imagenet_cls.config.schema import CheckpointConfig
from imagenet_cls.errors import UserError, first_line


class CheckpointSaver:
    """Writes the checkpoints of a run, one at a time, and removes old ones. On ranks other than 0 it does nothing.

    As a context manager it waits for the save in progress, whatever happened.
    """

    def __init__(
        self,
        checkpoints: Path,
        config: CheckpointConfig,
        is_main: bool,
        progress: Progress,
        take_snapshot: Callable[[], Snapshot],
        before_write: Callable[[], None],
        report: Callable[[str], None],
    ):
        """checkpoints: the folder. progress: of the run, updated by the training loop. before_write: called in the
        thread before each write. report: receives a line for a failed save where `config.on_error` is `continue`.
        """
        self.checkpoints = checkpoints
        self.config = config
        self.is_main = is_main
        self.progress = progress
        self.take_snapshot = take_snapshot
        self.before_write = before_write
        self.report = report
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._saved_best = best_on_disk(checkpoints, progress) if is_main else set()
        # The run resumed from the newest intact checkpoint, so later ones are damaged.
        present = list_checkpoints(checkpoints) if is_main else []
        self._damaged = {step for step in map(step_of, present) if step > progress.step}

    def save(self) -> None:
        """Copy the current state, and start writing it. Waits for the previous save; raises or reports its error."""
        if not self.is_main:
            return
        self._wait_or_report()  # before the copy, so that memory holds one copy only
        snapshot = self.take_snapshot()
        best = {entry["step"] for entry in self.progress.best.values()}
        self._thread = Thread(target=self._run, args=(snapshot, best), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise or report the error of a save that has ended. Cheap enough for every step."""
        if self._thread is not None and not self._thread.is_alive():
            self._wait_or_report()

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error, whatever `config.on_error` is."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception:  # the exception that ends the run is the one to show
            logging.getLogger("imagenet_cls").exception("a save failed")

    def _wait_or_report(self) -> None:
        try:
            self.wait()
        except UserError as error:
            if self.config.on_error != "continue":
                raise
            self.report(f"{first_line(error)}; training continues (checkpoint.on_error)")

    def _run(self, snapshot: Snapshot, best: set[int]) -> None:
        """In the thread. best: steps of the best checkpoints of each kind of weights, when the copy was made."""
        try:
            self.before_write()
            write_checkpoint(self.checkpoints, snapshot)
            step = snapshot.state["step"]
            self._damaged.discard(step)
            # Where the best one could not be saved, the best before it is kept until a better one is saved.
            if best <= set(map(step_of, list_checkpoints(self.checkpoints))):
                self._saved_best = best
            prune(self.checkpoints, step, self.config.keep_last, best | self._saved_best, self._damaged)
        except BaseException as error:
            self._error = error
