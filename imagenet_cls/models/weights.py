"""Weights of any origin, into a model.

Owns reading a checkpoint file into a plain state dict (`read_weights`), the choice between trained weights and their
moving average where it holds both, and fitting to a model (`load_weights`).
Refuses, without executing anything, pickles that hold more than tensors and plain values; refuses whatever is not a
whole checkpoint, and weights that do not fit but for a head of another size and position embeddings of another grid;
in one wording for all (`state_dict_mismatch`). Our own checkpoint folders are `engine.checkpoint`'s. Called by `engine.model`,
`engine.inference`, `engine.averaging` and `engine.run`.

Formats, told by content and not by suffix: safetensors, and torch pickles as written by timm (`state_dict`),
torchvision's reference scripts (`model`), pytorch/examples (`state_dict`), or a bare state dict; with a moving average
beside it as in timm's files (`state_dict_ema`) or torchvision's and DeiT's (`model_ema`); from a model that was wrapped
by DataParallel, DistributedDataParallel, AveragedModel (`module.`) or torch.compile (`_orig_mod.`), in any order.
"""

import argparse
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.build import head_names
from imagenet_cls.models.pickles import foreign_global
from imagenet_cls.models.resize import resize_weights

# Where the libraries put a state dict inside a checkpoint, in order of preference: trained weights, and their average.
NESTED_KEYS = ("state_dict", "model", "model_state_dict", "module")
AVERAGE_KEYS = ("state_dict_ema", "model_ema")


@contextmanager
def naming_the_key(key: str) -> Iterator[None]:
    """Errors about weights begin with the config's `key` that names them: a run may start from several files."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error


def read_weights(path: Path, averaged: bool = True) -> dict[str, Tensor]:
    """The weights in a file, by parameter name, on the CPU, without wrappers' prefixes.

    path: a safetensors file, or one that `torch.save` wrote. averaged: where it holds a moving average beside the
    trained weights, take the average, as timm's `create_model(checkpoint_path=)` does; false: the trained weights. A
    file with one of the two gives that one. Raises CheckpointError (at most three lines) for anything that is missing,
    truncated, not a checkpoint, or unsafe to load.
    """
    return read_weights_and_origin(path, averaged)[0]


def read_weights_and_origin(path: Path, averaged: bool = True) -> tuple[dict[str, Tensor], str]:
    """As `read_weights`, and what to call them in a message: the file, and where it holds a moving average, by their
    keys, which set was taken and which was left."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint {str(path)!r}: no such file; check the path")
    if _is_safetensors(path):
        return _strip_prefixes(_read_safetensors(path)), str(path)
    state, chosen = _find_state_dict(_read_pickle(path), path, averaged)
    return state, f"{path}{chosen}"


def _is_safetensors(path: Path) -> bool:
    """Whether a file opens as the format does: the length of its header in eight bytes, then the header, a JSON object.

    By content, so that a pickle called `.safetensors` is told what it is, and refused for what it would run.
    """
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError as error:
        raise CheckpointError(f"can't read {str(path)!r}: {error.strerror or error}; check the path") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return dict(sorted(safetensors.torch.load_file(path, device="cpu").items()))  # their order is chance
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not a whole safetensors file: {_one_line(error)}\n"
            "copy or download it again, or name another file"
        ) from error


def _read_pickle(path: Path) -> Any:
    """What `torch.save` wrote, restricted to tensors, plain containers and values.

    argparse.Namespace is let in besides, since timm's and torchvision's scripts store their options in one: it does
    nothing but hold attributes, and what it holds goes through the same restriction.
    """
    try:
        # A file and not its path, whose suffix torch would believe.
        with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    # A broken file makes torch.load raise nearly anything: UnpicklingError, EOFError, KeyError, RuntimeError, ...
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        refused = named[1] if named else foreign_global(path)
        if refused:
            raise CheckpointError(
                f"{str(path)!r} needs {refused!r} to be loaded, which could run code: refused, nothing was run\n"
                "save its state dict alone (tensors by name), best as .safetensors, where you trust the file"
            ) from error
        raise CheckpointError(_not_whole(path, error)) from error


def _not_whole(path: Path, error: Exception) -> str:
    reason = _one_line(error)
    if "Unsupported operand" in reason:
        reason += ", as in files of another pickle protocol than torch.save's"
    return (
        f"{str(path)!r} is not a whole checkpoint: {reason}\n"
        "copy or download it again, or name a .pth, .pth.tar, .safetensors file or one of our checkpoint folders"
    )


def _one_line(error: Exception) -> str:
    # torch's restricted loader puts advice to load without restriction before what it met.
    text = " ".join(str(error).rpartition("WeightsUnpickler error:")[2].split())
    return f"{type(error).__name__}: {text[:120]}{'...' if len(text) > 120 else ''}"


def _find_state_dict(content: Any, path: Path, averaged: bool) -> tuple[dict[str, Tensor], str]:
    """The state dict in a checkpoint, the content itself or under one of the keys that the libraries use, without
    prefixes; and what `_choose` says of the choice."""
    if isinstance(content, Mapping):
        nested = {key: _tensors_in(content.get(key)) for key in (*NESTED_KEYS, *AVERAGE_KEYS)}
        if any(nested.values()):
            return _choose({key: _strip_prefixes(state) for key, state in nested.items() if state}, averaged)
        # A checkpoint's own top level may hold a lone tensor (pytorch/examples' best_acc1), which is no model.
        if len(state := _tensors_in(content)) * 2 > len(content):
            return _strip_prefixes(state), ""
    keys = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"{str(path)!r} holds no weights: found {keys or 'nothing'}\n"
        f"expected a state dict, bare or under one of {', '.join((*NESTED_KEYS, *AVERAGE_KEYS))}"
    )


def _choose(nested: Mapping[str, dict[str, Tensor]], averaged: bool) -> tuple[dict[str, Tensor], str]:
    """One of the state dicts found under NESTED_KEYS and AVERAGE_KEYS, in this order; and a clause to put behind the
    file's name.

    An average of other names than the trained weights have is some library's own record, or lacks a part: not taken.
    """
    trained = next(iter(nested))  # they come in the order of preference, averages last
    average = next((key for key in AVERAGE_KEYS if key in nested), None)
    if average is None:
        return nested[trained], ""
    if average == trained:
        return nested[average], f" (its average {average})"
    if nested[average].keys() != nested[trained].keys():
        return nested[trained], f" ({trained}; its average {average} has other names and is left)"
    if averaged:
        return nested[average], f" (its average {average}; {trained} is left)"
    return nested[trained], f" ({trained}; its average {average} is left)"


def _tensors_in(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _strip_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take off `_orig_mod.` wherever it stands (torch.compile puts it before a compiled part too), and every leading
    `module.` that all names share. AveragedModel's counter `n_averaged` is no weight and goes with it."""
    state = {re.sub(r"(^|(?<=\.))_orig_mod\.", "", name): value for name, value in state.items()}
    while True:
        weights = {name: value for name, value in state.items() if name != "n_averaged"}
        if not weights or not all(name.startswith("module.") for name in weights):
            return state
        state = {name.removeprefix("module."): value for name, value in weights.items()}


def load_weights(model: nn.Module, state: Mapping[str, Tensor], num_classes: int, head_may_differ: bool = True) -> str:
    """Load `state` into `model`, in place, and say in one sentence what was done.

    Everything must match, names and shapes, but for this: a head of another size (its first dimension) is left as the
    model has it, that is, initialised anew; head_may_differ false makes that an error as well. Position embeddings of
    another grid are resized, and names that a published file has in its original authors' form are translated, as the
    model's library does it. BatchNorm layers of further splits (`model.split_bn`) are left out. Counters
    `num_batches_tracked` may be missing (torch < 0.4.1).
    num_classes: the model's, to find its head. Raises CheckpointError with counts and the first three names of each
    kind.
    """
    own = model.state_dict()
    head = [name for name in head_names(model, num_classes) if name in own]
    state, notes = _fit(model, without_split_bn(state), head)
    left_out: list[str] = []
    if head_may_differ and any(name in state and _only_size_differs(own[name], state[name]) for name in head):
        left_out = [name for name in head if name in state]
    kept = {name: value for name, value in state.items() if name not in left_out}
    wanted = {name: value for name, value in own.items() if name not in left_out and not _is_counter(name)}
    if lacks := state_dict_mismatch(wanted | {name: own[name] for name in kept if name in own}, kept):
        raise CheckpointError(
            f"the checkpoint's weights don't fit this model: {lacks}\n"
            "set model.name and model.kwargs to what the checkpoint was trained with"
        )
    try:
        model.load_state_dict(kept, strict=False)  # what is missing was decided above
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint's weights can't be copied into this model: {_one_line(error)}"
        ) from error
    sentence = ", ".join([f"loaded {len(kept)} tensors", *notes])
    if left_out:
        sizes = f"it had {state[left_out[0]].shape[0]} outputs, the model has {own[left_out[0]].shape[0]}"
        sentence += f"; the head ({', '.join(left_out)}) is initialised anew: {sizes}"
    return sentence


def state_dict_mismatch(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """How `state` differs from a model's `own` names and shapes: counts, and the first three of each kind; "" if it
    doesn't. One line, for a message that goes on with what to do."""
    shapes = [f"{n} {tuple(state[n].shape)} for {tuple(own[n].shape)}" for n in _differing_shapes(state, own)]
    kinds = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": shapes,
    }
    counted = {kind: names for kind, names in kinds.items() if names}
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in counted.items()
    )


def without_split_bn(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the BatchNorm layers that `model.split_bn` adds, which only training looks at."""
    return {name: value for name, value in state.items() if ".aux_bn." not in name}


def _only_size_differs(own: Tensor, given: Tensor) -> bool:
    return own.ndim == given.ndim > 0 and own.shape[0] != given.shape[0] and own.shape[1:] == given.shape[1:]


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def _differing_shapes(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """In the order of `state`."""
    return [name for name, value in state.items() if name in own and own[name].shape != value.shape]


def _fit(model: nn.Module, state: dict[str, Tensor], head: list[str]) -> tuple[dict[str, Tensor], list[str]]:
    """The state as the model's library makes it fit, where names or shapes differ beyond the head; and notes about it.

    Of shapes only those of position embeddings may change, and views of the same numbers: a library would also resample
    the patches of a ViT for another patch size, which makes another model of it.
    """
    own = model.state_dict()
    same_names = all(_is_counter(name) for name in own.keys() ^ state.keys())
    if same_names and set(_differing_shapes(own, state)) <= set(head):
        return state, []
    fitted = resize_weights(model, state)
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
