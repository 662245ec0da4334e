"""The checkpoint folder: all that resuming or predicting needs, in safetensors and JSON. No pickle.

last, best                          links to the newest checkpoint and to the best one
                                    (`checkpoint.best`)
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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from imagenet_cls.checkpoint.folders import finish_interrupted_writes, list_checkpoints, step_of
from imagenet_cls.checkpoint.progress import read_progress
from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.rules import check_value
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import CheckpointError, ConfigError, ResourceError, explain_content_errors
from imagenet_cls.files import TEMPORARY, check_regular, fsync, remove
from imagenet_cls.text import first_line

FORMAT = 1
METADATA = "imagenet_cls"
"""The key of `class_metadata` in a safetensors file."""


@dataclass
class Snapshot:
    """The content of a checkpoint: contiguous CPU tensors that share memory with nothing, and
    `state.json`.

    optimizer, optimizer_values: see `optimizer_to_tensors`.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    optimizer_values: dict[str, Any]
    state: dict[str, Any]
    ema: dict[str, Tensor] | None = None
    path: Path | None = field(default=None, compare=False)


invalid_content_errors = partial(explain_content_errors, CheckpointError)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


def read_checkpoint(path: Path) -> Snapshot:
    """Read one checkpoint folder after verifying the digest of each file. Raises
    CheckpointError.
    """
    content = verified_files(path)
    with invalid_content_errors(path):
        tensors = {
            # their order is random
            name.removesuffix(".safetensors"): dict(sorted(load_tensors(data).items()))
            for name, data in content.items()
            if name.endswith(".safetensors")
        }
        state = json.loads(content["state.json"])
        if (written := state.pop("format", None)) != FORMAT:
            raise CheckpointError(
                f"{path}: format {written} is unknown here.",
                "Read it with the version that wrote it.",
            )
        read_progress(state["progress"])
        return Snapshot(
            model=tensors["model"],
            optimizer=tensors["optimizer"],
            optimizer_values=json.loads(content["optimizer.json"]),
            state=state,
            ema=tensors.get("ema"),
            path=path,
        )


def class_metadata(classes: Sequence[str]) -> dict[str, str]:
    """The metadata of a safetensors file, so that a copy of it states the classes of its outputs.

    A single key: safetensors writes several in random order.
    """
    return {METADATA: json.dumps({"classes": [*classes]})}


def stored_mean_std(state: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """The normalization of a checkpoint's images. Raises LookupError, TypeError or ValueError if it
    is malformed.
    """
    mean, std = state["preprocessing"]["mean"], state["preprocessing"]["std"]
    check_value("data.mean", mean)
    check_value("data.std", std)
    if len(mean) != len(std) or len(mean) not in (1, 3):
        raise ValueError(f"mean {mean} and std {std} are not 1 or 3 numbers each")
    return mean, std


def config_from_state(state: Mapping[str, Any], where: Path | str | None) -> Config:
    """The config that a checkpoint was trained with. Raises CheckpointError."""
    try:
        with invalid_content_errors(where):
            return config_from_dict(state["config"])
    except ConfigError as error:
        raise CheckpointError(
            f"{where}: its config is invalid ({first_line(error)}).", "Use another checkpoint."
        ) from error


def verified_files(path: Path) -> dict[str, bytes]:
    """The content of the files that the manifest lists, compared with their digests. Raises
    CheckpointError.
    """
    with invalid_content_errors(path, "not a complete checkpoint"):
        check_regular(path / "manifest.json")
        digests = json.loads((path / "manifest.json").read_bytes())["files"]
        content = {}
        for name, digest in digests.items():
            file = path / name
            if file.parent != path:  # a path out of the folder
                raise FileNotFoundError(f"no file {name!r}")
            check_regular(file)
            content[name] = file.read_bytes()
            if hashlib.sha256(content[name]).hexdigest() != digest:
                raise CheckpointError(
                    f"{path}: damaged ({name} does not match its digest).",
                    "Use another checkpoint.",
                )
    return content


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write `folder/step-N` for the snapshot's step, replacing one of the same name, and return its
    path.

    The files are written to a temporary folder, fsynced and renamed, so a process that is killed at
    any moment leaves complete checkpoints only. Raises ResourceError if the disk fails; older
    checkpoints stay. `folder` is created, but not its parent: a run folder that has disappeared
    must not be created again.
    """
    final = checkpoint_path(folder, snapshot.state["step"])
    temporary = folder / f"{TEMPORARY}{final.name}-{os.getpid()}"
    tensors = {"model": snapshot.model, "ema": snapshot.ema, "optimizer": snapshot.optimizer}
    metadata = class_metadata(snapshot.state["classes"])
    try:
        if not folder.exists():
            folder.mkdir()
            fsync(folder.parent)
        finish_interrupted_writes(folder)
        temporary.mkdir()
        for name, group in tensors.items():
            if group is not None:
                save_file(group, temporary / f"{name}.safetensors", metadata)
        _write_json(temporary / "optimizer.json", snapshot.optimizer_values)
        # Keys keep their order: the first pattern of optimizer.lr_scales that matches counts.
        _write_json(temporary / "state.json", {"format": FORMAT, **snapshot.state}, sort_keys=False)
        write_manifest(temporary)
        for file in [*temporary.iterdir(), temporary]:
            fsync(file)
        # A folder can't replace another one atomically, so an older one is renamed first, to a name
        # that is valid too.
        aside = final.with_name(f"{final.name}.old")
        if os.path.lexists(final):
            final.rename(aside)
        temporary.rename(final)
        fsync(folder)
        remove(aside)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(size_bytes(group) for group in tensors.values() if group is not None)
        space = f"{needed:,} bytes needed"
        with contextlib.suppress(OSError):
            disk = folder if folder.exists() else folder.parent
            space += f", {shutil.disk_usage(disk).free:,} free"
        raise ResourceError(
            f"Could not write {final}: {_reason(error)} ({space}).",
            "Older checkpoints are unchanged. Free space or repair the folder, then resume with "
            "--resume.",
        ) from error
    return final


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` with the digests of all other files in `folder`."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json":
            with path.open("rb") as file:
                files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    _write_json(folder / "manifest.json", {"files": files})


def size_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def prune(
    folder: Path,
    step: int,
    keep_last: int | None,
    keep_steps: set[int],
    damaged: Collection[int] = (),
) -> None:
    """Remove the checkpoints up to `step`, except the newest `keep_last` intact ones and the intact
    ones of `keep_steps` (the best).

    step: the step of the checkpoint just written. Later ones are damaged, and stay until the run
    has passed them. damaged: steps of damaged checkpoints. Raises ResourceError.
    """
    if keep_last is None:
        return
    try:
        earlier = [path for path in list_checkpoints(folder) if step_of(path) <= step]
        intact = [path for path in earlier if step_of(path) not in damaged]
        kept = intact[:keep_last] + [path for path in intact if step_of(path) in keep_steps]
        for path in earlier:
            if path not in kept:
                remove(path)
    except OSError as error:
        raise ResourceError(
            f"Could not remove an old checkpoint from {folder}: {_reason(error)}.",
            "Repair the folder, then resume with --resume.",
        ) from error


def _write_json(path: Path, value: Any, sort_keys: bool = True) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=sort_keys) + "\n")


def _reason(error: OSError | SafetensorError) -> str:
    """The system's text of an error. safetensors has its number in a message: `(os error 28)`."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number:
        return os.strerror(int(number[1]))
    return getattr(error, "strerror", None) or str(error)
