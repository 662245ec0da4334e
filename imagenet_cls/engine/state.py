"""The state of a run: what a checkpoint contains of it, and how a run resumes from a checkpoint."""

import shlex
from collections.abc import Collection
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.folders import list_checkpoints
from imagenet_cls.checkpoint.format import (
    Snapshot,
    config_from_state,
    invalid_content_errors,
)
from imagenet_cls.checkpoint.optimizer_state import (
    copy_to_host,
    group_members,
    load_optimizer,
    optimizer_to_tensors,
)
from imagenet_cls.checkpoint.progress import Progress, read_progress
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.checkpoint.select import checkpoints_in, newest_intact
from imagenet_cls.config.keys import keys_without_recipe
from imagenet_cls.config.load import comparable_values
from imagenet_cls.config.rules import ineffective_keys
from imagenet_cls.config.schema import OptimizerConfig
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.run_folder import RunFolder, RunOptions
from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.weights import set_tensors, state_dict_mismatch
from imagenet_cls.optim.optimizers import optimizer_of_layer
from imagenet_cls.parallel.collectives import broadcast_tensors, run_on_main
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.report.reporter import Reporter
from imagenet_cls.text import command_line, format_value
from imagenet_cls.versions import library_versions

# The changes that the message of an error lists.
_MAX_LISTED = 4


def take_snapshot(
    parts: TrainingParts, progress: Progress, description: dict[str, Any]
) -> Snapshot:
    """A copy of the run's state in host memory. description: the result of `describe_run`."""
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
    """The part of `state.json` that is the same at every step: enough to predict with nothing but
    the checkpoint.
    """
    mean, std = parts.mean_std
    return {
        "plan": {
            "steps_per_epoch": parts.plan.steps_per_epoch,
            "total_steps": parts.plan.total_steps,
            "offset": parts.plan.offset,
        },
        "classes": list(parts.data.classes),
        "num_classes": parts.num_classes,
        "data_digest": parts.data.train.digest,
        "val_digest": parts.data.val.digest,
        "data_sizes": parts.data.train.size_fingerprint(),
        "val_sizes": parts.data.val.size_fingerprint(),
        "teacher_digest": parts.teacher_digest,
        "preprocessing": {"mean": mean, "std": std},
        "config": asdict(parts.config),
        "world_size": parts.context.world_size,
        "cpu_threads": torch.get_num_threads(),
        "versions": library_versions(),
    }


def open_saver(
    parts: TrainingParts, progress: Progress, folder: RunFolder, reporter: Reporter
) -> CheckpointSaver:
    """The saver of the run's checkpoints. Before each of them, it writes the reporter's records."""
    description = describe_run(parts) if parts.context.is_main else {}

    def before_write() -> None:
        folder.check_present()
        reporter.sync()  # first, so that no checkpoint is newer than the records

    return CheckpointSaver(
        folder.checkpoints,
        parts.config.checkpoint,
        parts.context.is_main,
        progress,
        take_snapshot=lambda: take_snapshot(parts, progress, description),
        before_write=before_write,
    )


def restore(
    parts: TrainingParts, snapshot: Snapshot, allow_change: Collection[str]
) -> tuple[Progress, list[str]]:
    """Load weights, EMA, optimizer and loss scale from the result of `find_checkpoint`. A
    collective: rank 0 broadcasts the tensors.

    Returns the progress and messages. Raises CheckpointError where `check_checkpoint` does.
    """
    context = parts.context

    def check() -> list[str]:
        with invalid_content_errors(snapshot.path):
            return check_checkpoint(snapshot, parts, allow_change)

    messages = run_on_main(context, check)
    # Outside of `invalid_content_errors`: a lost rank is no invalid content.
    model = broadcast_tensors(snapshot.model, context)
    optimizer = broadcast_tensors(snapshot.optimizer, context)
    ema = None if snapshot.ema is None else broadcast_tensors(snapshot.ema, context)
    with invalid_content_errors(snapshot.path):
        set_tensors(parts.model, model)
        changed = changed_optimizer_kwargs(snapshot.state, parts.config.optimizer)
        load_optimizer(parts.model, parts.optimizer, optimizer, snapshot.optimizer_values, changed)
        if ema is None:  # the earlier run had none: the EMA starts from the loaded weights
            parts.ema.set(parts.model)
        elif parts.ema.module is not None:
            set_tensors(parts.ema.module, ema)
        if parts.scaler.is_enabled() and snapshot.state["scaler"]:
            parts.scaler.load_state_dict(snapshot.state["scaler"])
        progress = read_progress(snapshot.state["progress"])
        messages += resume_epoch(parts, progress, snapshot.state)
    parts.batch_norm_statistics.store_current()
    return progress, messages


def resume_epoch(parts: TrainingParts, progress: Progress, state: dict[str, Any]) -> list[str]:
    """Resume in the checkpoint's epoch, after as many of its samples, rounded down to whole steps,
    also where an epoch has other steps now: set the offset of `parts.plan`, and change the places
    in `progress`. Returns a message about such a change, if any.

    state: `state.json`.
    """
    plan = parts.plan
    step = progress.step
    steps = plan.steps_per_epoch
    steps_before = state["plan"]["steps_per_epoch"]
    offset_before = state["plan"].get("offset", 0)  # older checkpoints have none
    epoch, done_before = divmod(step + offset_before, steps_before)
    samples = done_before * state["config"]["train"]["global_batch_size"]
    done = min(samples // plan.global_batch, steps)
    offset = epoch * steps + done - step
    total = plan.epochs * steps - offset
    total = min(total, parts.config.train.max_steps or total)
    parts.plan = replace(plan, offset=offset, total_steps=total)
    if (steps, offset) == (steps_before, offset_before):
        return []
    if done_before and not done:
        progress.evaluated_step = step  # rounded down to the end of an evaluated epoch
    if step >= total:
        return []
    return [f"continues in epoch {epoch + 1} of {plan.epochs}, after {done} of its {steps} steps"]


def find_checkpoint(
    folder: RunFolder, options: RunOptions, context: RankContext
) -> tuple[Snapshot | None, list[str]]:
    """The checkpoint to resume from, if any, and messages about it. A collective: rank 0 reads it,
    the other ranks receive everything but its tensors, which `restore` broadcasts. Raises
    CheckpointError.
    """

    def without_tensors(
        found: tuple[Snapshot | None, list[str]],
    ) -> tuple[Snapshot | None, list[str]]:
        snapshot, messages = found
        if snapshot is None:
            return found
        ema: dict[str, Tensor] | None = None if snapshot.ema is None else {}
        return replace(snapshot, model={}, optimizer={}, ema=ema), messages

    read = partial(read_checkpoint_to_resume, folder, options)
    return run_on_main(context, read, to_send=without_tensors)


def read_checkpoint_to_resume(
    folder: RunFolder, options: RunOptions
) -> tuple[Snapshot | None, list[str]]:
    """Read the newest intact checkpoint of the run folder, with --resume, or else the checkpoint of
    --resume-from. Also returns messages about it. Raises CheckpointError.
    """
    snapshot: Snapshot | None = None
    damaged: list[str] = []
    notes: list[str] = []
    if options.resume:
        snapshot, damaged = newest_intact(list_checkpoints(folder.checkpoints))
    if options.resume_from is not None:
        if snapshot is None:
            snapshot, damaged = newest_intact(checkpoints_in(options.resume_from))
        else:
            notes = [
                f"--resume-from {options.resume_from} is not used: the run folder has checkpoints"
            ]
    if snapshot is None:
        message = f"no checkpoint to resume from in {folder.path}: starting from scratch"
        return None, [message] if options.resume else []
    with invalid_content_errors(snapshot.path):
        step = snapshot.state["progress"]["step"]
    messages = [f"{line}; using an older checkpoint" for line in damaged]
    return snapshot, [*messages, f"resumed from {snapshot.path} at step {step}", *notes]


def check_checkpoint(
    snapshot: Snapshot, parts: TrainingParts, allowed: Collection[str]
) -> list[str]:
    """Check that a run can resume from a checkpoint: see `check_resumable`; also that its weights
    and optimizer state fit. Returns messages. Raises CheckpointError.
    """
    mismatch = state_dict_mismatch(parts.model.state_dict(), snapshot.model)
    fits = not mismatch and group_members(parts.model, parts.optimizer) == [
        group["members"] for group in snapshot.optimizer_values["groups"]
    ]
    if not fits and not mismatch:  # these changes can't be allowed
        sections = ("model", "optimizer")
        allowed = [name for name in allowed if name.partition(".")[0] not in sections]
    messages = check_resumable(snapshot.state, parts, allowed, snapshot.path, fits)
    if mismatch:
        raise CheckpointError(
            f"{snapshot.path}: the model is not the one that this config builds: {mismatch}",
            "A run can't resume with another model: use the config of its run, or start a new one.",
        )
    check_optimizer_state(snapshot, parts.config.optimizer, parts.context.device)
    return messages


# A resumed run compares the keys of the config and the names of `run_conditions` with the
# checkpoint. A change of one of these is an error.
_MUST_NOT_CHANGE = {"optimizer.name", "training images", "classes"}
# A change of one of these is reported, as is a change of a key that is not part of the recipe
# (`keys_without_recipe`). Any other change needs --allow-change.
_AFFECTS_ROUNDING = {"ranks", "CPU threads", "versions"}
_MAY_CHANGE = {"validation images", "validation files", "steps per epoch", *_AFFECTS_ROUNDING}


def run_conditions(state: dict[str, Any]) -> dict[str, Any]:
    """What `describe_run` states besides the config, by the names that messages show. Unknown
    values are left out.
    """
    conditions = {
        "training images": state["data_digest"],
        "classes": state["classes"],
        "validation images": state.get("val_digest"),
        # The sizes of training files. A change is an error without `--allow-change data.files`.
        "data.files": state.get("data_sizes"),
        "validation files": state.get("val_sizes"),
        "distill.teacher": state.get("teacher_digest"),
        "steps per epoch": state["plan"]["steps_per_epoch"],
        "ranks": state["world_size"],
        "CPU threads": state["cpu_threads"],
        **{f"versions.{name}": version for name, version in state["versions"].items()},
    }
    return {name: value for name, value in conditions.items() if value is not None}


def check_resumable(
    state: dict[str, Any],
    parts: TrainingParts,
    allowed: Collection[str],
    path: Path | None = None,
    fits: bool = True,
) -> list[str]:
    """Compare a checkpoint's `state.json` with this run; returns a line for each difference that is
    no error.

    allowed: dotted keys, or whole sections, of the recipe that may have changed. path: the path of
    the checkpoint, for messages. fits: whether its weights and optimizer state can be loaded into
    this run, so that changes can be allowed. Raises CheckpointError.
    """
    stored = config_from_state(state, path)
    conditions_before = run_conditions(state)
    conditions_now = run_conditions(describe_run(parts))
    before = comparable_values(stored)
    now = comparable_values(parts.config)
    # Older checkpoints have fewer conditions.
    for name in conditions_before.keys() & conditions_now.keys():
        before[name] = conditions_before[name]
        now[name] = conditions_now[name]
    names = sorted({*before, *now} - {*ineffective_keys(stored), *ineffective_keys(parts.config)})
    changed = {
        name: f"{name}: {format_value(before.get(name))} -> {format_value(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    }
    forbidden = [line for name, line in changed.items() if name in _MUST_NOT_CHANGE]
    if forbidden:
        raise CheckpointError(
            "A run can't resume with another optimizer, other training images or other classes: "
            f"{'; '.join(forbidden)}",
            "Restore them, or start a new run from its weights: model.checkpoint=CHECKPOINT.",
        )
    may_change = keys_without_recipe() | _MAY_CHANGE
    not_allowed = [name for name in changed if not _includes([*may_change, *allowed], name)]
    if not_allowed:
        # First, since the defaults of other keys depend on them.
        of_model = [name for name in changed if name.startswith("model.")]
        listed = list(dict.fromkeys([*of_model, *not_allowed]))
        more = f" and {len(listed) - _MAX_LISTED} more" if listed[_MAX_LISTED:] else ""
        differences = "; ".join(changed[name] for name in listed[:_MAX_LISTED])
        run = shlex.quote(str(path.parent.parent)) if path else "RUN"
        remedy = (
            f"Resume with the config of the run: {command_line('train')} {run}/config.yaml "
            f"--work-dir {run} --resume"
        )
        if fits:
            flags = " ".join(f"--allow-change {name}" for name in not_allowed[:_MAX_LISTED])
            remedy += f"\nOr allow the change: {flags}"
        else:
            remedy += f"\nOr start a new run from its weights: model.checkpoint={run}"
        raise CheckpointError(
            f"The config differs from the checkpoint's: {differences}{more}.", remedy
        )
    lines = [f"changed since the checkpoint: {line}" for line in changed.values()]
    if any(_includes(_AFFECTS_ROUNDING, name) for name in changed):
        lines.append(
            "the samples are the same, but rounding may differ: results may not be identical"
        )
    return lines


def changed_optimizer_kwargs(state: dict[str, Any], now: OptimizerConfig) -> list[str]:
    """The names in `optimizer.kwargs` whose values differ from those in a checkpoint's
    `state.json`.
    """
    before = state["config"]["optimizer"]["kwargs"]
    return sorted(
        name for name in {*before, *now.kwargs} if before.get(name) != now.kwargs.get(name)
    )


def check_optimizer_state(snapshot: Snapshot, now: OptimizerConfig, device: torch.device) -> None:
    """Raise CheckpointError if a changed argument of the optimizer needs state that the checkpoint
    lacks.

    It makes a step with a small layer to find out, because optimizers differ: SGD can begin to use
    momentum at any step, but AdamW can't begin to use `amsgrad`.
    """
    changed = changed_optimizer_kwargs(snapshot.state, now)
    if not changed:
        return
    layer = nn.Linear(2, 3, device=device)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = config_from_state(snapshot.state, snapshot.path).optimizer
    old = optimizer_of_layer(before, layer)
    new = optimizer_of_layer(now, layer)
    old.step()
    load_optimizer(layer, new, *optimizer_to_tensors(layer, old), changed)
    try:
        new.step()
    except KeyError as error:
        raise CheckpointError(
            f"{snapshot.path}: its optimizer state has no {error}, which {now.name} needs after "
            f"the change of optimizer.kwargs ({', '.join(changed)}).",
            "Restore them, or start a new run from the checkpoint's weights: "
            f"model.checkpoint={snapshot.path}",
        ) from error


def _includes(names: Collection[str], name: str) -> bool:
    """Whether `names` has the name itself, or a section that it is in."""
    return any(name == other or name.startswith(f"{other}.") for other in names)
