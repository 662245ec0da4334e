"""Asynchronous saving.

Training waits for a copy in host memory, and a background thread writes it.
"""

import logging
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, Self

from imagenet_cls.checkpoint.folders import list_checkpoints, step_of
from imagenet_cls.checkpoint.format import Snapshot, prune, write_checkpoint
from imagenet_cls.checkpoint.progress import Progress, best_weights
from imagenet_cls.config.schema import CheckpointConfig
from imagenet_cls.files import link


class CheckpointSaver:
    """Writes the checkpoints of a run, one at a time, and removes old ones. On ranks other than 0
    it does nothing.

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
    ):
        """progress: the run's, which the training loop updates. before_write: called in the thread
        before each write.
        """
        self.checkpoints = checkpoints
        self.config = config
        self.is_main = is_main
        self.progress = progress
        self.take_snapshot = take_snapshot
        self.before_write = before_write
        self._executor = futures.ThreadPoolExecutor(1, "checkpoint")
        self._save_in_progress: futures.Future[None] | None = None
        present = list_checkpoints(checkpoints) if is_main else []
        # The best checkpoint may not be in this folder: the run may have resumed from another. Then
        # the one that the link `best` names is kept until a better one is saved.
        best = checkpoints / "best"
        linked = best.readlink().name if best.is_symlink() else None
        self._kept_best = {step_of(path) for path in present if path.name == linked}
        # The run resumed from the newest intact checkpoint, so later ones are damaged.
        self._damaged = {step for step in map(step_of, present) if step > progress.step}

    def save(self) -> None:
        """Copy the current state, and start writing it. Waits for the previous save, and raises its
        error.
        """
        if not self.is_main:
            return
        self.wait()  # before the copy, so that memory holds one copy only
        best = dict(self.progress.best)
        self._save_in_progress = self._executor.submit(self._write, self.take_snapshot(), best)

    def check(self) -> None:
        """Raise the error of a save that has ended. Cheap enough for every step."""
        if self._save_in_progress is not None and self._save_in_progress.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error."""
        if self._save_in_progress is not None:
            futures.wait([self._save_in_progress])  # a Ctrl-C here leaves it to the next call
            save = self._save_in_progress
            self._save_in_progress = None
            save.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.wait()
        except Exception:  # the exception that ends the run is the one to show
            logging.getLogger("imagenet_cls").exception("a save failed")
        self._executor.shutdown()

    def _write(self, snapshot: Snapshot, best: dict[str, dict[str, Any]]) -> None:
        """Runs in the thread. best: `Progress.best` when the copy was made."""
        self.before_write()
        write_checkpoint(self.checkpoints, snapshot)
        step = snapshot.state["step"]
        self._damaged.discard(step)
        present = {step_of(path): path.name for path in list_checkpoints(self.checkpoints)}
        best_steps = {entry["step"] for entry in best.values()}
        if best_steps <= present.keys():
            # All best checkpoints are in this folder, so older best ones are no longer needed.
            self._kept_best = best_steps
            if best:
                link(self.checkpoints / "best", present[best[best_weights(best)]["step"]])
        link(self.checkpoints / "last", present[step])
        keep_steps = best_steps | self._kept_best
        prune(self.checkpoints, step, self.config.keep_last, keep_steps, self._damaged)
