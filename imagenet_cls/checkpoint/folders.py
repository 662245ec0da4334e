"""The checkpoint folders in `checkpoints/` by their names. Does not import torch."""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from imagenet_cls.errors import CheckpointError
from imagenet_cls.files import TEMPORARY, remove

# `.old`: being replaced by another checkpoint of the same step; valid until that one is in place.
_NAME = re.compile(r"step-([0-9]{7,})(\.old)?")


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders in a run's `checkpoints/`, newest first. They are not verified.

    A dangling link, as to a disk that is not mounted, counts as a damaged checkpoint. Raises
    CheckpointError if the folder can't be read.
    """
    try:
        if not folder.is_dir():
            return []
        found = [
            path
            for path in folder.iterdir()
            if _NAME.fullmatch(path.name) and (path.is_dir() or path.is_symlink())
        ]
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: {error.strerror}.", "Restore access, or give another folder."
        ) from error
    return sorted(found, key=lambda path: (step_of(path), not path.suffix), reverse=True)


def list_run(path: Path) -> list[Path]:
    """`list_checkpoints` of a run folder, or of its `checkpoints/`."""
    return list_checkpoints(path / "checkpoints") or list_checkpoints(path)


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint or of a file in one, or the newest of a run folder that can be
    read. Its digest is not verified. Raises CheckpointError.
    """
    folder = path if path.is_dir() else path.parent
    for checkpoint in (folder, *list_run(folder)):
        with suppress(OSError, ValueError):
            state: dict[str, Any] = json.loads((checkpoint / "state.json").read_bytes())
            if isinstance(state, dict) and "progress" in state:
                return state
    raise CheckpointError(
        f"{path}: neither a checkpoint nor a run folder with an intact one.",
        "Give one, or a config.",
    )


def finish_interrupted_writes(folder: Path) -> None:
    """Remove or complete what a killed run was writing. Only the run that holds the folder's lock
    may call this.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)
    for aside in list(folder.glob("step-*.old")):
        if not _NAME.fullmatch(aside.name):
            continue
        final = aside.with_suffix("")
        if final.exists():
            remove(aside)
        else:
            aside.rename(final)
