"""Which checkpoint of a run to use.

The newest intact one to resume from, the best one to predict with.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.checkpoint.folders import list_run
from imagenet_cls.checkpoint.format import (
    Snapshot,
    checkpoint_path,
    read_checkpoint,
)
from imagenet_cls.checkpoint.progress import best_weights
from imagenet_cls.errors import CheckpointError
from imagenet_cls.text import first_line


def newest_intact(candidates: Sequence[Path]) -> tuple[Snapshot | None, list[str]]:
    """The newest checkpoint that verifies, if there is any, and a message for each newer one that
    is damaged.

    candidates: newest first, such as those of `checkpoints_in`. Raises CheckpointError if all are
    damaged: a start from step 0 would lose the run.
    """
    damage: list[str] = []
    for path in candidates:
        try:
            return read_checkpoint(path), damage
        except CheckpointError as error:
            damage.append(first_line(error))
    if damage:
        raise CheckpointError(
            f"{candidates[0].parent}: no checkpoint of {len(damage)} is intact; the newest: "
            f"{damage[0]}",
            "Restore one from a backup, or train again; train.py with --overwrite removes "
            "this run.",
        )
    return None, []


def load_best(path: Path) -> tuple[Snapshot, str | None, list[str]]:
    """Returns the best intact checkpoint of a run folder (or the given checkpoint), which of its
    weights are best, and messages about damaged ones and about a run whose newest one is returned.

    The weights are `raw` or `ema`. Those of a given checkpoint are the kind with the best result of
    its run so far. None without an evaluation and for a given checkpoint without an EMA; if the
    best checkpoint is missing or damaged, too: then the newest one is returned. Raises
    CheckpointError.
    """
    candidates = checkpoints_in(path)
    if candidates == [_link_target(path)]:
        snapshot = read_checkpoint(candidates[0])
        best = snapshot.state["progress"]["best"]
        if not best or snapshot.ema is None:
            return snapshot, None, []
        return snapshot, best_weights(best), []
    newest, damage = newest_intact(candidates)
    assert newest is not None and newest.path is not None
    best = newest.state["progress"]["best"]  # was checked when it was read
    if not best:
        note = f"{newest.path}: the newest checkpoint, since the run has no evaluation yet"
        return newest, None, [*damage, note]
    weights = best_weights(best)
    wanted = checkpoint_path(newest.path.parent, best[weights]["step"])
    if wanted == newest.path:
        return newest, weights, damage
    try:
        return read_checkpoint(wanted), weights, damage
    except CheckpointError as error:
        return newest, None, [*damage, f"{first_line(error)} {newest.path} is used instead."]


def _link_target(path: Path) -> Path:
    """The folder that a link points to, so that a save of the run does not change it while it is
    read.
    """
    return path.parent / path.readlink() if path.is_symlink() else path


def _is_complete(path: Path) -> bool:
    return os.path.isfile(path / "manifest.json")  # noqa: PTH113 (pathlib raises without permission)


def checkpoints_in(path: Path) -> list[Path]:
    """[path] for a checkpoint; the checkpoints of a run folder, newest first. Raises
    CheckpointError.
    """
    path = _link_target(path)
    if _is_complete(path):
        return [path]
    candidates = list_run(path)
    if not candidates:
        remedy = "Give a folder like work_dirs/demo/checkpoints/step-0000176, or a run folder."
        if path.suffix == ".pt2":
            remedy = "Load it with torch.export.load, or give its run folder or an .onnx file."
        raise CheckpointError(
            f"{path}: neither a checkpoint (no manifest.json) nor a run folder with checkpoints.",
            remedy,
        )
    return candidates
