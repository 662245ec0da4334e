"""Which checkpoint of a run to use: the newest intact one to resume from, the best one to predict with."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path

from imagenet_cls.checkpoint.folders import list_checkpoints, step_of
from imagenet_cls.checkpoint.format import (
    Progress,
    Snapshot,
    best_score,
    invalid_content_errors,
    read_checkpoint,
    score,
    verified_files,
)
from imagenet_cls.errors import CheckpointError, first_line


def newest_intact(folder: Path) -> tuple[Snapshot | None, list[str]]:
    """The newest checkpoint that verifies, and a message for each newer one that is damaged.

    (None, []) where there is no checkpoint. Raises CheckpointError if all are damaged: starting from step 0 without
    an error would lose the run.
    """
    damage: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return read_checkpoint(path), damage
        except CheckpointError as error:
            damage.append(first_line(error))
    if damage:
        raise CheckpointError(
            f"{folder}: all {len(damage)} checkpoints are damaged; the newest: {damage[0]}\n"
            "Restore one from a backup, or start again with --overwrite (which removes this run)."
        )
    return None, []


def load_newest(path: Path) -> tuple[Snapshot, list[str]]:
    """A checkpoint, or the newest intact one of a run folder; and messages about damaged ones. Raises CheckpointError
    where there is none."""
    path = _link_target(path)
    candidates = _candidates(path)
    if candidates == [path]:
        return read_checkpoint(path), []
    snapshot, damage = newest_intact(candidates[0].parent)
    assert snapshot is not None
    return snapshot, damage


def load_best(path: Path) -> tuple[Snapshot, str | None, list[str]]:
    """A checkpoint, or the best one of a run folder (`checkpoint.best`), verified.

    Also returns which of its weights were best (`raw` or `ema`; None where `path` is a checkpoint, or none was
    evaluated), and a message for each better one that is damaged. Raises CheckpointError if none is intact.
    """
    path = _link_target(path)
    candidates = _candidates(path)
    if candidates == [path]:
        return read_checkpoint(path), None, []
    newest, damage = load_newest(path)
    with invalid_content_errors(newest.path):
        best = newest.state["progress"]["best"]
        name = max(best, key=lambda name: best_score(best[name]), default=None)
        wanted = [path for path in candidates if name is not None and step_of(path) == best[name]["step"]]
    if not wanted or wanted[0] == newest.path:
        return newest, name if wanted else None, damage
    try:
        return read_checkpoint(wanted[0]), name, damage
    except CheckpointError as error:
        return newest, None, [*damage, f"{first_line(error)}; using {newest.path} instead"]


def saved_best_steps(checkpoints: Path, progress: Progress) -> set[int]:
    """Steps of the best checkpoints on disk, up to `progress.step`: the best one for the raw and for the EMA weights,
    or, where that could not be saved, the best of those that were."""
    saved = {step_of(path): path for path in list_checkpoints(checkpoints) if step_of(path) <= progress.step}
    steps = set()
    for name, best in progress.best.items():
        (metric,) = (name for name in best if name != "step")
        scores = {best["step"]: best_score(best)} if best["step"] in saved else _saved_scores(saved, name, metric)
        steps |= {max(scores, key=lambda step: scores[step])} if scores else set()
    return steps


def _saved_scores(saved: Mapping[int, Path], name: str, metric: str) -> dict[int, float]:
    """The scores of the saved weights called `name`, by the steps of those that were evaluated with a finite loss."""
    scores = {}
    for step, path in saved.items():
        with suppress(CheckpointError), invalid_content_errors(path):
            progress = json.loads(verified_files(path, "state.json")["state.json"])["progress"]
            if progress["evaluated_step"] == step and isfinite(progress["latest"][name]["loss"]):
                scores[step] = score(progress["latest"][name], metric)
    return scores


def _link_target(path: Path) -> Path:
    """The folder that a link points to, so that a save of the run does not change it while it is read."""
    return path.parent / path.readlink() if path.is_symlink() else path


def _candidates(path: Path) -> list[Path]:
    """[path] for a checkpoint, or those of a run folder, newest first. Raises CheckpointError."""
    if os.path.isfile(path / "manifest.json"):  # noqa: PTH113 (pathlib raises without permission)
        return [path]
    candidates = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not candidates:
        raise CheckpointError(
            f"{path}: neither a checkpoint (no manifest.json) nor a run folder with checkpoints.\n"
            "Give a folder like work_dirs/demo/checkpoints/step-0000176, or a run folder."
        )
    return candidates
