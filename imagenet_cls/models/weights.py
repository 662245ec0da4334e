"""Reads the weights of any checkpoint file and loads them into a model. No code in a checkpoint is run.

Formats, recognised by content and not by suffix: safetensors, and what `torch.save` wrote for timm (`state_dict`),
torchvision's reference scripts (`model`), pytorch/examples (`state_dict`), or a bare state dict; with a moving average
as in timm's files (`state_dict_ema`) or torchvision's and DeiT's (`model_ema`); of a model that was wrapped by
DataParallel, DistributedDataParallel, AveragedModel (`module.`) or torch.compile (`_orig_mod.`), in any order.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

from imagenet_cls.errors import CheckpointError, shorten
from imagenet_cls.models.build import head_names, new_head_note

# Where the libraries put a state dict inside a checkpoint, in order of preference: trained weights, and their average.
NESTED_KEYS = ("state_dict", "model", "model_state_dict", "module")
AVERAGE_KEYS = ("state_dict_ema", "model_ema")


@contextmanager
def prefix_errors(key: str) -> Iterator[None]:
    """Put the config's `key` before the text of every CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error


def read_weights(path: Path, averaged: bool = True) -> dict[str, Tensor]:
    """The weights in a file, by parameter name, on the CPU, without prefixes of wrappers.

    path: a safetensors file, or one that `torch.save` wrote. averaged: of a file with trained weights and their moving
    average, return the average, as timm's `create_model(checkpoint_path=)` does; False: the trained weights. A file
    with one of the two gives that. Raises CheckpointError (at most three lines) for a file that is missing, truncated,
    no checkpoint, or needs code to load.
    """
    return read_weights_and_origin(path, averaged)[0]


def read_weights_and_origin(path: Path, averaged: bool = True) -> tuple[dict[str, Tensor], str]:
    """As `read_weights`, and a description: the file, and if it has a moving average, which state dict was used."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint {str(path)!r}: no such file; check the path")
    if _is_safetensors(path):
        return _strip_prefixes(_read_safetensors(path)), str(path)
    state, chosen = _find_state_dict(_read_pickle(path), path, averaged)
    return state, f"{path}{chosen}"


def _is_safetensors(path: Path) -> bool:
    """Whether a file begins like safetensors: the length of the header in eight bytes, then the header, a JSON
    object."""
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError as error:
        raise CheckpointError(f"can't read {str(path)!r}: {error.strerror or error}; check the path") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return dict(sorted(safetensors.torch.load_file(path, device="cpu").items()))  # its order is random
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not a whole safetensors file: {_one_line(error)}\n"
            "copy or download it again, or use another file"
        ) from error


def _read_pickle(path: Path) -> Any:
    """What `torch.save` wrote: tensors, plain containers and values only.

    argparse.Namespace is allowed too, since timm's and torchvision's scripts store their options in one: it only holds
    attributes, to which the same restriction applies.
    """
    try:
        # A file and not its path, whose suffix torch would believe.
        with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    # A broken file makes torch.load raise nearly anything: UnpicklingError, EOFError, KeyError, RuntimeError, ...
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} can't be loaded as weights: {_one_line(error)}\n"
            "no code in it was run; save its state dict alone, best as .safetensors, or copy a broken file again"
        ) from error


def _one_line(error: Exception) -> str:
    # Around its error, torch's restricted loader has advice, also to load without restriction.
    text = re.split(r"WeightsUnpickler error:|from a trusted source\.", str(error))[-1]
    text = " ".join(text.partition("Check the documentation")[0].split())
    return shorten(f"{type(error).__name__}: {text}", 160)


def _find_state_dict(content: Any, path: Path, averaged: bool) -> tuple[dict[str, Tensor], str]:
    """The state dict of a checkpoint, the content itself or under one of the libraries' keys, without prefixes; and the
    note of `_choose_nested`."""
    if isinstance(content, Mapping):
        nested = {key: _tensors_in(content.get(key)) for key in (*NESTED_KEYS, *AVERAGE_KEYS)}
        if any(nested.values()):
            return _choose_nested({key: _strip_prefixes(state) for key, state in nested.items() if state}, averaged)
        # A checkpoint's top level may hold a single tensor (pytorch/examples' best_acc1), which is no model.
        if len(state := _tensors_in(content)) * 2 > len(content):
            return _strip_prefixes(state), ""
    keys = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"{str(path)!r} holds no weights: found {keys or 'nothing'}\n"
        f"expected a state dict, bare or under one of {', '.join((*NESTED_KEYS, *AVERAGE_KEYS))}"
    )


def _choose_nested(nested: Mapping[str, dict[str, Tensor]], averaged: bool) -> tuple[dict[str, Tensor], str]:
    """One of the state dicts, which come in the order of NESTED_KEYS and AVERAGE_KEYS; and a note on the choice.

    An average with other names than the trained weights is incomplete or in a library's own form: not used.
    """
    trained = next(iter(nested))
    average = next((key for key in AVERAGE_KEYS if key in nested), None)
    if average is None:
        return nested[trained], ""
    if average == trained:
        return nested[average], f" (its average {average})"
    if nested[average].keys() != nested[trained].keys():
        return nested[trained], f" ({trained}; its average {average} has other names and is not used)"
    if averaged:
        return nested[average], f" (its average {average}, not {trained})"
    return nested[trained], f" ({trained}, not its average {average})"


def _tensors_in(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _strip_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove `_orig_mod.` everywhere (torch.compile puts it before a compiled part too), every leading `module.` that
    all names share, and with it AveragedModel's counter `n_averaged`, which is no weight."""
    state = {re.sub(r"(^|(?<=\.))_orig_mod\.", "", name): value for name, value in state.items()}
    while True:
        weights = {name: value for name, value in state.items() if name != "n_averaged"}
        if not weights or not all(name.startswith("module.") for name in weights):
            return state
        state = {name.removeprefix("module."): value for name, value in weights.items()}


def load_weights(model: nn.Module, state: Mapping[str, Tensor], num_classes: int, head_may_differ: bool = True) -> str:
    """Load `state` into `model`, in place. Returns one sentence about what was done.

    All names and shapes must match, with these exceptions: a head of another size (its first dimension) stays as
    initialised, unless head_may_differ is False; position embeddings of another grid are resized, and an original
    author's names translated, by the model's library; further BatchNorm layers of `model.split_bn` are ignored;
    counters `num_batches_tracked` may be missing (torch < 0.4.1). num_classes: the model's, to find its head. Raises
    CheckpointError with counts and the first three names of each kind.
    """
    own = model.state_dict()
    head = [name for name in head_names(model, num_classes) if name in own]
    state, notes = _fit(model, without_split_bn(state), head)
    left_out: list[str] = []
    if head_may_differ and any(name in state and _differs_in_size(own[name], state[name]) for name in head):
        left_out = [name for name in head if name in state]
    loaded = {name: value for name, value in state.items() if name not in left_out}
    wanted = {name: value for name, value in own.items() if name not in left_out and not _is_counter(name)}
    if mismatch := state_dict_mismatch(wanted | {name: own[name] for name in loaded if name in own}, loaded):
        raise CheckpointError(
            f"the checkpoint's weights don't fit this model: {mismatch}\n"
            "set model.name and model.kwargs to what the checkpoint was trained with"
        )
    try:
        model.load_state_dict(loaded, strict=False)  # only the head and counters may be missing
    except RuntimeError as error:  # sparse or quantised tensors
        text = f"the checkpoint's weights can't be copied into this model: {_one_line(error)}"
        raise CheckpointError(f"{text}\nuse another checkpoint") from error
    sentence = ", ".join([f"loaded {len(loaded)} tensors", *notes])
    if left_out:
        sentence += f"; {new_head_note(left_out, state[left_out[0]].shape[0], own[left_out[0]].shape[0])}"
    return sentence


def state_dict_mismatch(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """How `state` differs from a model's `own` names and shapes, in one line: counts, and the first three names of each
    kind; "" if it doesn't."""
    shapes = [f"{n} {tuple(state[n].shape)} for {tuple(own[n].shape)}" for n in _differing_shapes(state, own)]
    kinds = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": shapes,
    }
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
        if names
    )


def without_split_bn(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the BatchNorm layers that `model.split_bn` adds, which only training uses."""
    return {name: value for name, value in state.items() if ".aux_bn." not in name}


def _differs_in_size(own: Tensor, given: Tensor) -> bool:
    """In the first dimension only."""
    return own.ndim == given.ndim > 0 and own.shape[0] != given.shape[0] and own.shape[1:] == given.shape[1:]


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def _differing_shapes(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """In the order of `state`."""
    return [name for name, value in state.items() if name in own and own[name].shape != value.shape]


def _fit(model: nn.Module, state: dict[str, Tensor], head: list[str]) -> tuple[dict[str, Tensor], list[str]]:
    """The state as converted by the model's library, if names or shapes differ beyond the head; and notes about it.

    Only position embeddings may be resized: timm would also resample the patches of a ViT for another patch size, which
    is another model.
    """
    own = model.state_dict()
    same_names = all(_is_counter(name) for name in own.keys() ^ state.keys())
    if same_names and set(_differing_shapes(own, state)) <= set(head):
        return state, []
    fitted = _convert_state_dict(model, state)
    changed = _differing_shapes(state, fitted)
    resized = [name for name in changed if fitted[name].numel() != state[name].numel()]
    if not all("pos" in name for name in resized):
        return state, []
    notes = ["their names translated as timm does"] if set(fitted) != set(state) else []
    if resized:
        first = f"{resized[0]} {tuple(state[resized[0]].shape)} to {tuple(fitted[resized[0]].shape)}"
        more = f" and {len(resized) - 1} more" if len(resized) > 1 else ""
        notes.append(f"position embeddings resized to this model's grid ({first}{more})")
    return fitted, notes


def _convert_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` as the model's library would load it: position embeddings on the model's grid, and its current names
    where a published file has the authors'. Shares the tensors that stay as they are.

    timm has a function for each such model (`checkpoint_filter_fn`), torchvision one for its ViT. A state dict of
    another model may come back changed or unchanged: compare it with the model's.
    """
    state = dict(state)
    try:
        if isinstance(model, TorchvisionTransformer):
            return interpolate_embeddings(model.image_size, model.patch_size, state)
        module = sys.modules[type(model).__module__]
        translate = getattr(module, "checkpoint_filter_fn", None)
        return dict(translate(state, model)) if translate and module.__name__.startswith("timm.") else state
    except Exception:  # these functions expect a state dict of their model, and fail in many ways on another
        return state
