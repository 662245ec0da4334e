"""Checkpoints: a folder that holds everything a run needs to go on, and everything a prediction needs. No pickle.

    step-0001234/model.safetensors      weights and buffers, loadable by timm as they are
                 ema.safetensors        the same names, averaged (where there is an EMA)
                 optimizer.safetensors  tensors of the optimizer, by parameter name
                 optimizer.json         its numbers
                 state.json             step, best, classes, preprocessing, metrics, the whole config
                 manifest.json          SHA-256 of each file, and of itself

Owns the format, writing it so that a kill at any moment leaves the old ones whole, and verifying it. Refuses to know
models and optimizers beyond their tensors: `engine.state` takes a run apart and puts it together again. Called by
`engine.saving`, `engine.run` and `engine.inference`.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from imagenet_cls.checkpoint.optimizer_state import Progress
from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import CheckpointError, ConfigError, ResourceError

FORMAT = 1
_TEMPORARY = ".tmp-"
# `.old`: a checkpoint that stepped aside for another of the same step, and is one until that has taken its place.
_NAME = re.compile(r"step-([0-9]{7,})(\.old)?")

# What everything that reads a checkpoint relies on: types of values by name.
_STATE = {
    "step": int, "num_classes": int, "classes": list, "data_digest": str, "world_size": int, "cpu_threads": int,
    "versions": dict, "config": dict, "scaler": dict, "preprocessing": {"mean": list, "std": list},
    "plan": {"steps_per_epoch": int},
    "progress": {"step": int, "evaluated_step": int, "best": dict, "latest": dict, "evaluations": list},
}  # fmt: skip
_NUMBERS = {"groups": list, "parameters": dict, "on_host": list}


@dataclass
class Snapshot:
    """What a checkpoint holds, in host memory. Tensors are contiguous CPU tensors that nothing else writes to."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    optimizer_numbers: dict[str, Any]
    state: dict[str, Any]
    ema: dict[str, Tensor] | None = None
    path: Path | None = field(default=None, compare=False)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write `folder/step-N` for the snapshot's step, replacing one of the same name, and return its path.

    Written beside its place, each file fsynced, renamed, the parent fsynced: whatever `list_checkpoints` finds, at
    every moment, is whole. Raises ResourceError with the bytes that are needed and free where the disk refuses; what
    was there before stays. `folder` may be missing, its parent may not: a run folder that is gone is not made anew.
    """
    final = checkpoint_path(folder, snapshot.state["step"])
    temporary = folder / f"{_TEMPORARY}{final.name}-{os.getpid()}"
    groups = {"model": snapshot.model, "ema": snapshot.ema, "optimizer": snapshot.optimizer}
    state = {"format": FORMAT, **snapshot.state}
    # The config in it keeps the order of its keys: of optimizer.lr_scales the first pattern that fits counts.
    texts = {"optimizer": _json(snapshot.optimizer_numbers), "state": _json(state, sort_keys=False)}
    try:
        if not folder.exists():
            folder.mkdir()
            _fsync(folder.parent)
        remove_leftovers(folder)
        temporary.mkdir()
        for name, tensors in groups.items():
            if tensors is not None:
                save_file(tensors, temporary / f"{name}.safetensors")
        for name, text in texts.items():
            (temporary / f"{name}.json").write_bytes(text)
        _write_json(temporary / "manifest.json", _manifest(temporary))
        for file in [*temporary.iterdir(), temporary]:
            _fsync(file)
        # The same step again, after a resume. A folder can't be replaced in one go, so the old one steps aside first,
        # under a name that still counts as a checkpoint.
        aside = final.with_name(f"{final.name}.old")
        if os.path.lexists(final):
            final.rename(aside)
        temporary.rename(final)
        _fsync(folder)
        if os.path.lexists(aside):
            _remove(aside)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        sizes = [*map(size_bytes, filter(None, groups.values())), *map(len, texts.values())]
        raise ResourceError(
            f"could not write {final}: {_reason(error)}{_room(folder, sizes)}\n"
            "Older checkpoints are as they were. Make room or mend the folder, then go on with --resume."
        ) from error
    return final


def size_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _reason(error: OSError | SafetensorError) -> str:
    """What the system says. safetensors has it in a text of its own, which ends in `(os error 28)`."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or str(error)


def _room(folder: Path, sizes_bytes: Sequence[int]) -> str:
    """What files of these sizes and a manifest need, in whole blocks, and what is free."""
    try:
        disk = os.statvfs(folder if folder.exists() else folder.parent)
    except OSError:
        return ""
    blocks = 1 + sum(-(-size // disk.f_frsize) for size in sizes_bytes)
    return f" ({blocks * disk.f_frsize:,} bytes needed, {disk.f_bavail * disk.f_frsize:,} free)"


def read_checkpoint(path: Path) -> Snapshot:
    """Read and verify one checkpoint folder: each file's digest first, then its content.

    Raises CheckpointError that says which file is missing or damaged.
    """
    content = verified_files(path)
    try:
        parsed = {
            name: dict(sorted(load_tensors(data).items()))  # their order is chance
            for name, data in content.items()
            if name.endswith(".safetensors")
        }
        state = json.loads(content["state.json"])
        numbers = json.loads(content["optimizer.json"])
        model, optimizer = parsed["model.safetensors"], parsed["optimizer.safetensors"]
        if not isinstance(state, dict):
            raise ValueError("state.json says nothing of a run")
    except KeyError as error:
        raise CheckpointError(f"{path}: can't be read: {error} is missing\nUse another checkpoint.") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: can't be read: {error}\nUse another checkpoint.") from error
    if state.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{path}: written in another format than {FORMAT}.\nRead it with the version that wrote it."
        )
    odd = _odd(state, _STATE, "state.json") or _odd(numbers, _NUMBERS, "optimizer.json")
    if not odd and (unknown := state["progress"].keys() - {known.name for known in fields(Progress)}):
        odd = f"state.json: progress: {min(unknown)} is unknown"
    if odd:
        raise CheckpointError(f"{path}: can't be read: {odd}\nUse another checkpoint.")
    return Snapshot(
        model=model,
        optimizer=optimizer,
        optimizer_numbers=numbers,
        state=state,
        ema=parsed.get("ema.safetensors"),
        path=path,
    )


def _odd(value: Any, expected: Any, where: str) -> str:
    """What is missing in a value out of a file, or of another type than every run of ours writes; "" for nothing."""
    kind = dict if isinstance(expected, dict) else expected
    if not isinstance(value, kind) or isinstance(value, bool):
        return f"{where} is no {kind.__name__}"
    members = expected.items() if isinstance(expected, dict) else ()
    return next(filter(None, (_odd(value.get(name), of, f"{where}: {name}") for name, of in members)), "")


def config_of(state: Mapping[str, Any], where: Path | str) -> Config:
    """The config that a checkpoint was trained with. Raises CheckpointError where it is none of this version."""
    try:
        return config_from_dict(state["config"])
    except ConfigError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{where}: its config can't be read: {reason}\nUse another checkpoint.") from error


def verified_files(path: Path, only: str | None = None) -> dict[str, bytes]:
    """The content of each file that the manifest names, after its digest was compared. Raises CheckpointError.

    only: the one file to read and compare, of a checkpoint that may be many gigabytes.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        files = manifest["files"]
        if manifest["sha256"] != _digest(_canonical(files)):
            raise CheckpointError(
                f"{path}: damaged (manifest.json does not match its own digest).\nUse another checkpoint."
            )
        content = {}
        for name, digest in files.items() if only is None else [(only, files[only])]:
            file = path / name
            if file.parent != path or not file.is_file():  # not out of the folder, and not into /dev/zero
                raise FileNotFoundError(f"no file {name!r}")
            content[name] = file.read_bytes()
            if _digest(content[name]) != digest:
                raise CheckpointError(f"{path}: damaged ({name} does not match its digest).\nUse another checkpoint.")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint ({error}).\nUse another checkpoint.") from error
    return content


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders in a run's `checkpoints/`, newest (highest step) first.

    Not verified: a link to nowhere, as to a disk that is not mounted, is one too, and damaged.
    """
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path.is_dir() or path.is_symlink())]
    return sorted(found, key=lambda path: (step_of(path), not path.suffix), reverse=True)


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def prune(folder: Path, step: int, keep_last: int | None, keep_steps: set[int], damaged: Collection[int] = ()) -> None:
    """Remove all but the newest `keep_last` checkpoints up to `step`, and those of `keep_steps` (the best ones).

    step: the one just written. Later ones are damaged, or the run would have gone on from them: they neither count nor
    go, or else a damaged one could push out the whole ones. damaged: steps of which that is known; once the run is past
    them they go. Raises ResourceError where the disk refuses.
    """
    if keep_last is None:
        return
    try:
        earlier = [path for path in list_checkpoints(folder) if step_of(path) <= step]
        whole = [path for path in earlier if step_of(path) not in damaged]
        for path in earlier:
            if path not in whole[:keep_last] and (step_of(path) not in keep_steps or step_of(path) in damaged):
                _remove(path)
    except OSError as error:
        raise ResourceError(
            f"could not remove an old checkpoint from {folder}: {_reason(error)}\n"
            "Mend the folder, then go on with --resume."
        ) from error


def remove_leftovers(folder: Path) -> None:
    """Put right what a killed run left. Only one run at a time holds the folder, so nothing of it is in use."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for aside in [path for path in folder.glob("step-*.old") if _NAME.fullmatch(path.name)]:
        final = aside.with_suffix("")
        if final.exists():
            _remove(aside)
        else:
            aside.rename(final)


def _remove(path: Path) -> None:
    """Renamed first: a kill half way through a removal must not leave a folder that looks like a checkpoint."""
    if path.is_symlink():  # moved to another disk by somebody, who keeps it there
        path.unlink()
        return
    gone = path.with_name(f"{_TEMPORARY}gone-{path.name}")
    path.rename(gone)
    shutil.rmtree(gone)


def _manifest(folder: Path) -> dict[str, Any]:
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return {"files": files, "sha256": _digest(_canonical(files))}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_bytes(_json(value))


def _json(value: Any, sort_keys: bool = True) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=sort_keys) + "\n").encode()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
