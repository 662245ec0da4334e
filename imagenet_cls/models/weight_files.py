"""Reads the weights of any checkpoint file, or of the URL of one. No code in a checkpoint is run.

Formats, recognized by content and not by suffix: safetensors, and what `torch.save` wrote for timm
(`state_dict`), torchvision's reference scripts (`model`), pytorch/examples (`state_dict`), or a
bare state dict; with a moving average as in timm's files (`state_dict_ema`) or torchvision's and
DeiT's (`model_ema`); of a model that was wrapped by DataParallel, DistributedDataParallel,
AveragedModel (`module.`) or torch.compile (`_orig_mod.`), in any order.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from imagenet_cls.errors import CheckpointError, ResourceError
from imagenet_cls.text import first_line, shorten

# The networks in checkpoints of DINO and I-JEPA. The averaged one is first, which the authors use.
PRETRAINING_KEYS = ("teacher", "student", "target_encoder", "encoder")
# Where the libraries put the trained weights inside a checkpoint, and their average, in order of
# preference.
NESTED_KEYS = ("state_dict", "model", "model_state_dict", "module", *PRETRAINING_KEYS)
AVERAGE_KEYS = ("state_dict_ema", "model_ema")


def read_all_weights(path: Path) -> dict[str, tuple[dict[str, Tensor], str]]:
    """The trained weights in a file (`raw`) and their moving average (`ema`), if it has both.

    Each has the tensors by parameter name, on the CPU, without prefixes of wrappers, and a
    description: the file, and which state dict it is if there are several. Raises CheckpointError
    for a file that is missing, truncated, no checkpoint, or needs code to load.
    """
    if not path.is_file():
        raise CheckpointError(f"No checkpoint {str(path)!r}: no such file.", "Check the path.")
    if is_safetensors(path):
        return {"raw": (_strip_prefixes(_read_safetensors(path)), str(path))}
    return _find_state_dicts(_read_pickle(path), path)


def download_weights(url: str) -> Path:
    """The file at a URL, downloaded once into torch.hub's cache. Raises ResourceError or
    CheckpointError.

    Hexadecimal digits in its name with at least one letter, as in `resnet18-f37072fd.pth`, are
    compared with the SHA-256 digest. Other digits may be a date.
    """
    name = Path(urlsplit(url).path).name or "weights"
    folder = Path(torch.hub.get_dir(), "checkpoints")
    digest = None
    if found := re.search(r"-(?=\d*[a-f])([a-f0-9]{8,})\.", name):
        digest = found[1]
    else:  # many files are called `checkpoint.pth`: a folder for each URL
        folder /= hashlib.sha256(url.encode()).hexdigest()[:16]
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            print(f"downloading {url} to {path}", flush=True)
            torch.hub.download_url_to_file(url, str(path), digest, progress=sys.stderr.isatty())
    except (OSError, HTTPException, ValueError) as error:  # ValueError: no valid URL
        with suppress(OSError):  # the folder holds other files, or can't be made
            folder.rmdir()
        raise ResourceError(
            f"{url} can't be downloaded to {path}: {first_line(error)}",
            "Correct the URL, or copy the file here and name its path.",
        ) from error
    except RuntimeError as error:
        raise CheckpointError(
            f"{url} is not the file that its name states: {first_line(error)}",
            "Check the URL, or name a file on this machine.",
        ) from error
    return path


def is_safetensors(path: Path) -> bool:
    """Whether a file begins like safetensors: eight bytes of length, then a JSON object."""
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError as error:
        raise CheckpointError(
            f"Can't read {str(path)!r}: {error.strerror or error}.", "Check the path."
        ) from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        # its order is random
        return dict(sorted(safetensors.torch.load_file(path, device="cpu").items()))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not a complete safetensors file: {_one_line(error)}",
            "Copy or download it again, or use another file.",
        ) from error


def _read_pickle(path: Path) -> Any:
    """What `torch.save` wrote: tensors, plain containers and values, and argparse.Namespace, in
    which timm's and torchvision's scripts store their options. It only holds attributes, to which
    the same restriction applies.
    """
    try:
        # Pass a file object: for a path, torch.load uses the suffix.
        with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    # A broken file makes torch.load raise nearly anything: UnpicklingError, EOFError, KeyError,
    # RuntimeError, ...
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} can't be loaded as weights: {_one_line(error)}",
            "No code in it was run; save its state dict alone, best as .safetensors, or copy a "
            "broken file again.",
        ) from error


def _one_line(error: Exception) -> str:
    # Around its error, torch's restricted loader has advice, also to load without restriction.
    text = re.split(r"WeightsUnpickler error:|from a trusted source\.", str(error))[-1]
    text = " ".join(text.partition("Check the documentation")[0].split())
    return shorten(f"{type(error).__name__}: {text}", 160)


def _find_state_dicts(content: Any, path: Path) -> dict[str, tuple[dict[str, Tensor], str]]:
    """The state dicts of a checkpoint, bare or under the libraries' keys, by kind of weights."""
    found = {}
    if isinstance(content, Mapping):
        nested = {key: _tensors_in(content.get(key)) for key in (*NESTED_KEYS, *AVERAGE_KEYS)}
        trained = next((key for key in NESTED_KEYS if nested[key]), None)
        average = next((key for key in AVERAGE_KEYS if nested[key]), None)
        if trained is not None:
            note = ""
            if trained in PRETRAINING_KEYS:
                note = f" ({trained})"
            elif average is not None:
                note = f" ({trained}, not its average {average})"
            found["raw"] = _strip_prefixes(nested[trained]), f"{path}{note}"
        if average is not None:
            note = average if trained is None else f"{average}, not {trained}"
            found["ema"] = _strip_prefixes(nested[average]), f"{path} (its average {note})"
        # A checkpoint's top level may hold a single tensor (pytorch/examples' best_acc1), which is
        # no model.
        if not found and len(state := _tensors_in(content)) * 2 > len(content):
            found["raw"] = _strip_prefixes(state), str(path)
    if found:
        return found
    names = type(content).__name__
    if isinstance(content, Mapping):
        names = ", ".join(map(str, list(content)[:5])) or "nothing"
    raise CheckpointError(
        f"{str(path)!r} holds no weights: found {names}.",
        f"Give a state dict, bare or under one of {', '.join((*NESTED_KEYS, *AVERAGE_KEYS))}.",
    )


def _tensors_in(content: Any) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _strip_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove `_orig_mod.` of torch.compile and `_fsdp_wrapped_module.` of FSDP everywhere, since
    both also wrap parts of a model; every leading `module.` that all names share, and with it
    AveragedModel's counter `n_averaged`, which is no weight.
    """
    wrapper = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module)\.")
    state = {wrapper.sub("", name): value for name, value in state.items()}
    while True:
        weights = {name: value for name, value in state.items() if name != "n_averaged"}
        if not weights or not all(name.startswith("module.") for name in weights):
            return state
        state = {name.removeprefix("module."): value for name, value in weights.items()}
