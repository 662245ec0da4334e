"""`open_weights`: the weights of any source, and what is known about their training."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from imagenet_cls.checkpoint.folders import read_state
from imagenet_cls.checkpoint.format import METADATA, invalid_content_errors, stored_mean_std
from imagenet_cls.checkpoint.select import is_checkpoint, load_best
from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.data.classes import imagenet_ids
from imagenet_cls.errors import CheckpointError
from imagenet_cls.files import is_url
from imagenet_cls.lookup import is_user_factory
from imagenet_cls.models.factory import (
    FOLDER,
    build_model,
    label_names,
    model_mean_std,
    model_problems,
    ordered_names,
    published_weights,
)
from imagenet_cls.models.teacher import MeanStd
from imagenet_cls.models.weight_files import download_weights, is_safetensors, read_weight_file

_KINDS = {"model.safetensors": "raw", "ema.safetensors": "ema"}  # files in a checkpoint
# Files of weights in a folder as the Hugging Face Hub has them, beside config.json.
_HUB_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


@dataclass(frozen=True)
class Weights:
    """Weights on the CPU, and how they were trained, if known.

    by_kind: the tensors of each kind that the source has, `raw` or `ema`, by name, with the
    prefixes of wrappers, see `models.weights.load_weights`. kind: which of them to use. origin:
    where they are from, for messages. mean_std: of their images. classes: the names of the outputs.
    model: the model's name, if the source states it. path, state: the checkpoint and its
    `state.json`; None for another source.
    """

    by_kind: Mapping[str, dict[str, Tensor]]
    kind: str
    origin: str
    mean_std: MeanStd | None = None
    classes: Sequence[str] | None = None
    model: str | None = None
    warnings: Sequence[str] = ()
    path: Path | None = None
    state: Mapping[str, Any] | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.by_kind[self.kind]


def open_weights(source: str | Path, kind: str | None = None) -> Weights:
    """Read weights. No code of the source is run.

    source: a file of any library or the URL of one; a checkpoint, or a run folder, whose best
    checkpoint is read; a folder as the Hugging Face Hub has it, with config.json; or the name of a
    model with published weights (`resnet50.a1_in1k`, `torchvision:resnet50`, `hf-hub:USER/NAME`,
    `local-dir:PATH`). A file or folder comes before a model of the same name. kind: `raw` or `ema`.
    None: the kind that evaluated best in the run; otherwise the EMA if there is one. Raises
    CheckpointError or ResourceError.
    """
    path = download_weights(str(source)) if is_url(source) else Path(source)
    if path.is_dir():
        is_ours = is_checkpoint(path)
        file = next((path / name for name in _HUB_FILES if (path / name).is_file()), None)
        if is_ours or file is None:
            return _open_checkpoint(path, kind)
        path = file
    elif _is_in_checkpoint(path):
        own = _KINDS[path.name]
        check_kind([own], kind or own, path)
        return _open_checkpoint(path.parent, own)
    elif not path.exists() and not is_user_factory(str(source)):  # whose check would import it
        config = ModelConfig(str(source), pretrained=True)
        if problems := model_problems(config):
            raise CheckpointError(
                f"{source}: no file or folder of this name. As a model: {problems[0].message}",
                "Give the path of a file or folder that exists, or the name of a model.",
            )
        check_kind(["raw"], kind or "raw", source)
        return _open_published(config)
    found = read_weight_file(path)
    kind = kind or ("ema" if "ema" in found else "raw")
    check_kind(found, kind, path)
    by_kind = {name: state for name, (state, _) in found.items()}
    model = None
    if path.name in _HUB_FILES and "architecture" in _hub_config(path):
        model = f"{FOLDER}{path.parent}"
    return Weights(by_kind, kind, found[kind][1], classes=stated_classes(path), model=model)


def _open_checkpoint(path: Path, kind: str | None) -> Weights:
    snapshot, best, damage = load_best(path)
    with invalid_content_errors(snapshot.path):
        by_kind = {"raw": snapshot.model}
        if snapshot.ema is not None:
            by_kind["ema"] = snapshot.ema
        kind = kind or best or ("ema" if "ema" in by_kind else "raw")
        check_kind(by_kind, kind, path)
        return Weights(
            by_kind,
            kind,
            f"{snapshot.path}, step {snapshot.state['step']}",
            stored_mean_std(snapshot.state),
            [*map(str, snapshot.state["classes"])],
            warnings=damage,
            path=snapshot.path,
            state=snapshot.state,
        )


def _open_published(config: ModelConfig) -> Weights:
    model = build_model(config)
    description, count = published_weights(config, model)
    return Weights(
        {"raw": model.state_dict()},
        "raw",
        f"published weights ({description})",
        model_mean_std(model),
        label_names(model) or imagenet_ids(count),
        model=config.name,
    )


def stated_classes(path: Path) -> list[str] | None:
    """The classes that a checkpoint, a file in it, a folder of the Hub or a safetensors file of
    this project states; None for other files and URLs. Raises CheckpointError.
    """
    with invalid_content_errors(path):
        state: Mapping[str, Any] | None = None
        if is_checkpoint(path) or _is_in_checkpoint(path):
            state = read_state(path)
        elif path.is_file() and is_safetensors(path):
            with safe_open(path, "pt") as file:
                state = json.loads((file.metadata() or {}).get(METADATA, "null"))
        if state is not None:
            return [*map(str, state["classes"])]
        is_of_hub = path.is_dir() or path.name in _HUB_FILES
        return ordered_names(_hub_config(path).get("label_names")) if is_of_hub else None


def _is_in_checkpoint(path: Path) -> bool:
    return path.name in _KINDS and (path.parent / "state.json").is_file()


def _hub_config(path: Path) -> dict[str, Any]:
    """The config.json of a folder as the Hugging Face Hub has it, or beside a file in it; empty
    without one.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    with invalid_content_errors(file):
        return dict(json.loads(file.read_bytes())) if file.is_file() else {}


def check_kind(weights: Collection[str], kind: str, origin: Path | str) -> None:
    """Raise CheckpointError unless `kind` is one of `weights`."""
    if kind not in weights:
        raise CheckpointError(f"{origin}: no {kind} weights.", f"It has: {', '.join(weights)}.")
