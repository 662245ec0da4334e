"""Read the weights of a file, a checkpoint or a run, and what is known about their training."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from imagenet_cls.checkpoint.format import METADATA, invalid_content_errors, stored_mean_std
from imagenet_cls.checkpoint.select import load_best, state_of_newest
from imagenet_cls.errors import CheckpointError
from imagenet_cls.files import is_url
from imagenet_cls.models.teacher import MeanStd
from imagenet_cls.models.weight_files import download_weights, is_safetensors, read_all_weights


@dataclass(frozen=True)
class StoredWeights:
    """Weights in a file or checkpoint folder, on the CPU, and how they were trained, if known.

    tensors: the weights by name. origin: where they are from, for messages. kind: `raw` or `ema`.
    path, state: the checkpoint and its `state.json`; None for a file.
    """

    tensors: dict[str, Tensor]
    origin: str
    kind: str
    mean_std: MeanStd | None = None
    classes: Sequence[str] | None = None
    warnings: Sequence[str] = ()
    path: Path | None = None
    state: Mapping[str, Any] | None = None


def read_stored_weights(source: str | Path, kind: str | None = None) -> StoredWeights:
    """The weights of a file, a URL or a checkpoint; of a run folder, those of its best checkpoint.

    kind: `raw` or `ema`. None: the kind that evaluated best in the run; otherwise the EMA if there
    is one. Raises CheckpointError or ResourceError.
    """
    path = download_weights(str(source)) if is_url(source) else Path(source)
    if not path.is_dir():
        found = read_all_weights(path)
        default = "ema" if "ema" in found else "raw"
        kind = kind or default
        check_kind(found, kind, path)
        tensors, origin = found[kind]
        return StoredWeights(tensors, origin, kind, classes=stated_classes(path))
    snapshot, best, damage = load_best(path)
    with invalid_content_errors(snapshot.path):
        weights = {"raw": snapshot.model}
        if snapshot.ema is not None:
            weights["ema"] = snapshot.ema
        default = "raw" if best == "raw" or snapshot.ema is None else "ema"
        kind = kind or default
        check_kind(weights, kind, path)
        note = ", its best" if best == kind else ""
        return StoredWeights(
            tensors=weights[kind],
            origin=f"{path} (step {snapshot.state['step']}, {kind}{note})",
            kind=kind,
            mean_std=stored_mean_std(snapshot.state),
            classes=[*map(str, snapshot.state["classes"])],
            warnings=damage,
            path=snapshot.path,
            state=snapshot.state,
        )


def stated_classes(path: Path) -> list[str] | None:
    """The classes that a checkpoint, a file in it or a safetensors file of this project states;
    None for other files and URLs. Raises CheckpointError.
    """
    with invalid_content_errors(path):
        state = state_of_newest(path)
        if state is None and path.is_file() and is_safetensors(path):
            with safe_open(path, "pt") as file:
                state = json.loads((file.metadata() or {}).get(METADATA, "null"))
        return None if state is None else [*map(str, state["classes"])]


def check_kind(weights: Collection[str], kind: str, origin: Path | str) -> None:
    """Raise CheckpointError unless `kind` is one of `weights`."""
    if kind not in weights:
        raise CheckpointError(f"{origin}: no {kind} weights.", f"It has: {', '.join(weights)}.")
