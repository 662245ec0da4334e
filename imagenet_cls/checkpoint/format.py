"""The checkpoint folder: all that resuming or predicting needs, in safetensors and JSON. No pickle.

last, best                          links to the newest one and to the one with the highest top-1
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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from imagenet_cls.checkpoint.folders import finish_interrupted_writes, list_checkpoints, step_of
from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import (
    CheckpointError,
    ConfigError,
    ResourceError,
    explain_content_errors,
    first_line,
)
from imagenet_cls.files import TEMPORARY, check_regular, fsync, remove

FORMAT = 1

# Results of an evaluation by their names in configs (`checkpoint.best`, `train.early_stop.metric`).
METRICS = {
    "top1": "top1_pct",
    "top5": "top5_pct",
    "loss": "loss",
    "balanced_accuracy": "balanced_accuracy_pct",
}


@dataclass
class Progress:
    """How far a run is.

    step: optimizer updates done. evaluated_step: the last step that was evaluated. best: for each kind of weights (raw,
    ema) the `step` of the best evaluation and the metric of `checkpoint.best`. latest: metrics of the last evaluation
    for each kind. evaluations: (step, top-1 in percent of the raw weights), for `plateau`. history: metrics of the
    same evaluations, for `train.early_stop`. stopped_early: whether that ended the run.
    """

    step: int = 0
    evaluated_step: int = 0
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    stopped_early: bool = False


@dataclass
class Snapshot:
    """The content of a checkpoint: contiguous CPU tensors that share memory with nothing, and `state.json`.

    optimizer, optimizer_values: see `optimizer_to_tensors`.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    optimizer_values: dict[str, Any]
    state: dict[str, Any]
    ema: dict[str, Tensor] | None = None
    path: Path | None = field(default=None, compare=False)


invalid_content_errors = partial(explain_content_errors, CheckpointError)


def score(results: Mapping[str, float], metric: str) -> float:
    """A number that is higher for better results. metric: one of the values of `METRICS`."""
    return -results[metric] if metric == "loss" else results[metric]


def best_score(best: Mapping[str, float]) -> float:
    """The score of an entry of `Progress.best`."""
    (metric,) = (name for name in best if name != "step")
    return score(best, metric)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


def read_checkpoint(path: Path) -> Snapshot:
    """Read one checkpoint folder after verifying the digest of each file. Raises CheckpointError."""
    content = verified_files(path)
    with invalid_content_errors(path):
        tensors = {
            name.removesuffix(".safetensors"): dict(
                sorted(load_tensors(data).items())
            )  # their order is random
            for name, data in content.items()
            if name.endswith(".safetensors")
        }
        state = json.loads(content["state.json"])
        if (written := state.pop("format", None)) != FORMAT:
            raise CheckpointError(
                f"{path}: format {written} is unknown here.\nRead it with the version that wrote it."
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


def read_progress(values: Mapping[str, Any]) -> Progress:
    """The progress that `state.json` holds. Values that an older version did not write have their defaults.

    Raises TypeError, ValueError or LookupError if a value is missing or has another type, so that a malformed
    checkpoint is an error when it is read and not in the middle of a run.
    """
    progress = Progress(**values)
    progress.step, progress.evaluated_step = (
        _integer(progress.step),
        _integer(progress.evaluated_step),
    )
    progress.evaluations = [
        (_integer(step), _number(top1_pct)) for step, top1_pct in progress.evaluations
    ]
    for best in progress.best.values():
        _integer(best["step"])
        _number(best_score(best))
    for results in progress.latest.values():
        _number(results["top1_pct"])
        _number(results["loss"])
    progress.history = [
        {metric: _number(value) for metric, value in results.items()}
        for results in progress.history
    ]
    return progress


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return value


def mean_std(state: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """The normalization of a checkpoint's images. Raises LookupError, TypeError or ValueError if it is malformed."""
    mean, std = ([float(value) for value in state["preprocessing"][key]] for key in ("mean", "std"))
    if len(mean) not in (1, 3) or not all(
        isfinite(m) and 0 < s < inf for m, s in zip(mean, std, strict=True)
    ):
        raise ValueError(f"mean {mean} and std {std}")
    return mean, std


def config_from_state(state: Mapping[str, Any], where: Path | str | None) -> Config:
    """The config that a checkpoint was trained with. Raises CheckpointError."""
    try:
        with invalid_content_errors(where):
            return config_from_dict(state["config"])
    except ConfigError as error:
        text = f"{where}: its config is invalid: {first_line(error)}\nUse another checkpoint."
        raise CheckpointError(text) from error


def verified_files(path: Path, only: str | None = None) -> dict[str, bytes]:
    """The content of the files that the manifest lists, or of `only` one, compared with their digests.

    Raises CheckpointError.
    """
    with invalid_content_errors(path, "not a complete checkpoint"):
        check_regular(path / "manifest.json")
        digests = json.loads((path / "manifest.json").read_bytes())["files"]
        content = {}
        for name, digest in digests.items() if only is None else [(only, digests[only])]:
            file = path / name
            if file.parent != path:  # a path out of the folder
                raise FileNotFoundError(f"no file {name!r}")
            check_regular(file)
            content[name] = file.read_bytes()
            if hashlib.sha256(content[name]).hexdigest() != digest:
                raise CheckpointError(
                    f"{path}: damaged ({name} does not match its digest).\nUse another checkpoint."
                )
    return content


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write `folder/step-N` for the snapshot's step, replacing one of the same name, and return its path.

    Atomic: written to a temporary folder, fsynced, renamed. Raises ResourceError if the disk fails; older checkpoints
    stay. `folder` is created, but not its parent: a run folder that has disappeared must not be created again.
    """
    final = checkpoint_path(folder, snapshot.state["step"])
    temporary = folder / f"{TEMPORARY}{final.name}-{os.getpid()}"
    tensors = {"model": snapshot.model, "ema": snapshot.ema, "optimizer": snapshot.optimizer}
    try:
        if not folder.exists():
            folder.mkdir()
            fsync(folder.parent)
        finish_interrupted_writes(folder)
        temporary.mkdir()
        for name, group in tensors.items():
            if group is not None:
                save_file(group, temporary / f"{name}.safetensors")
        _write_json(temporary / "optimizer.json", snapshot.optimizer_values)
        # Keys keep their order: the first pattern of optimizer.lr_scales that matches counts.
        _write_json(temporary / "state.json", {"format": FORMAT, **snapshot.state}, sort_keys=False)
        write_manifest(temporary)
        for file in [*temporary.iterdir(), temporary]:
            fsync(file)
        # A folder can't replace another one atomically, so an older one is renamed first, to a name that is valid too.
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
            space += (
                f", {shutil.disk_usage(folder if folder.exists() else folder.parent).free:,} free"
            )
        raise ResourceError(
            f"could not write {final}: {_reason(error)} ({space})\n"
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
    """Remove all but the newest `keep_last` checkpoints up to `step`, and those of `keep_steps` (the best ones).

    step: of the checkpoint just written; later ones are damaged, and stay until the run has passed them. damaged: steps
    of damaged ones. Raises ResourceError.
    """
    if keep_last is None:
        return
    try:
        earlier = [path for path in list_checkpoints(folder) if step_of(path) <= step]
        intact = [path for path in earlier if step_of(path) not in damaged]
        for path in earlier:
            if path not in intact[:keep_last] and (
                step_of(path) not in keep_steps or step_of(path) in damaged
            ):
                remove(path)
    except OSError as error:
        text = f"could not remove an old checkpoint from {folder}: {_reason(error)}"
        raise ResourceError(f"{text}\nRepair the folder, then resume with --resume.") from error


def _write_json(path: Path, value: Any, sort_keys: bool = True) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=sort_keys) + "\n")


def _reason(error: OSError | SafetensorError) -> str:
    """safetensors keeps the system's error number in its text only: `(os error 28)`."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or str(error)
