"""May this run go on from that checkpoint? What a changed config means for a resumed run.

Owns the list of keys that do not belong to the recipe. Called by `engine.run` on rank 0.
"""

from collections.abc import Sequence
from typing import Any

import torch

from imagenet_cls.checkpoint.format import config_of
from imagenet_cls.config.check import ineffective_keys
from imagenet_cls.engine.build import Parts
from imagenet_cls.errors import CheckpointError
from imagenet_cls.guards.agreement import settings_of, versions

# Sections and keys that change how fast, where or how visibly a run goes, but not what it computes.
_FREE = (
    "checkpoint", "log", "expect", "device", "imports", "eval.batch_size", "eval.every_epochs", "data.root",
    "data.exclude",  # what they leave out shows in the digest of the images
    "data.num_workers", "data.prefetch_batches", "data.timeout_sec",
    "train.max_steps", "train.max_nonfinite_steps", "train.deterministic",
    "train.compile", "train.grad_checkpointing", "train.micro_batch_size", "parallel.mode", "parallel.device_ids",
    "parallel.output_device", "parallel.backend", "parallel.init_method", "parallel.timeout_sec",
    "parallel.check_every_steps", "model.pretrained", "model.checkpoint", "distill.teacher.pretrained",
    "distill.teacher.checkpoint",
)  # fmt: skip


def check_resumable(state: dict[str, Any], parts: Parts, allowed: Sequence[str]) -> list[str]:
    """Compare a checkpoint's recipe and data with this run's; return lines that say what differs and is let through.

    Raises CheckpointError for a change of the recipe that `allowed` (dotted keys, or whole sections) does not name,
    for another optimizer, another set of training images or classes, and for an average of checkpoints.
    """
    if "averaged" in state:
        raise CheckpointError(
            "the checkpoint is an average of others, and has no optimizer state to go on from.\n"
            "Start a new run from its weights: model.checkpoint=CHECKPOINT"
        )
    # Through the schema: a key that is newer than the checkpoint has its default there.
    old = config_of(state, "the checkpoint")
    before, now = settings_of(old), settings_of(parts.config)
    ineffective = ineffective_keys(old).keys() | ineffective_keys(parts.config)
    names = sorted({*before, *now} - ineffective)  # what makes a key act is a key, too
    changed = {key: (before.get(key), now.get(key)) for key in names if before.get(key) != now.get(key)}
    lines = [f"{key}: {was!r} -> {new!r}" for key, (was, new) in changed.items()]
    if "optimizer.name" in changed:
        raise CheckpointError(
            f"{lines[list(changed).index('optimizer.name')]}: no optimizer goes on from what another one remembers.\n"
            "Put it back, or start a new run from the checkpoint's weights: model.checkpoint=CHECKPOINT"
        )
    # Where the schedule goes by evaluations, when they are made belongs to the recipe.
    free = [key for key in _FREE if key != "eval.every_epochs" or parts.config.schedule.name != "plateau"]
    refused = [key for key in changed if not _names(free, key) and not _names(allowed, key)]
    if refused:
        shown = "; ".join(line for line in lines if line.partition(":")[0] in refused[:4])
        more = f" and {len(refused) - 4} more" if len(refused) > 4 else ""
        raise CheckpointError(
            f"the config differs from the one that the checkpoint was made with: {shown}{more}\n"
            f"Put it back, or allow it: {' '.join(f'--allow-change {key}' for key in refused[:4])}"
        )
    assert parts.data.train is not None
    if state["classes"] != list(parts.data.classes) or state["data_digest"] != parts.data.train.digest():
        raise CheckpointError(
            f"the training images are not those of the checkpoint: {len(parts.data.train)} images in "
            f"{len(parts.data.classes)} classes here, {len(state['classes'])} classes there.\n"
            "Put the data back as it was, or start a new run from its weights with model.checkpoint=CHECKPOINT."
        )
    teachers = {state.get("teacher_digest"), parts.teacher_digest} - {None}
    if len(teachers) > 1 and not _names(allowed, "distill.teacher"):
        raise CheckpointError(
            "the teacher's weights (distill.teacher) are not those that the checkpoint learned from.\n"
            "Put them back, or allow it: --allow-change distill.teacher"
        )
    return [*(f"changed since the checkpoint: {line}" for line in lines), *unlike_before(state, parts)]


def unlike_before(state: dict[str, Any], parts: Parts) -> list[str]:
    """Lines about what lies around the config and is not as it was when the checkpoint was made."""
    messages = []
    was, here = state["plan"]["steps_per_epoch"], parts.plan.steps_per_epoch
    if was != here:
        step = state["step"]
        messages.append(
            f"an epoch had {was} steps and has {here}: step {step} was at {step / was:.2f} epochs, "
            f"and is at {step / here:.2f} of {parts.plan.epochs} now"
        )
    assert parts.data.val is not None
    if state.get("val_digest", parts.data.val.digest()) != parts.data.val.digest():
        messages.append("other validation images than before: evaluations do not compare, nor does the best of them")
    if state["world_size"] != parts.group.world_size:
        messages.append(
            f"{state['world_size']} ranks before, {parts.group.world_size} now: the same samples, but the same bits "
            "are promised for the same number of ranks only"
        )
    if state["cpu_threads"] != torch.get_num_threads() and parts.group.device.type == "cpu":
        messages.append(f"{state['cpu_threads']} CPU threads before, {torch.get_num_threads()} now: other last bits")
    present = versions()
    newer = [
        f"{name} {old} -> {present.get(name)}" for name, old in state["versions"].items() if old != present.get(name)
    ]
    if newer:
        messages.append(f"other versions than before, so other last bits are possible: {', '.join(newer)}")
    return messages


def _names(keys: Sequence[str], key: str) -> bool:
    return any(key == name or key.startswith(name + ".") for name in keys)
