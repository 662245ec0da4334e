"""The checkpoint folder: all that resuming or predicting needs, in safetensors and JSON. No pickle.

step-0001234/model.safetensors      weights and buffers; timm loads them as they are
             ema.safetensors        the same names, averaged (only with an EMA)
             optimizer.safetensors  tensors of the optimizer, by parameter name
             optimizer.json         its other values
             state.json             progress, classes, preprocessing, the whole config
             manifest.json          SHA-256 of each file
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import CheckpointError, ConfigError, ResourceError, first_line
from imagenet_cls.files import sync

FORMAT = 1
_TEMPORARY = ".tmp-"
# `.old`: being replaced by another checkpoint of the same step; valid until that one is in place.
_NAME = re.compile(r"step-([0-9]{7,})(\.old)?")


@dataclass
class Progress:
    """How far a run is. step: optimizer updates done. best: `top1_pct` and `step` for each kind of weights (raw, ema).

    evaluations: (step, top-1 in per cent of the raw weights) of each, which the `plateau` schedule reads.
    """

    step: int = 0
    evaluated_step: int = 0
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Snapshot:
    """The content of a checkpoint, in host memory: contiguous CPU tensors that share memory with nothing."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    optimizer_numbers: dict[str, Any]
    state: dict[str, Any]
    ema: dict[str, Tensor] | None = None
    path: Path | None = field(default=None, compare=False)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders in a run's `checkpoints/`, newest (highest step) first. They are not verified.

    A dangling link, as to a disk that is not mounted, is listed too: it counts as a damaged checkpoint.
    """
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path.is_dir() or path.is_symlink())]
    return sorted(found, key=lambda path: (step_of(path), not path.suffix), reverse=True)


# ------------------------------------------------------------------------------------------------ reading


def read_checkpoint(path: Path) -> Snapshot:
    """Read one checkpoint folder after verifying the digest of each file. Raises CheckpointError."""
    content = verified_files(path)
    with checkpoint_content(path):
        tensors = {
            name.removesuffix(".safetensors"): dict(sorted(load_tensors(data).items()))  # their order is random
            for name, data in content.items()
            if name.endswith(".safetensors")
        }
        state = json.loads(content["state.json"])
        if (written := state.pop("format", None)) != FORMAT:
            raise CheckpointError(f"{path}: format {written} is unknown here.\nRead it with the version that wrote it.")
        Progress(**state["progress"])
        return Snapshot(
            model=tensors["model"],
            optimizer=tensors["optimizer"],
            optimizer_numbers=json.loads(content["optimizer.json"]),
            state=state,
            ema=tensors.get("ema"),
            path=path,
        )


@contextlib.contextmanager
def checkpoint_content(path: Path | str | None) -> Iterator[None]:
    """Around code that uses what a checkpoint contains: values that are missing or malformed raise CheckpointError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise CheckpointError(f"{path}: invalid content ({reason}).\nUse another checkpoint.") from error


def config_of(state: Mapping[str, Any], where: Path | str) -> Config:
    """The config that a checkpoint was trained with. Raises CheckpointError."""
    try:
        with checkpoint_content(where):
            return config_from_dict(state["config"])
    except ConfigError as error:
        raise CheckpointError(
            f"{where}: its config is invalid: {first_line(error)}\nUse another checkpoint."
        ) from error


def verified_files(path: Path, only: str | None = None) -> dict[str, bytes]:
    """The content of the files that the manifest lists, each compared with its digest. Raises CheckpointError.

    only: the one file to read, of a checkpoint that may have many gigabytes.
    """
    try:
        digests = json.loads((path / "manifest.json").read_bytes())["files"]
        content = {}
        for name, digest in digests.items() if only is None else [(only, digests[only])]:
            file = path / name
            if file.parent != path or not file.is_file():  # no path out of the folder, and no link to /dev/zero
                raise FileNotFoundError(f"no file {name!r}")
            content[name] = file.read_bytes()
            if hashlib.sha256(content[name]).hexdigest() != digest:
                raise CheckpointError(f"{path}: damaged ({name} does not match its digest).\nUse another checkpoint.")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a complete checkpoint ({error}).\nUse another checkpoint.") from error
    return content


# ------------------------------------------------------------------------------------------------ writing


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write `folder/step-N` for the snapshot's step, replacing one of the same name, and return its path.

    Atomic: written to a temporary folder, fsynced, renamed. A process killed at any moment leaves complete checkpoints
    only. Raises ResourceError where the disk fails; existing checkpoints stay. `folder` is created, but not its parent:
    a run folder that has disappeared must not be created again.
    """
    final = checkpoint_path(folder, snapshot.state["step"])
    temporary = folder / f"{_TEMPORARY}{final.name}-{os.getpid()}"
    tensors = {"model": snapshot.model, "ema": snapshot.ema, "optimizer": snapshot.optimizer}
    try:
        if not folder.exists():
            folder.mkdir()
            sync(folder.parent)
        finish_interrupted_writes(folder)
        temporary.mkdir()
        for name, group in tensors.items():
            if group is not None:
                save_file(group, temporary / f"{name}.safetensors")
        _write_json(temporary / "optimizer.json", snapshot.optimizer_numbers)
        # Keys keep their order: the first pattern of optimizer.lr_scales that matches counts.
        _write_json(temporary / "state.json", {"format": FORMAT, **snapshot.state}, sort_keys=False)
        write_manifest(temporary)
        for file in [*temporary.iterdir(), temporary]:
            sync(file)
        # A folder can't replace another one atomically, so an older one is renamed first, to a name that is valid too.
        aside = final.with_name(f"{final.name}.old")
        if os.path.lexists(final):
            final.rename(aside)
        temporary.rename(final)
        sync(folder)
        if os.path.lexists(aside):
            _remove(aside)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(size_bytes(group) for group in tensors.values() if group is not None)
        raise ResourceError(
            f"could not write {final}: {_reason(error)}{_room(folder, needed)}\n"
            "Older checkpoints are unchanged. Free space or repair the folder, then resume with --resume."
        ) from error
    return final


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` with the digests of all other files in `folder`."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json":
            with path.open("rb") as file:
                files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    # Older versions also verify the manifest itself by this digest.
    own = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    _write_json(folder / "manifest.json", {"files": files, "sha256": own})


def size_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def prune(folder: Path, step: int, keep_last: int | None, keep_steps: set[int], damaged: Collection[int] = ()) -> None:
    """Remove all but the newest `keep_last` checkpoints up to `step`, and those of `keep_steps` (the best ones).

    step: of the checkpoint just written. Later ones are neither counted nor removed: they are damaged, or the run would
    have resumed from them. damaged: steps of damaged ones; they are removed when the run has passed them. Raises
    ResourceError.
    """
    if keep_last is None:
        return
    try:
        earlier = [path for path in list_checkpoints(folder) if step_of(path) <= step]
        intact = [path for path in earlier if step_of(path) not in damaged]
        for path in earlier:
            if path not in intact[:keep_last] and (step_of(path) not in keep_steps or step_of(path) in damaged):
                _remove(path)
    except OSError as error:
        raise ResourceError(
            f"could not remove an old checkpoint from {folder}: {_reason(error)}\n"
            "Repair the folder, then resume with --resume."
        ) from error


def finish_interrupted_writes(folder: Path) -> None:
    """Remove or complete what a killed run was writing. Only the run that holds the folder's lock may call this."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for aside in [path for path in folder.glob("step-*.old") if _NAME.fullmatch(path.name)]:
        final = aside.with_suffix("")
        if final.exists():
            _remove(aside)
        else:
            aside.rename(final)


def _remove(path: Path) -> None:
    """Rename before removing, so that a killed process leaves no folder that looks like a checkpoint."""
    if path.is_symlink():  # to a copy elsewhere, which stays
        path.unlink()
        return
    renamed = path.with_name(f"{_TEMPORARY}gone-{path.name}")
    path.rename(renamed)
    shutil.rmtree(renamed)


def _write_json(path: Path, value: Any, sort_keys: bool = True) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=sort_keys) + "\n")


def _reason(error: OSError | SafetensorError) -> str:
    """safetensors keeps the system's error number in its text only: `(os error 28)`."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or str(error)


def _room(folder: Path, needed_bytes: int) -> str:
    try:
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    except OSError:
        return ""
    return f" ({needed_bytes:,} bytes needed, {free:,} free)"
