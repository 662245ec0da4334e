"""The state of a run: what a checkpoint contains of it, and how a run resumes from a checkpoint."""

import os
import shutil
from collections.abc import Collection
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.folders import list_checkpoints
from imagenet_cls.checkpoint.format import (
    Progress,
    Snapshot,
    config_from_state,
    invalid_content_errors,
    read_progress,
    size_bytes,
)
from imagenet_cls.checkpoint.optimizer_state import (
    copy_to_host,
    load_optimizer,
    optimizer_to_tensors,
)
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.checkpoint.select import load_newest, newest_intact
from imagenet_cls.config.check import ineffective_keys
from imagenet_cls.config.keys import keys_with
from imagenet_cls.config.load import comparable_values, removed_key_warnings
from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.data.index import FIRST_SUFFIXES, IMAGE_SUFFIXES, suffix_of
from imagenet_cls.data.sources import FolderSource, describe_sizes
from imagenet_cls.engine.build import TrainingParts
from imagenet_cls.engine.run_folder import RunFolder, RunOptions
from imagenet_cls.errors import CheckpointError, format_value
from imagenet_cls.guards.agreement import versions
from imagenet_cls.models.weights import state_dict_mismatch
from imagenet_cls.optim.build import build_optimizer, state_copies
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.parallel.collectives import broadcast_tensors, run_on_main
from imagenet_cls.report.reporter import Reporter

# Changes with which no run resumes, and changes besides those of the config that are reported only.
_FIXED = {"optimizer.name", "training images", "classes"}
_ROUNDING = {"ranks", "CPU threads", "versions"}
_ENVIRONMENT = {"validation images", "validation files", "steps per epoch", *_ROUNDING}
# Changes that an error lists.
_SHOWN = 4


def take_snapshot(
    parts: TrainingParts, progress: Progress, description: dict[str, Any]
) -> Snapshot:
    """A copy of the run's state in host memory. description: of `describe_run`."""
    optimizer, numbers = optimizer_to_tensors(parts.model, parts.optimizer)
    return Snapshot(
        model=copy_to_host(parts.model.state_dict()),
        ema=None if parts.ema.module is None else copy_to_host(parts.ema.module.state_dict()),
        optimizer=optimizer,
        optimizer_values=numbers,
        state={
            **description,
            "step": progress.step,
            "progress": asdict(progress),
            "scaler": deepcopy(parts.scaler.state_dict()),
        },
    )


def describe_run(parts: TrainingParts) -> dict[str, Any]:
    """The part of `state.json` that is the same at every step."""
    assert parts.data.train is not None and parts.data.val is not None
    return {
        "plan": {
            "steps_per_epoch": parts.plan.steps_per_epoch,
            "total_steps": parts.plan.total_steps,
        },
        "classes": list(parts.data.classes),
        "num_classes": parts.num_classes,
        "data_digest": parts.data.train.digest(),
        "val_digest": parts.data.val.digest(),
        "image_suffixes": sorted(map(os.fsdecode, IMAGE_SUFFIXES)),
        "data_sizes": describe_sizes(parts.data.train),
        "val_sizes": describe_sizes(parts.data.val),
        "teacher_digest": parts.teacher_digest,
        "preprocessing": {"mean": parts.evaluation.mean, "std": parts.evaluation.std},
        "config": asdict(parts.config),
        "world_size": parts.group.world_size,
        "cpu_threads": torch.get_num_threads(),
        "versions": versions(),
    }


def disk_space_warning(parts: TrainingParts, checkpoints: Path) -> str | None:
    """A warning where the disk can't hold three checkpoints: the last two, and the one being written."""
    trained = sum(
        parameter.nbytes for parameter in parts.model.parameters() if parameter.requires_grad
    )
    weights = size_bytes(parts.model.state_dict()) * (1 if parts.ema.module is None else 2)
    needed = 3 * (weights + trained * state_copies(parts.config.optimizer))
    present = sum(
        file.stat().st_size for path in list_checkpoints(checkpoints) for file in path.glob("*")
    )
    free = shutil.disk_usage(checkpoints.parent).free
    if needed <= free + present:
        return None
    return (
        f"{checkpoints.parent} has {free:,} bytes free, but three checkpoints of this run need {needed - present:,} "
        "more: saving may fail"
    )


def open_saver(
    parts: TrainingParts, progress: Progress, folder: RunFolder, reporter: Reporter
) -> CheckpointSaver:
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


def restore(
    parts: TrainingParts, folder: RunFolder, options: RunOptions
) -> tuple[Progress, list[str]]:
    """Load weights, EMA, optimizer and loss scale from the checkpoint to resume from, if any. A collective.

    Rank 0 reads the checkpoint and broadcasts its tensors. Returns the progress and messages. Raises CheckpointError.
    """
    group = parts.group
    snapshot: Snapshot | None = None

    def read() -> tuple[Snapshot, list[str]] | None:
        """On rank 0: the checkpoint without its tensors, and messages about it."""
        nonlocal snapshot
        snapshot, damaged = newest_intact(folder.checkpoints) if options.resume else (None, [])
        notes = []
        if snapshot is None and options.resume_from is not None:
            snapshot, damaged = load_newest(options.resume_from)
        elif options.resume_from is not None:
            notes = [
                f"--resume-from {options.resume_from} is not used: the run folder has checkpoints"
            ]
        if snapshot is None:
            return None
        messages = [f"{line}; using an older checkpoint" for line in damaged]
        messages += [
            f"resumed from {snapshot.path} at step {snapshot.state['progress']['step']}",
            *notes,
        ]
        with invalid_content_errors(snapshot.path):
            if snapshot.state["config"]["model"]["name"] != parts.config.model.name:
                check_same_model(parts.model, snapshot.model, snapshot.path)
            messages += check_resumable(snapshot.state, parts, options.allow_change, snapshot.path)
            check_same_model(parts.model, snapshot.model, snapshot.path)
            check_optimizer_state(snapshot, parts.config.optimizer, group.device)
        return replace(
            snapshot, model={}, optimizer={}, ema=None if snapshot.ema is None else {}
        ), messages

    received = run_on_main(group, read)
    if received is None:
        missing = (
            [f"no checkpoint to resume from in {folder.path}: starting from scratch"]
            if options.resume
            else []
        )
        return Progress(), missing
    snapshot = snapshot or received[0]
    # Outside of `invalid_content_errors`: a lost rank is no invalid content.
    model, optimizer = (
        broadcast_tensors(tensors, group) for tensors in (snapshot.model, snapshot.optimizer)
    )
    ema = None if snapshot.ema is None else broadcast_tensors(snapshot.ema, group)
    with invalid_content_errors(snapshot.path):
        parts.model.load_state_dict(model)
        changed = changed_arguments(snapshot.state, parts.config.optimizer)
        load_optimizer(parts.model, parts.optimizer, optimizer, snapshot.optimizer_values, changed)
        if ema is None:
            parts.ema.set(parts.model)
        elif parts.ema.module is not None:
            parts.ema.module.load_state_dict(ema)
        if parts.scaler.is_enabled() and snapshot.state["scaler"]:
            parts.scaler.load_state_dict(snapshot.state["scaler"])
    parts.batch_norm_statistics.store_current()
    return read_progress(snapshot.state["progress"]), received[1]


def check_same_model(model: nn.Module, tensors: dict[str, Tensor], path: Path | None) -> None:
    """Raise CheckpointError where the names or shapes of a checkpoint's weights are not those of the model."""
    if mismatch := state_dict_mismatch(model.state_dict(), tensors):
        raise CheckpointError(
            f"{path}: the checkpoint's model is not the one that this config builds: {mismatch}\n"
            "A run can't resume with another model: use the config of the checkpoint's run, or start a new run."
        )


def check_resumable(
    state: dict[str, Any], parts: TrainingParts, allowed: Collection[str], path: Path | None = None
) -> list[str]:
    """Compare a checkpoint's `state.json` with this run; returns a line for each difference that is no error.

    allowed: dotted keys, or whole sections, of the recipe that may have changed. path: of the checkpoint, for messages.
    Raises CheckpointError.
    """
    if "averaged" in state:
        raise CheckpointError(
            f"{path}: an average of checkpoints, which has no optimizer state to resume from.\n"
            f"Start a new run from its weights: model.checkpoint={path}"
        )
    stored = config_from_state(state, path)
    conditions, conditions_now = run_conditions(state), run_conditions(describe_run(parts))
    # A condition that only one of them has counts as unchanged: older checkpoints have fewer.
    before = comparable_values(stored) | conditions_now | conditions
    now = comparable_values(parts.config) | conditions | conditions_now
    names = sorted({*before, *now} - {*ineffective_keys(stored), *ineffective_keys(parts.config)})
    changed = {
        name: f"{name}: {format_value(before.get(name))} -> {format_value(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    }
    if fixed := [line for name, line in changed.items() if name in _FIXED]:
        remedy = "Restore them"
        new_images = images_not_read_before(state, parts) if "training images" in changed else []
        if new_images:
            number = len(new_images)
            fixed.append(f"{number} images were not read before, such as {new_images[0]}")
            remedy = "Move images that were not read before elsewhere"
        raise CheckpointError(
            f"a run can't resume with another optimizer or other training images: {'; '.join(fixed)}\n"
            f"{remedy}, or start a new run from the checkpoint's weights: model.checkpoint=CHECKPOINT"
        )
    free = keys_with("recipe", False) | _ENVIRONMENT
    if parts.config.schedule.name == "plateau":  # which depends on when evaluations are made
        free -= {"eval.every_epochs"}
    recipe = [
        name for name in changed if not _includes(free, name) and not _includes(allowed, name)
    ]
    if recipe:
        more = f" and {len(recipe) - _SHOWN} more" if len(recipe) > _SHOWN else ""
        raise CheckpointError(
            f"the config differs from the checkpoint's: {'; '.join(changed[name] for name in recipe[:_SHOWN])}{more}\n"
            f"Restore it, or allow the change: {' '.join(f'--allow-change {name}' for name in recipe[:_SHOWN])}"
        )
    lines = removed_key_warnings(state["config"])
    lines += [f"changed since the checkpoint: {line}" for line in changed.values()]
    if any(_includes(_ROUNDING, name) for name in changed):
        lines.append(
            "the samples are the same, but rounding may differ: results may not be bitwise identical"
        )
    return lines


def images_not_read_before(state: dict[str, Any], parts: TrainingParts) -> list[Path]:
    """The training images with suffixes that the version of a checkpoint did not read.

    Empty for lists, of which each image was read.
    """
    source = parts.data.train
    before = set(map(os.fsencode, state.get("image_suffixes", []))) or FIRST_SUFFIXES
    if parts.config.data.name != "folder" or not isinstance(source, FolderSource):
        return []
    names = source.index.names.tolist()
    return [source.index.path(i) for i, name in enumerate(names) if suffix_of(name) not in before]


def changed_arguments(state: dict[str, Any], now: OptimizerConfig) -> list[str]:
    """The names in `optimizer.kwargs` whose values differ from those in a checkpoint's `state.json`."""
    before = state["config"]["optimizer"]["kwargs"]
    return sorted(
        name for name in {*before, *now.kwargs} if before.get(name) != now.kwargs.get(name)
    )


def check_optimizer_state(snapshot: Snapshot, now: OptimizerConfig, device: torch.device) -> None:
    """Raise CheckpointError if a changed argument of the optimizer needs state that the checkpoint lacks.

    Tried with one layer, since optimizers differ: SGD starts a momentum at any step, AdamW no `amsgrad`.
    """
    changed = changed_arguments(snapshot.state, now)
    if not changed:
        return
    layer = nn.Linear(2, 3, device=device)
    layer(torch.ones(1, 2, device=device)).sum().backward()
    before = config_from_state(snapshot.state, snapshot.path).optimizer
    old, new = (
        build_optimizer(
            config, parameter_groups(layer, replace(config, layer_decay=None, lr_scales={}))
        )
        for config in (before, now)
    )
    old.step()
    load_optimizer(layer, new, *optimizer_to_tensors(layer, old), changed)
    try:
        new.step()
    except KeyError as error:
        raise CheckpointError(
            f"{snapshot.path}: its optimizer state has no {error}, which {now.name} needs after the change of "
            f"optimizer.kwargs ({', '.join(changed)}).\n"
            f"Restore them, or start a new run from the checkpoint's weights: model.checkpoint={snapshot.path}"
        ) from error


def run_conditions(state: dict[str, Any]) -> dict[str, Any]:
    """What `describe_run` states besides the config, by the names that messages show, without what is unknown."""
    conditions = {
        "training images": state["data_digest"],
        "classes": state["classes"],
        "validation images": state.get("val_digest"),
        "data": state.get("data_sizes"),  # for --allow-change, after a bad image was replaced
        "validation files": state.get("val_sizes"),
        "distill.teacher": state.get("teacher_digest"),
        "steps per epoch": state["plan"]["steps_per_epoch"],
        "ranks": state["world_size"],
        "CPU threads": state["cpu_threads"],
        **{f"versions.{name}": version for name, version in state["versions"].items()},
    }
    return {name: value for name, value in conditions.items() if value is not None}


def _includes(names: Collection[str], name: str) -> bool:
    """Whether `names` has the name itself, or a section that it is in."""
    return any(name == other or name.startswith(f"{other}.") for other in names)
