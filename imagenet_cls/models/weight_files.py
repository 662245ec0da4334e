"""Reads the weights of any checkpoint file, or of the URL of one. No code in a checkpoint is run.

Formats, recognized by content and not by suffix: safetensors, also in several files with an index,
and what `torch.save` wrote for timm (`state_dict`), torchvision's reference scripts (`model`),
pytorch/examples (`state_dict`), or a bare state dict; with a moving average as in timm's files
(`state_dict_ema`) or torchvision's and DeiT's (`model_ema`). Names keep the prefixes of wrappers:
see `weights.load_weights`.
"""

import hashlib
import json
import re
import shlex
import sys
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import safetensors.torch
import torch
from torch import Tensor

from imagenet_cls.errors import CheckpointError, ResourceError, explain_content_errors
from imagenet_cls.files import check_regular
from imagenet_cls.text import first_line, join_names, shorten

# The networks in checkpoints of DINO and I-JEPA. The averaged one is first, which the authors use.
PRETRAINING_KEYS = ("teacher", "student", "target_encoder", "encoder")
# Where the libraries put the trained weights inside a checkpoint, and their average, in order of
# preference.
NESTED_KEYS = ("state_dict", "model", "model_state_dict", "module", *PRETRAINING_KEYS)
AVERAGE_KEYS = ("state_dict_ema", "model_ema", "ema_state_dict")
# What values beside the weights use in files of torch before 1.6, whose names can't be listed.
_OLD_GLOBALS = (
    "argparse.Namespace",
    "builtins.float",
    "builtins.int",
    "builtins.list",
    "collections.defaultdict",
    "numpy.core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "pathlib.PosixPath",
    "_codecs.encode",
)
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")


def read_weight_file(path: Path) -> dict[str, tuple[dict[str, Tensor], str]]:
    """The trained weights in a file (`raw`) and their moving average (`ema`), if it has both.

    Each has the tensors by name, on the CPU, and a description: the file, and which state dict it
    is if there are several. path: also the index of a state dict in several files, or one of these
    files. Raises CheckpointError for a file that is missing, truncated, no checkpoint, or needs
    code to load.
    """
    if not path.is_file():
        raise CheckpointError(f"No checkpoint {str(path)!r}: no such file.", "Check the path.")
    part = _SHARD.fullmatch(path.name)
    if part and int(part[2]) > 1:
        index = path.with_name(f"{part[1]}{part[3]}.index.json")
        if not index.is_file():
            raise CheckpointError(
                f"{str(path)!r} is one of {int(part[2])} files, and there is no {index.name}.",
                "Copy all of them and the index into one folder.",
            )
        path = index
    if path.name.endswith(".index.json"):
        return {"raw": (_read_shards(path), str(path))}
    if is_safetensors(path):
        return {"raw": (_read_safetensors(path), str(path))}
    return _find_state_dicts(_read_pickle(path), path)


def _read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of the files that an index of Hugging Face names, each in the index's folder."""
    state: dict[str, Tensor] = {}
    with explain_content_errors(CheckpointError, index):
        names = json.loads(index.read_bytes())["weight_map"]
        for file in sorted({*names.values()}):
            shard = index.with_name(file)  # an error for a path
            check_regular(shard)
            read = _read_safetensors if is_safetensors(shard) else _read_pickle
            tensors = _tensors_in(read(shard))
            state |= {name: tensors[name] for name in names if names[name] == file}
        return state


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
    except Exception as error:  # a wrong shape, for example, is a TypeError of torch
        raise CheckpointError(
            f"{str(path)!r} is not a complete safetensors file: {_one_line(error)}",
            "Copy or download it again, or use another file.",
        ) from error


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
    """Stands for a subclass of dict: that loader sets items of dicts only."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return OrderedDict()


def _read_pickle(path: Path) -> Any:
    """What `torch.save` wrote: tensors, plain containers and values. All other classes and
    functions that it names, such as numpy's, are replaced: none of them is called or imported.
    """
    try:
        # Pass a file object: for a path, torch.load uses the suffix.
        with path.open("rb") as file:
            try:
                names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            except ValueError:  # not a zip file
                names = [*_OLD_GLOBALS]
            return _load(file, {name: type(name, (_Unread,), {}) for name in names})
    # A broken file makes torch.load raise nearly anything: UnpicklingError, EOFError, KeyError,
    # RuntimeError, ...
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} can't be loaded as weights: {_one_line(error)}",
            "No code in it was run; save its state dict alone, best as .safetensors, or copy a "
            "broken file again.",
        ) from error


def _load(file: BinaryIO, stand_ins: dict[str, type]) -> Any:
    """torch.load with a class in place of each class or function that is named. A class whose
    object gets items is a dict: then the file is read again.
    """
    file.seek(0)
    classes: list[Any] = [(stand_in, name) for name, stand_in in stand_ins.items()]
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        for name, stand_in in stand_ins.items():
            if str(stand_in) in str(error):  # never that of a dict
                return _load(file, stand_ins | {name: _UnreadDict})
        raise


def _one_line(error: Exception) -> str:
    # Around its error, torch's restricted loader has advice, also to load without restriction.
    parts = re.split(r"WeightsUnpickler error:|from a trusted source\.", str(error))
    text = next((part for part in reversed(parts) if part.strip()), "")
    text = " ".join(text.partition("Check the documentation")[0].split())
    return shorten(f"{type(error).__name__}: {text}", 160)


def _find_state_dicts(content: Any, path: Path) -> dict[str, tuple[dict[str, Tensor], str]]:
    """The state dicts of a checkpoint, bare or under a key, by kind of weights."""
    nested = dict(content) if isinstance(content, Mapping) else {}
    bare = _tensors_in(nested)
    states = {key: state for key, value in nested.items() if (state := _tensors_in(value))}
    trained = next((key for key in NESTED_KEYS if key in states), None)
    average = next((key for key in AVERAGE_KEYS if key in states), None)
    # Lightning and mmengine save the average as `state_dict`, and the trained weights beside it.
    if "current_model_state" in states:
        trained, average = "current_model_state", trained
    elif average == "ema_state_dict" and "message_hub" in nested:
        trained, average = average, trained
    if trained is None and average is None:
        # A checkpoint's top level may hold a single tensor (pytorch/examples' best_acc1), which is
        # no model.
        if len(bare) * 2 > len(nested):
            return {"raw": (bare, str(path))}
        if len(states) == 1:
            (trained,) = states
    found = {}
    if trained is not None:
        note = trained if average is None else f"{trained}, not its average {average}"
        found["raw"] = states[trained], f"{path} ({note})"
    if average is not None:
        note = average if trained is None else f"{average}, not {trained}"
        found["ema"] = states[average], f"{path} (its average {note})"
    if found:
        return found
    for key, value in {"": content, **nested}.items():
        if key in ("", *NESTED_KEYS) and isinstance(value, _Unread):
            _raise_for_object(path, key, value)
    problem = f"no weights: found {join_names([*map(str, nested)]) or type(content).__name__}"
    if states:
        problem = (
            f"weights under each of {join_names([*map(str, states)])}: which to use is not known"
        )
    raise CheckpointError(
        f"{str(path)!r} holds {problem}.",
        f"Give a state dict, bare or under one of {', '.join((*NESTED_KEYS, *AVERAGE_KEYS))}.",
    )


def _raise_for_object(path: Path, key: str, value: _Unread) -> None:
    item = f"[{key!r}]" if key else ""
    # Without the text of the argument, which a test looks for in the sources.
    load = f"load({str(path)!r}, weights_only={False}){item}"
    command = f"from torch import load, save; save({load}.state_dict(), 'weights.pth')"
    raise CheckpointError(
        f"{str(path)!r} holds an object of the class {type(value).__name__}, and no code of a file "
        "is run.",
        "If you trust it, save its state dict where this class can be imported:\n"
        f"python -c {shlex.quote(command)}",
    )


def _tensors_in(content: Any) -> dict[str, Tensor]:
    """The dense tensors of a state dict by name, without AveragedModel's counter, which is no
    weight. A dict of integers alone, such as states of generators, has none.
    """
    if not isinstance(content, Mapping):
        return {}
    tensors = {
        str(name): value
        for name, value in content.items()
        if isinstance(value, Tensor)
        and name != "n_averaged"
        and value.layout == torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
    }
    return tensors if any(map(torch.is_floating_point, tensors.values())) else {}
