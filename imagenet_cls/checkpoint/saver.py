"""Asynchronous saving: training waits for a copy in host memory, and a background thread writes it."""

import logging
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Self

from imagenet_cls.checkpoint.folders import list_checkpoints, step_of
from imagenet_cls.checkpoint.format import Progress, Snapshot, best_score, prune, write_checkpoint
from imagenet_cls.config.schema import CheckpointConfig
from imagenet_cls.errors import UserError, first_line
from imagenet_cls.files import link


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
        """progress: of the run, updated by the training loop. before_write: called in the thread before each write.
        report: receives a line for a failed save where `config.on_error` is `continue`, and for a removed checkpoint.
        """
        self.checkpoints = checkpoints
        self.config = config
        self.is_main = is_main
        self.progress = progress
        self.take_snapshot = take_snapshot
        self.before_write = before_write
        self.report = report
        self._executor = futures.ThreadPoolExecutor(1, "checkpoint")
        self._save_in_progress: futures.Future[None] | None = None
        self._written: Path | None = None  # the newest checkpoint
        present = list_checkpoints(checkpoints) if is_main else []
        # Where a best one is not in this folder, the best of those that are is kept until a better one is saved.
        link_to_best = checkpoints / "best"
        linked = link_to_best.readlink().name if link_to_best.is_symlink() else None
        self._saved_best = {step_of(path) for path in present if path.name == linked}
        # The run resumed from the newest intact checkpoint, so later ones are damaged.
        self._damaged = {step for step in map(step_of, present) if step > progress.step}

    def save(self) -> None:
        """Copy the current state, and start writing it. Waits for the previous save; raises or reports its error."""
        if not self.is_main:
            return
        self._wait_or_report()  # before the copy, so that memory holds one copy only
        if self._written is not None and not self._written.exists():
            self.report(f"{self._written} was removed by another process; training continues")
        best = {entry["step"]: best_score(entry) for entry in self.progress.best.values()}
        self._save_in_progress = self._executor.submit(self._write, self.take_snapshot(), best)

    def check(self) -> None:
        """Raise or report the error of a save that has ended. Cheap enough for every step."""
        if self._save_in_progress is not None and self._save_in_progress.done():
            self._wait_or_report()

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error, whatever `config.on_error` is."""
        if self._save_in_progress is not None:
            futures.wait([self._save_in_progress])  # a Ctrl-C here leaves it to the next call
            save, self._save_in_progress = self._save_in_progress, None
            save.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.wait()
        except Exception:  # the exception that ends the run is the one to show
            logging.getLogger("imagenet_cls").exception("a save failed")
        self._executor.shutdown()

    def _wait_or_report(self) -> None:
        try:
            self.wait()
        except UserError as error:
            if self.config.on_error != "continue":
                raise
            self.report(f"{first_line(error)}; training continues (checkpoint.on_error)")

    def _write(self, snapshot: Snapshot, best: dict[int, float]) -> None:
        """In the thread. best: score of the best checkpoint of each kind of weights by step, when the copy was made."""
        self.before_write()
        self._written = write_checkpoint(self.checkpoints, snapshot)
        step = snapshot.state["step"]
        self._damaged.discard(step)
        present = {step_of(path): path.name for path in list_checkpoints(self.checkpoints)}
        if best.keys() <= present.keys():
            self._saved_best = set(best)
            for top in sorted(best, key=lambda step: best[step])[-1:]:
                link(self.checkpoints / "best", present[top])
        link(self.checkpoints / "last", present[step])
        prune(
            self.checkpoints, step, self.config.keep_last, {*best, *self._saved_best}, self._damaged
        )
