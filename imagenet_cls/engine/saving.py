"""Saving a run behind its training: the loop waits for a copy in host memory, a thread does the rest.

Owns what a checkpoint holds of a run, the thread that writes it, and what a save that failed means
(`checkpoint.on_error`). At most one checkpoint is in flight: the next save waits for it. Refuses to know the format,
which is `engine.checkpoint`'s. Called by `engine.run`, and by the loop.
"""

import logging
import shutil
from collections.abc import Callable
from copy import deepcopy
from threading import Thread
from types import TracebackType
from typing import Self

import torch

from imagenet_cls.checkpoint.format import (
    Snapshot,
    list_checkpoints,
    prune,
    size_bytes,
    step_of,
    write_checkpoint,
)
from imagenet_cls.checkpoint.optimizer_state import Progress, copy_to_host, optimizer_to_tensors
from imagenet_cls.checkpoint.select import best_on_disk
from imagenet_cls.config.load import config_to_dict
from imagenet_cls.engine.build import Parts
from imagenet_cls.engine.resume import versions
from imagenet_cls.engine.run_folder import RunFolder
from imagenet_cls.errors import UserError
from imagenet_cls.guards.nonfinite import check_finite_weights
from imagenet_cls.optim.build import state_copies
from imagenet_cls.parallel.process_group import run_on_main
from imagenet_cls.report.reporter import Reporter


class Behind:
    """One job at a time, in a thread. A job's error is raised by the next call, whichever that is.

    The thread is no reason to stay: a process that leaves, by a second Ctrl-C, leaves it half done.
    """

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the job before, raise its error, or else begin this one."""
        self.wait()
        self._thread = Thread(target=self._run, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a job that has ended. Cheap enough for every step."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the job to end, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error


class Saver:
    """Saves a run into its folder. Rank 0 does; on the others `save` and `check` write nothing.

    As a context manager it waits for what is in flight, whatever happened.
    """

    def __init__(self, parts: Parts, progress: Progress, folder: RunFolder, reporter: Reporter):
        self.parts, self.progress, self.folder, self.reporter = parts, progress, folder, reporter
        self.goes_on = parts.config.checkpoint.on_error == "continue"
        self.behind = Behind()
        self.saved_best = best_on_disk(folder.checkpoints, progress) if parts.group.is_main else set()
        # A run goes on from the newest whole one, so those behind it are not.
        later = [step_of(path) for path in list_checkpoints(folder.checkpoints)] if parts.group.is_main else []
        self.damaged = {step for step in later if step > progress.step}
        self.description = describe_run(parts) if parts.group.is_main else {}

    def save(self) -> None:
        """Copy this moment, and have it written while training goes on.

        Raises what an earlier save failed with, and NonFiniteError, on every rank, for weights that are not finite.
        """
        check_finite_weights(self.parts.model, self.progress.step, self.parts.group)
        if not self.parts.group.is_main:
            return
        self._tell(self.behind.wait)  # before the copy, so that there is only one in memory
        snapshot = take_snapshot(self.parts, self.progress, self.description)
        best = {entry["step"] for entry in self.progress.best.values()}
        self.behind.start(lambda: self._write(snapshot, best))

    def check(self) -> None:
        """Raise ResourceError if a save has failed meanwhile, or say so, as `checkpoint.on_error` has it."""
        self._tell(self.behind.check)

    def finish(self) -> None:
        """Wait for the last save. Raises on every rank what it failed with, whatever `checkpoint.on_error`: a run whose
        end was not saved has not ended well. A collective.
        """
        run_on_main(self.parts.group, self.behind.wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.behind.wait()
        except Exception:  # after `finish` only another error can lead here, and that is the one to tell
            logging.getLogger("imagenet_cls").exception("and a save failed")

    def _tell(self, look: Callable[[], None]) -> None:
        """Let a save's failure pass, or turn it into a line where training is to go on."""
        try:
            look()
        except UserError as error:
            if not self.goes_on:
                raise
            reason = str(error).splitlines()[0]
            self.reporter.event(self.progress.step, f"{reason}; training continues (checkpoint.on_error)")

    def _write(self, snapshot: Snapshot, best: set[int]) -> None:
        """In the thread. Records first, so that no checkpoint is newer than they are."""
        self.folder.check_present()
        self.reporter.sync()
        write_checkpoint(self.folder.checkpoints, snapshot)
        self.damaged.discard(snapshot.state["step"])
        # Where the save of the best one failed, the best before it stays until there is a better one.
        if best <= set(map(step_of, list_checkpoints(self.folder.checkpoints))):
            self.saved_best = best
        keep_last = self.parts.config.checkpoint.keep_last
        prune(self.folder.checkpoints, snapshot.state["step"], keep_last, best | self.saved_best, self.damaged)


def take_snapshot(parts: Parts, progress: Progress, description: dict) -> Snapshot:
    """This moment of a run, in host memory: nothing of it changes when training goes on."""
    optimizer, numbers = optimizer_to_tensors(parts.model, parts.optimizer)
    return Snapshot(
        model=copy_to_host(parts.model.state_dict()),
        ema=None if parts.ema.module is None else copy_to_host(parts.ema.module.state_dict()),
        optimizer=optimizer,
        optimizer_numbers=deepcopy(numbers),
        state={
            **description,
            "step": progress.step,
            "progress": progress.to_dict(),
            "scaler": deepcopy(parts.scaler.state_dict()),
        },
    )


def describe_run(parts: Parts) -> dict:
    """What `state.json` says of a run at every step: enough to predict with a checkpoint and nothing else."""
    assert parts.data.train is not None and parts.data.val is not None
    return {
        "plan": {"steps_per_epoch": parts.plan.steps_per_epoch, "total_steps": parts.plan.total_steps},
        "classes": list(parts.data.classes),
        "num_classes": parts.num_classes,
        "data_digest": parts.data.train.digest(),
        "val_digest": parts.data.val.digest(),
        "teacher_digest": parts.teacher_digest,
        "preprocessing": {"mean": parts.evaluation.mean, "std": parts.evaluation.std},
        "config": config_to_dict(parts.config),
        "world_size": parts.group.world_size,
        "cpu_threads": torch.get_num_threads(),
        "versions": versions(),
    }


def too_little_room(parts: Parts, folder: RunFolder) -> str | None:
    """A line where the disk has no room for three checkpoints: the last two, and the one that is being written."""
    trained = sum(parameter.nbytes for parameter in parts.model.parameters() if parameter.requires_grad)
    weights = size_bytes(parts.model.state_dict()) * (1 if parts.ema.module is None else 2)
    needed = 3 * (weights + trained * state_copies(parts.config.optimizer))
    there = sum(file.stat().st_size for path in list_checkpoints(folder.checkpoints) for file in path.glob("*"))
    free = shutil.disk_usage(folder.path).free
    if needed <= free + there:
        return None
    return (
        f"{folder.path} has {free:,} bytes free, and three checkpoints of this run need {needed - there:,}: "
        "saving may fail"
    )
