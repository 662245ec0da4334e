"""`open_weights`: the weights of any source, and what is known about their training.

A file is safetensors, or what `torch.save` wrote for timm (`state_dict`), torchvision's reference
scripts (`model`), pytorch/examples (`state_dict`), or a bare state dict; with a moving average as
in timm's files (`state_dict_ema`) or torchvision's and DeiT's (`model_ema`). The format is
recognized by content and not by suffix. No code in a source is run.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from imagenet_cls.checkpoint.format import METADATA, invalid_content_errors, stored_mean_std
from imagenet_cls.checkpoint.select import load_best
from imagenet_cls.config.schema import ModelConfig
from imagenet_cls.errors import CheckpointError
from imagenet_cls.lookup import is_user_factory
from imagenet_cls.models.factory import (
    FOLDER,
    build_model,
    label_names,
    model_mean_std,
    model_problems,
    published_weights,
)
from imagenet_cls.models.teacher import MeanStd
from imagenet_cls.text import join_names

_KINDS = {"model.safetensors": "raw", "ema.safetensors": "ema"}  # files in a checkpoint
# Where the libraries put the trained weights inside a checkpoint, and their average.
_TRAINED_KEYS = ("state_dict", "model", "model_state_dict", "module")
_AVERAGE_KEYS = ("state_dict_ema", "model_ema")


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

    source: a file of any library; a checkpoint, or a run folder, whose best checkpoint is read; a
    folder as the Hugging Face Hub has it, with config.json; or the name of a model with published
    weights (`resnet50.a1_in1k`, `torchvision:resnet50`, `hf-hub:USER/NAME`, `local-dir:PATH`). A
    file or folder comes before a model of the same name. kind: `raw` or `ema`, to read only these.
    None: all, to use the kind that evaluated best in the run, otherwise the EMA if there is one.
    Raises CheckpointError or ResourceError.
    """
    path = Path(source)
    if path.name in _KINDS and (path.parent / "state.json").is_file():
        weights = open_weights(path.parent, _KINDS[path.name])
    elif path.is_file():
        weights = _open_file(path)
    # pathlib raises without permission
    elif path.is_dir() and not os.path.isfile(path / "config.json"):  # noqa: PTH113
        weights = _open_checkpoint(path)
    else:
        config = ModelConfig(f"{FOLDER}{path}" if path.is_dir() else str(source), pretrained=True)
        # the check of a user's factory would import it
        is_own = is_user_factory(config.name)
        problems = [] if is_own else model_problems(config)
        if problems or is_own:
            reasons = [f" As a model: {problem.message}." for problem in problems]
            raise CheckpointError(
                f"{source}: no file or folder of this name.{''.join(reasons)}",
                "Give the path of a file or folder that exists, or the name of a model. Download "
                "the file of a URL first.",
            )
        weights = open_published(config)
    if kind is None:
        return weights
    if kind not in weights.by_kind:
        raise CheckpointError(
            f"{weights.origin}: no {kind} weights.", f"It has: {', '.join(weights.by_kind)}."
        )
    return replace(weights, by_kind={kind: weights.by_kind[kind]}, kind=kind)


def _open_checkpoint(path: Path) -> Weights:
    snapshot, best, damage = load_best(path)
    with invalid_content_errors(snapshot.path):
        by_kind = {"raw": snapshot.model}
        if snapshot.ema is not None:
            by_kind["ema"] = snapshot.ema
        return Weights(
            by_kind,
            best or ("ema" if "ema" in by_kind else "raw"),
            f"{snapshot.path}, step {snapshot.state['step']}",
            stored_mean_std(snapshot.state),
            [*map(str, snapshot.state["classes"])],
            warnings=damage,
            path=snapshot.path,
            state=snapshot.state,
        )


def open_published(config: ModelConfig, channels: int = 3) -> Weights:
    """The published weights of the model that the section names. Raises as `build_model`."""
    model = build_model(config, channels=channels)
    description, _ = published_weights(config, model)
    return Weights(
        {"raw": model.state_dict()},
        "raw",
        f"published weights ({description})",
        model_mean_std(model, channels),
        label_names(model),
        model=config.name,
    )


def _open_file(path: Path) -> Weights:
    """The weights of a file; a file of this project states its classes."""
    remedy = "Copy or download a broken file again."
    if path.suffix != ".safetensors":
        remedy += (
            " If another one needs code to load and you trust it, save its state dict by torch: "
            f"save(load({str(path)!r}, weights_only={False})['state_dict'], 'weights.pth')."
        )
    with (
        invalid_content_errors(path, "can't be loaded as weights", remedy),
        path.open("rb") as file,
    ):
        # safetensors begin with eight bytes of length and a JSON object
        if file.read(9)[8:] != b"{":
            return _find_state_dicts(_read_pickle(file), path)
        with safe_open(path, "pt") as content:
            # their order is random
            tensors = {name: content.get_tensor(name) for name in sorted(content.keys())}
            stated = json.loads((content.metadata() or {}).get(METADATA, "{}"))
        classes = [*map(str, stated["classes"])] if stated else None
        return Weights({"raw": tensors}, "raw", str(path), classes=classes)


class _Unread(list):
    """Stands for an object beside the weights. Nothing is built or kept.

    It is a list since torch's restricted loader appends to lists only.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]  # it may be a key

    def __init__(self, *arguments: Any, **options: Any): ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _UnreadDict:
    """Stands for a defaultdict: that loader sets items of dicts only."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return OrderedDict()


def _read_pickle(file: BinaryIO) -> Any:
    """What `torch.save` wrote: tensors, plain containers and values. All other classes and
    functions that it names, such as numpy's, are replaced: none of them is called or imported.
    """
    names: list[str] = []
    file.seek(0)
    with suppress(ValueError):  # not a zip file: of torch before 1.6
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    file.seek(0)
    stand_ins: list[Any] = [
        (_UnreadDict if name == "collections.defaultdict" else _Unread, name) for name in names
    ]
    try:
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # In its place torch.load raises a page of advice, also to load without restriction.
        raise error.__context__ or error from None


def _find_state_dicts(content: Any, path: Path) -> Weights:
    """The state dicts of a checkpoint: bare, under keys of a library, or the only one."""
    nested = content if isinstance(content, Mapping) else {}
    states = {str(key): state for key, value in nested.items() if (state := _tensors_in(value))}
    keys = {
        "raw": [key for key in states if key in _TRAINED_KEYS],
        "ema": [key for key in states if key in _AVERAGE_KEYS],
    }
    by_kind = {kind: states[found[0]] for kind, found in keys.items() if found}
    if not by_kind and len(states) < 2:
        by_kind = {"raw": next(iter(states.values()), _tensors_in(nested))}
    if not any(by_kind.values()) or max(map(len, keys.values())) > 1:
        problem = f"{str(path)!r} holds no state dict."
        content = "x.state_dict()"
        if states:
            problem = f"{str(path)!r} holds several state dicts: {join_names([*states])}."
            content = f"x[{next(iter(states))!r}]"
        raise CheckpointError(
            problem,
            f"Of a file that you trust, save the one to use by torch: x = load({str(path)!r}, "
            f"weights_only={False}); save({content}, 'weights.pth')",
        )
    kind = "ema" if "ema" in by_kind else "raw"
    return Weights(by_kind, kind, str(path))


def _tensors_in(content: Any) -> dict[str, Tensor]:
    """The tensors of a state dict by name, without AveragedModel's counter, which is no weight. A
    dict of integers alone, such as states of generators, has none.
    """
    if not isinstance(content, Mapping):
        return {}
    tensors = {
        str(name): value
        for name, value in content.items()
        if isinstance(value, Tensor) and name != "n_averaged"
    }
    return tensors if any(map(torch.is_floating_point, tensors.values())) else {}
