"""Which checkpoint of a run to use: the newest intact one to resume from, the best one to predict with."""

import json
from contextlib import suppress
from math import isfinite
from pathlib import Path

from imagenet_cls.checkpoint.format import (
    Progress,
    Snapshot,
    checkpoint_content,
    list_checkpoints,
    read_checkpoint,
    step_of,
    verified_files,
)
from imagenet_cls.errors import CheckpointError, first_line


def load_newest(folder: Path) -> tuple[Snapshot | None, list[str]]:
    """The newest checkpoint that verifies, and a message for each newer one that is damaged.

    (None, []) where there is no checkpoint. Raises CheckpointError where all are damaged: starting from step 0 without
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


def load_newest_in(path: Path) -> tuple[Snapshot, list[str]]:
    """A checkpoint, or the newest intact one of a run folder; and messages about damaged ones. Raises CheckpointError
    where there is none."""
    candidates = _candidates(path)
    if candidates == [path]:
        return read_checkpoint(path), []
    snapshot, damage = load_newest(candidates[0].parent)
    assert snapshot is not None
    return snapshot, damage


def load_best(path: Path) -> tuple[Snapshot, str | None, list[str]]:
    """A checkpoint, or the one with the best top-1 of a run folder, verified.

    Also returns the kind of its weights that was best (`raw` or `ema`; None where `path` is a checkpoint, or none was
    evaluated), and a message for each better one that is damaged. Raises CheckpointError where none is intact.
    """
    candidates = _candidates(path)
    if candidates == [path]:
        return read_checkpoint(path), None, []
    newest, damage = load_newest_in(path)
    with checkpoint_content(newest.path):
        best = newest.state["progress"]["best"]
        kind = max(best, key=lambda name: best[name]["top1_pct"], default=None)
        wanted = [path for path in candidates if kind is not None and step_of(path) == best[kind]["step"]]
    if not wanted or wanted[0] == newest.path:
        return newest, kind if wanted else None, damage
    try:
        return read_checkpoint(wanted[0]), kind, damage
    except CheckpointError as error:
        return newest, None, [*damage, f"{first_line(error)}; using {newest.path} instead"]


def best_on_disk(checkpoints: Path, progress: Progress) -> set[int]:
    """Steps of the best checkpoints on disk, up to `progress.step`: for each kind of weights the best one, or, where it
    could not be saved, the best of those that were."""
    here = {step_of(path): path for path in list_checkpoints(checkpoints) if step_of(path) <= progress.step}
    found = {entry["step"] for entry in progress.best.values()} & here.keys()
    for kind in [kind for kind, entry in progress.best.items() if entry["step"] not in here]:
        scores = {}
        for step, path in here.items():
            with suppress(CheckpointError), checkpoint_content(path):
                state = json.loads(verified_files(path, "state.json")["state.json"])["progress"]
                if state["evaluated_step"] == step and isfinite(state["latest"][kind]["loss"]):
                    scores[step] = state["latest"][kind]["top1_pct"]
        found |= {max(scores, key=lambda step: scores[step])} if scores else set()
    return found


def _candidates(path: Path) -> list[Path]:
    """[path] for a checkpoint, or those of a run folder, newest first. Raises CheckpointError."""
    if (path / "manifest.json").is_file():
        return [path]
    candidates = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not candidates:
        raise CheckpointError(
            f"{path}: neither a checkpoint (no manifest.json) nor a run folder with checkpoints.\n"
            "Give a folder like work_dirs/demo/checkpoints/step-0000176, or a run folder."
        )
    return candidates
