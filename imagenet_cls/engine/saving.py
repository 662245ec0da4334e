"""What a checkpoint contains of a run. Format and writing: `checkpoint.format`, `checkpoint.saver`."""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from imagenet_cls.checkpoint.format import Progress, Snapshot, list_checkpoints, size_bytes
from imagenet_cls.checkpoint.optimizer_state import copy_to_host, optimizer_to_tensors
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.config.load import config_to_dict
from imagenet_cls.engine.build import TrainingParts
from imagenet_cls.engine.run_folder import RunFolder
from imagenet_cls.guards.agreement import versions
from imagenet_cls.optim.build import state_copies
from imagenet_cls.report.reporter import Reporter


def take_snapshot(parts: TrainingParts, progress: Progress, description: dict[str, Any]) -> Snapshot:
    """A copy of the run's state in host memory. description: of `describe_run`."""
    optimizer, numbers = optimizer_to_tensors(parts.model, parts.optimizer)
    return Snapshot(
        model=copy_to_host(parts.model.state_dict()),
        ema=None if parts.ema.module is None else copy_to_host(parts.ema.module.state_dict()),
        optimizer=optimizer,
        optimizer_numbers=numbers,
        state={
            **description,
            "step": progress.step,
            "progress": progress.to_dict(),
            "scaler": deepcopy(parts.scaler.state_dict()),
        },
    )


def describe_run(parts: TrainingParts) -> dict[str, Any]:
    """The part of `state.json` that is the same at every step: enough to predict with nothing but the checkpoint."""
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


def disk_space_warning(parts: TrainingParts, checkpoints: Path) -> str | None:
    """A warning where the disk can't hold three checkpoints: the last two, and the one being written."""
    trained = sum(parameter.nbytes for parameter in parts.model.parameters() if parameter.requires_grad)
    weights = size_bytes(parts.model.state_dict()) * (1 if parts.ema.module is None else 2)
    needed = 3 * (weights + trained * state_copies(parts.config.optimizer))
    present = sum(file.stat().st_size for path in list_checkpoints(checkpoints) for file in path.glob("*"))
    free = shutil.disk_usage(checkpoints.parent).free
    if needed <= free + present:
        return None
    return (
        f"{checkpoints.parent} has {free:,} bytes free, but three checkpoints of this run need {needed - present:,} "
        "more: saving may fail"
    )


def open_saver(parts: TrainingParts, progress: Progress, folder: RunFolder, reporter: Reporter) -> CheckpointSaver:
    description = describe_run(parts) if parts.group.is_main else {}

    def before_write() -> None:
        folder.check_present()
        reporter.sync()  # first, so that no checkpoint is newer than the records

    return CheckpointSaver(
        folder.checkpoints,
        parts.config.checkpoint,
        parts.group.is_main,
        progress,
        take_snapshot=lambda: take_snapshot(parts, progress, description),
        before_write=before_write,
        report=lambda line: reporter.event(progress.step, line),
    )
