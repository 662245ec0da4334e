"""Resume a run: check that it fits the checkpoint, report what has changed, and load the state on every rank."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from imagenet_cls.checkpoint.format import Progress, Snapshot, checkpoint_content, config_of
from imagenet_cls.checkpoint.optimizer_state import load_optimizer
from imagenet_cls.checkpoint.select import load_newest, load_newest_in
from imagenet_cls.config.check import ineffective_keys
from imagenet_cls.config.keys import keys_with
from imagenet_cls.engine.build import TrainingParts
from imagenet_cls.engine.run_folder import RunFolder, RunOptions
from imagenet_cls.errors import CheckpointError
from imagenet_cls.guards.agreement import settings_of, versions
from imagenet_cls.models.weights import state_dict_mismatch
from imagenet_cls.optim.build import state_names
from imagenet_cls.parallel.collectives import broadcast_tensors
from imagenet_cls.parallel.process_group import run_on_main
from imagenet_cls.report.jsonl import missing_steps

_SHOWN = 4


def restore(parts: TrainingParts, folder: RunFolder, options: RunOptions) -> tuple[Progress, list[str]]:
    """Load weights, EMA, optimizer and loss scale from the checkpoint to resume from. A collective.

    Rank 0 reads and verifies the checkpoint and broadcasts its tensors. Returns the progress, of step 0 for a run that
    starts from scratch, and messages for the log. Raises CheckpointError.
    """
    group = parts.group
    snapshot: Snapshot | None = None

    def find() -> dict | None:
        """On rank 0: the checkpoint, and what the other ranks need to know of it."""
        nonlocal snapshot
        snapshot, damaged = load_newest(folder.checkpoints) if options.resume else (None, [])
        own = snapshot is not None
        if snapshot is None and options.resume_from is not None:
            snapshot, damaged = load_newest_in(options.resume_from)
        if snapshot is None:
            return None
        with checkpoint_content(snapshot.path):
            changes = check_resumable(snapshot.state, parts, options.allow_change)
        step = snapshot.state["progress"]["step"]
        messages = [f"{line}; using an older checkpoint" for line in damaged]
        messages += [f"resumed from {snapshot.path} at step {step}", *changes]
        if own and (gap := missing_steps(folder.path / "metrics.jsonl", step)):
            messages.append(gap)
        if own and options.resume_from is not None:
            messages.append(f"--resume-from {options.resume_from} is not used: the run folder has checkpoints")
        return {
            "state": snapshot.state,
            "numbers": snapshot.optimizer_numbers,
            "has_ema": snapshot.ema is not None,
            "messages": messages,
        }

    known = run_on_main(group, find)
    if known is None:
        missing = [f"no checkpoint to resume from in {folder.path}: starting from scratch"] if options.resume else []
        return Progress(), missing
    with checkpoint_content(snapshot.path if snapshot else folder.checkpoints):
        _load_weights(snapshot, parts.model, broadcast_tensors(snapshot.model if snapshot else None, group))
        tensors = broadcast_tensors(snapshot.optimizer if snapshot else None, group)
        before, now = known["state"]["config"]["optimizer"]["kwargs"], parts.config.optimizer.kwargs
        changed = [name for name in {*before, *now} if before.get(name) != now.get(name)]
        needed = state_names(parts.config.optimizer) if changed else ()
        load_optimizer(parts.model, parts.optimizer, tensors, known["numbers"], changed, needed)
        if known["has_ema"]:
            ema = broadcast_tensors(snapshot.ema if snapshot else None, group)
            if parts.ema.module is not None:
                _load_weights(snapshot, parts.ema.module, ema)
        else:
            parts.ema.set(parts.model)
        if parts.scaler.is_enabled() and known["state"]["scaler"]:
            parts.scaler.load_state_dict(known["state"]["scaler"])
    parts.batch_norm_statistics.store_current()
    return Progress(**known["state"]["progress"]), known["messages"]


def _load_weights(snapshot: Snapshot | None, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    if mismatch := state_dict_mismatch(model.state_dict(), tensors):
        where = f"{snapshot.path}: " if snapshot else ""
        raise CheckpointError(
            f"{where}the checkpoint's model is not the one that this config builds: {mismatch}\n"
            "Resume with the model of the checkpoint, or start a new run from its weights with model.checkpoint."
        )
    model.load_state_dict(tensors)


def check_resumable(state: dict[str, Any], parts: TrainingParts, allowed: Collection[str]) -> list[str]:
    """Compare a checkpoint's `state.json` with this run; returns a line for each difference that is no error.

    allowed: dotted keys, or whole sections, of the recipe that may have changed. Raises CheckpointError for other
    changes of the recipe, another optimizer, other training images or classes, and an average of checkpoints.
    """
    assert parts.data.train is not None
    if "averaged" in state:
        raise CheckpointError(
            "the checkpoint is an average of others and has no optimizer state to resume from.\n"
            "Start a new run from its weights: model.checkpoint=CHECKPOINT"
        )
    old = config_of(state, "the checkpoint")
    before, now = settings_of(old), settings_of(parts.config)
    names = sorted({*before, *now} - {*ineffective_keys(old), *ineffective_keys(parts.config)})
    changed = {
        key: f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in names if before.get(key) != now.get(key)
    }
    if "optimizer.name" in changed:
        raise CheckpointError(
            f"{changed['optimizer.name']}: an optimizer can't load the state of another one.\n"
            "Restore it, or start a new run from the checkpoint's weights: model.checkpoint=CHECKPOINT"
        )
    free = keys_with("not_recipe")
    if parts.config.schedule.name == "plateau":  # which depends on when evaluations are made
        free -= {"eval.every_epochs"}
    recipe = [key for key in changed if not _includes(free, key) and not _includes(allowed, key)]
    if recipe:
        more = f" and {len(recipe) - _SHOWN} more" if len(recipe) > _SHOWN else ""
        raise CheckpointError(
            f"the config differs from the checkpoint's: {'; '.join(changed[key] for key in recipe[:_SHOWN])}{more}\n"
            f"Restore it, or allow the change: {' '.join(f'--allow-change {key}' for key in recipe[:_SHOWN])}"
        )
    if state["classes"] != list(parts.data.classes) or state["data_digest"] != parts.data.train.digest():
        raise CheckpointError(
            f"the training images are not those of the checkpoint: {len(parts.data.train)} images in "
            f"{len(parts.data.classes)} classes here, {len(state['classes'])} classes there.\n"
            "Restore the data, or start a new run from its weights: model.checkpoint=CHECKPOINT"
        )
    if len({state.get("teacher_digest"), parts.teacher_digest} - {None}) > 1 and not _includes(
        allowed, "distill.teacher"
    ):
        raise CheckpointError(
            "the teacher's weights (distill.teacher) are not those that the checkpoint was trained with.\n"
            "Restore them, or allow the change: --allow-change distill.teacher"
        )
    return [*(f"changed since the checkpoint: {line}" for line in changed.values()), *changed_environment(state, parts)]


def changed_environment(state: dict[str, Any], parts: TrainingParts) -> list[str]:
    """Lines about what differs besides the config: steps per epoch, validation images, ranks, threads, versions."""
    assert parts.data.val is not None
    lines = []
    old, new, step = state["plan"]["steps_per_epoch"], parts.plan.steps_per_epoch, state["step"]
    if old != new:
        lines.append(
            f"an epoch had {old} steps, now it has {new}: step {step} was epoch {step / old:.2f}, now it is epoch "
            f"{step / new:.2f} of {parts.plan.epochs}"
        )
    if state.get("val_digest", parts.data.val.digest()) != parts.data.val.digest():
        lines.append("the validation images have changed: top-1 before and after can't be compared")
    if state["world_size"] != parts.group.world_size:
        lines.append(
            f"the number of ranks has changed from {state['world_size']} to {parts.group.world_size}: the samples are "
            "the same, but rounding may differ"
        )
    if state["cpu_threads"] != torch.get_num_threads() and parts.group.device.type == "cpu":
        lines.append(
            f"the number of CPU threads has changed from {state['cpu_threads']} to {torch.get_num_threads()}: rounding "
            "may differ"
        )
    present = versions()
    updated = [f"{name} {v} -> {present.get(name)}" for name, v in state["versions"].items() if v != present.get(name)]
    if updated:
        lines.append(f"versions have changed, rounding may differ: {', '.join(updated)}")
    return lines


def _includes(keys: Collection[str], key: str) -> bool:
    """Whether `keys` has the key itself, or a section that it is in."""
    return any(key == name or key.startswith(name + ".") for name in keys)
