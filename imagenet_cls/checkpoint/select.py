"""Which checkpoint is meant: the newest whole one to go on from, the best one to use, the best that are to stay.

Owns the choice among those in a folder, and what is said of damaged ones that were passed over. Refuses to know how one
is written or read, which is `engine.checkpoint`'s. Called by `engine.run`, `saving`, `model`, `inference` and
`averaging`, and by `compare`.
"""

import json
from contextlib import suppress
from math import isfinite
from pathlib import Path

from imagenet_cls.checkpoint.format import Snapshot, list_checkpoints, read_checkpoint, step_of, verified_files
from imagenet_cls.checkpoint.optimizer_state import Progress
from imagenet_cls.errors import CheckpointError


def load_newest(folder: Path) -> tuple[Snapshot | None, list[str]]:
    """The newest checkpoint that verifies, and a message for each newer one that did not.

    (None, []) where there is no checkpoint at all. Raises CheckpointError where there are some and all are bad:
    starting afresh in silence would lose the run.
    """
    damage: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return read_checkpoint(path), damage
        except CheckpointError as error:
            damage.append(str(error).splitlines()[0])
    if damage:
        raise CheckpointError(
            f"{folder}: none of {len(damage)} checkpoints is whole; the newest: {damage[0]}\n"
            "Restore one from elsewhere, or start anew with --overwrite (which removes this run)."
        )
    return None, []


def load_newest_in(path: Path) -> tuple[Snapshot, list[str]]:
    """What `--resume-from` means: that checkpoint, or of a run folder the newest whole one; and what was damaged.

    Raises CheckpointError where there is none.
    """
    candidates = _candidates(path)
    if candidates == [path]:
        return read_checkpoint(path), []
    snapshot, damage = load_newest(candidates[0].parent)
    assert snapshot is not None  # there are candidates
    return snapshot, damage


def load_best(path: Path) -> tuple[Snapshot, str | None, list[str]]:
    """The checkpoint that a user means: one itself, or of a run folder the one with the best top-1.

    Returns it verified; which of its weights are the best (`raw` or `ema`; None where one checkpoint was named, or none
    was evaluated); and a line for each better one that is damaged. Raises CheckpointError where there is no whole one.
    """
    candidates = _candidates(path)
    if candidates == [path]:
        return read_checkpoint(path), None, []
    newest, damage = load_newest_in(path)
    best = newest.state["progress"]["best"]
    kind = max(best, key=lambda name: best[name]["top1_pct"], default=None)
    wanted = [candidate for candidate in candidates if kind is not None and step_of(candidate) == best[kind]["step"]]
    if not wanted or wanted[0] == newest.path:
        return newest, kind if wanted else None, damage
    try:
        return read_checkpoint(wanted[0]), kind, damage
    except CheckpointError as error:
        line = f"{str(error).splitlines()[0]}; using {newest.path} instead"
        return newest, None, [*damage, line]


def best_on_disk(checkpoints: Path, progress: Progress) -> set[int]:
    """Steps of the best checkpoints that there are: where the best one of all could not be saved, the next best one.

    Those of later steps don't count: the run goes on from before them.
    """
    here = {step_of(path): path for path in list_checkpoints(checkpoints) if step_of(path) <= progress.step}
    found = {entry["step"] for entry in progress.best.values()} & here.keys()
    for kind in [kind for kind, entry in progress.best.items() if entry["step"] not in here]:
        scores = {}
        for step, path in here.items():
            with suppress(CheckpointError, ValueError, KeyError, TypeError):
                state = json.loads(verified_files(path, "state.json")["state.json"])["progress"]
                if state["evaluated_step"] == step and isfinite(state["latest"][kind]["loss"]):
                    scores[step] = state["latest"][kind]["top1_pct"]
        found |= {max(scores, key=lambda step: scores[step])} if scores else set()
    return found


def _candidates(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or those of the run folder that it is, newest first. Raises CheckpointError."""
    if (path / "manifest.json").is_file():
        return [path]
    candidates = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not candidates:
        raise CheckpointError(
            f"{path}: neither a checkpoint (no manifest.json) nor a run folder with checkpoints.\n"
            "Name a folder like work_dirs/demo/checkpoints/step-0000176, or a run folder."
        )
    return candidates
