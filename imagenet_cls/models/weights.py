"""Reads the weights of any checkpoint file and loads them into a model. No code in a checkpoint is run.

Formats, recognized by content and not by suffix: safetensors, and what `torch.save` wrote for timm (`state_dict`),
torchvision's reference scripts (`model`), pytorch/examples (`state_dict`), or a bare state dict; with a moving average
as in timm's files (`state_dict_ema`) or torchvision's and DeiT's (`model_ema`); of a model that was wrapped by
DataParallel, DistributedDataParallel, AveragedModel (`module.`) or torch.compile (`_orig_mod.`), in any order. And the
encoder in a file of self-supervised or image-text pre-training: MAE, DINO (v1 to v3), MoCo (v2, v3), CLIP and others.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zipfile import ZipFile

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

from imagenet_cls.errors import CheckpointError, ResourceError, first_line, shorten
from imagenet_cls.models.adapt import head_names
from imagenet_cls.models.build import new_head_note

# Where the libraries put a state dict inside a checkpoint, in order of preference: trained weights, and their average.
PRETRAINING_KEYS = ("teacher", "student", "target_encoder", "encoder")  # DINO and I-JEPA; the averages are first
NESTED_KEYS = ("state_dict", "model", "model_state_dict", "module", *PRETRAINING_KEYS)
AVERAGE_KEYS = ("state_dict_ema", "model_ema")

# Where pre-training code puts the encoder among other networks, in order of preference: MoCo evaluates `encoder_q.` and
# `base_encoder.`, DINOv2 the teacher. "": the encoder alone, or beside tensors that the next pattern matches.
ENCODER_PREFIXES = (
    *("", "backbone.", "encoder.", "encoder_q.", "base_encoder.", "momentum_encoder.", "online_encoder."),
    *("target_encoder.", "teacher.backbone.", "student.backbone."),
)
# Tensors beside an encoder that only pre-training uses. Any other tensor that the model lacks is an error.
PRETRAINING_ONLY = re.compile(
    r"(decoder\w*|mask_token|queue\w*|fc|(\w+_)?(head|projector|projection|predictor|prototypes))(\.|$)"
)
IMAGE_TEXT_PROJECTION = re.compile(r"visual\.(proj|head\.proj\.weight|attnpool\.c_proj\.(weight|bias))")
_CHUNK = re.compile(r"blocks\.\d+\.(\d+)\.")
# Parts of a model that an encoder may lack, besides the head: MAE has no norm behind its average pooling.
NEAR_HEAD = re.compile(r"(fc_norm|head|classifier)\.")


@contextmanager
def prefix_errors(key: str) -> Iterator[None]:
    """Put the config's `key` before the text of every CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error


def read_weights(path: Path, averaged: bool = True) -> tuple[dict[str, Tensor], str]:
    """The weights in a file, by parameter name, on the CPU, without prefixes of wrappers; and a description: the file,
    and if it has a moving average, which state dict was used.

    path: a safetensors file, or one that `torch.save` wrote. averaged: prefer the EMA weights if the file has both, as
    timm's `create_model(checkpoint_path=)` does; a file with only one kind returns that one. Raises CheckpointError (at
    most three lines) for a file that is missing, truncated, no checkpoint, or needs code to load.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint {str(path)!r}: no such file; check the path")
    if _is_safetensors(path):
        return _strip_prefixes(_read_safetensors(path)), str(path)
    state, chosen = _find_state_dict(_read_pickle(path), path, averaged)
    return state, f"{path}{chosen}"


def download_weights(url: str) -> Path:
    """The file at a URL, downloaded once into torch.hub's cache. Digits in its name, as in `resnet18-f37072fd.pth`,
    are compared with the SHA-256 digest. Raises ResourceError or CheckpointError.

    Files without such digits have a folder for each URL, since many are called `checkpoint.pth`.
    """
    name = Path(urlsplit(url).path).name or "weights"
    digest = re.search(r"-([a-f0-9]{8,})\.", name)
    folder = Path(torch.hub.get_dir(), "checkpoints", "" if digest else hashlib.sha256(url.encode()).hexdigest()[:16])
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            print(f"downloading {url} to {path}", flush=True)
            torch.hub.download_url_to_file(url, str(path), digest and digest[1], progress=sys.stderr.isatty())
    except (OSError, HTTPException, ValueError) as error:  # ValueError: no valid URL
        text = f"{url} can't be downloaded to {path}: {first_line(error)}"
        raise ResourceError(
            f"{text}\ncorrect the URL, or copy the file here by other means and name its path"
        ) from error
    except RuntimeError as error:
        raise CheckpointError(f"{url} is not the file that its name states: {first_line(error)}") from error
    return path


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
        # Pass a file object: for a path, torch.load uses the suffix.
        with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):
            is_zip = file.read(4) == b"PK\x03\x04"
            # torch.save does not compress: a larger content costs memory and is not its own.
            if is_zip and sum(entry.file_size for entry in ZipFile(file).infolist()) > path.stat().st_size:
                raise ValueError("its content is larger than the file")
            file.seek(0)
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
    """The state dict of a checkpoint, the content itself or under one of the libraries' keys, without prefixes; and a
    note on the choice if there is an average."""
    if isinstance(content, Mapping):
        nested = {key: _tensors_in(content.get(key)) for key in (*NESTED_KEYS, *AVERAGE_KEYS)}
        trained = next((key for key in NESTED_KEYS if nested[key]), None)
        average = next((key for key in AVERAGE_KEYS if nested[key]), None)
        if average is not None and (averaged or trained is None):
            return _strip_prefixes(nested[average]), f" (its average {average}{f', not {trained}' if trained else ''})"
        if trained is not None:
            note = f" ({trained}, not its average {average})" if average else ""
            return _strip_prefixes(nested[trained]), f" ({trained})" if trained in PRETRAINING_KEYS else note
        # A checkpoint's top level may hold a single tensor (pytorch/examples' best_acc1), which is no model.
        if len(state := _tensors_in(content)) * 2 > len(content):
            return _strip_prefixes(state), ""
    keys = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"{str(path)!r} holds no weights: found {keys or 'nothing'}\n"
        f"expected a state dict, bare or under one of {', '.join((*NESTED_KEYS, *AVERAGE_KEYS))}"
    )


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
    initialized, unless head_may_differ is False; position embeddings of another grid are resized, and an original
    author's names translated, by the model's library; further BatchNorm layers of `model.split_bn` are ignored;
    counters `num_batches_tracked` may be missing (torch < 0.4.1). Where head_may_differ, also the encoder of a
    pre-training file: the head stays as initialized. num_classes: the model's, to find its head. Raises CheckpointError
    with counts and the first three names of each kind.
    """
    expected = model.state_dict()
    head = [name for name in head_names(model, num_classes) if name in expected]
    given = without_split_bn(state)
    state, notes = _convert_if_needed(model, _without_projection(given), head)
    resized = [name for name in head if name in state and _differs_in_size(expected[name], state[name])]
    left_out = [name for name in head if name in state] if head_may_differ and resized else []
    loaded = {name: value for name, value in state.items() if name not in left_out}
    may_lack = {name for name in expected if name not in loaded and (name in left_out or _is_counter(name))}
    required = {name: value for name, value in expected.items() if name not in may_lack}
    sentence = ", ".join([f"loaded {len(loaded)} tensors", *notes])
    if left_out:
        sentence += f"; {new_head_note(left_out, state[left_out[0]].shape[0], expected[left_out[0]].shape[0])}"
    if mismatch := state_dict_mismatch(required, loaded):
        encoder = _find_encoder(model, given, head) if head_may_differ else None
        if encoder is None:
            remedy = "set model.name and model.kwargs to what the checkpoint was trained with"
            if resized and required.keys() == loaded.keys() and _names_with_other_shape(required, loaded) == resized:
                had = state[resized[0]].shape[0]
                remedy = f"set model.num_classes={had}, or use data of the classes of its training"
            raise CheckpointError(f"the checkpoint's weights don't fit this model: {mismatch}\n{remedy}")
        loaded, sentence = encoder
    try:
        model.load_state_dict(loaded, strict=False)  # only the head and counters may be missing
    except RuntimeError as error:  # sparse or quantized tensors
        text = f"the checkpoint's weights can't be copied into this model: {_one_line(error)}"
        raise CheckpointError(f"{text}\nuse another checkpoint") from error
    return sentence


def _find_encoder(
    model: nn.Module, state: Mapping[str, Tensor], head: list[str]
) -> tuple[dict[str, Tensor], str] | None:
    """The tensors for all of the model but its head, from a file of pre-training, and a sentence about what was found;
    None if there are none."""
    expected = model.state_dict()
    for prefix in ENCODER_PREFIXES:
        part = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        part, notes = _convert_if_needed(model, _join_chunks(_without_projection(part), expected), head)
        if not prefix and any(name in head for name in part):
            continue  # a classifier
        loaded = {name: value for name, value in part.items() if name not in head}
        for name in loaded.keys() - expected.keys():
            if PRETRAINING_ONLY.match(name) or (name.startswith("norm.") and "fc_norm.weight" in expected):
                del loaded[name]
        initial = {n for n in expected if n not in loaded and (n in head or NEAR_HEAD.match(n) or _is_counter(n))}
        required = {name: value for name, value in expected.items() if name not in initial}
        if not state_dict_mismatch(required, loaded):
            new = [name for name in expected if name in initial and not _is_counter(name)]
            counts = [f"loaded {len(loaded)} tensors", *notes, f"dropped {len(state) - len(loaded)}"]
            counts += [f"newly initialized {len(new)} ({', '.join(new)})"]
            return loaded, f"found an encoder ({prefix}*): {', '.join(counts)}"
    return None


def _without_projection(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the outputs of CLIP's image towers, which timm would take for a classifier."""
    return {name: value for name, value in state.items() if not IMAGE_TEXT_PROJECTION.fullmatch(name)}


def _join_chunks(state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """DINOv2 trains with blocks in chunks and numbers them through: `blocks.1.10.` is `blocks.10.`."""
    if any(_CHUNK.match(name) for name in expected):
        return state
    return {_CHUNK.sub(r"blocks.\1.", name): value for name, value in state.items()}


def state_dict_mismatch(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> str:
    """How the names and shapes of two state dicts differ, in one line: counts, and the first three names of each kind;
    "" if they don't."""
    other_shape = _names_with_other_shape(expected, actual)
    kinds = {
        "missing": [name for name in expected if name not in actual],
        "unexpected": [name for name in actual if name not in expected],
        "of another shape": [f"{n} {tuple(actual[n].shape)} for {tuple(expected[n].shape)}" for n in other_shape],
    }
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
        if names
    )


def without_split_bn(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the BatchNorm layers that `model.split_bn` adds, which only training uses."""
    return {name: value for name, value in state.items() if ".aux_bn." not in name}


def _differs_in_size(expected: Tensor, actual: Tensor) -> bool:
    """Whether two shapes differ in the first dimension only."""
    same_rank = expected.ndim == actual.ndim > 0
    return same_rank and expected.shape[0] != actual.shape[0] and expected.shape[1:] == actual.shape[1:]


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def _names_with_other_shape(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> list[str]:
    """Names in both, in the order of `expected`."""
    return [name for name, value in expected.items() if name in actual and actual[name].shape != value.shape]


def _convert_if_needed(
    model: nn.Module, state: dict[str, Tensor], head: list[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The state as converted by the model's library, if names or shapes differ beyond the head; and notes about it.

    Only position embeddings may be resized: timm would also resample the patches of a ViT for another patch size, which
    is another model.
    """
    expected = model.state_dict()
    same_names = all(_is_counter(name) for name in expected.keys() ^ state.keys())
    if same_names and set(_names_with_other_shape(expected, state)) <= set(head):
        return state, []
    converted = _convert_state_dict(model, state)
    reshaped = _names_with_other_shape(state, converted)
    resized = [name for name in reshaped if converted[name].numel() != state[name].numel()]
    if not all("pos" in name for name in resized):
        return state, []
    notes = ["their names translated as timm does"] if set(converted) != set(state) else []
    notes += [f"{len(resized)} position embeddings resized to this model's grid"] if resized else []
    return converted, notes


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
