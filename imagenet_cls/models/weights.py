"""Load the weights of any checkpoint into a model.

Of a classifier, or of the encoder of a self-supervised or image-text pre-training (MAE, DINO v1 to
v3, MoCo v2 and v3, CLIP and others).
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO

from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.factory import new_head_note
from imagenet_cls.models.head import head_names
from imagenet_cls.text import join_names

# "": the encoder alone, or beside tensors that `PRETRAINING_ONLY` matches.
ENCODER_PREFIXES = ("", "backbone.", "encoder.")
# Where pre-training code alone puts the encoder among other networks, in order of preference: MoCo
# evaluates `encoder_q.` and `base_encoder.`, DINOv2 the teacher. A head there is no classifier.
PRETRAINING_PREFIXES = (
    "encoder_q.",
    "base_encoder.",
    "momentum_encoder.",
    "online_encoder.",
    "target_encoder.",
    "teacher.backbone.",
    "student.backbone.",
)
# Tensors beside an encoder that only pre-training uses. Any other tensor that the model lacks is an
# error.
PRETRAINING_ONLY = re.compile(
    r"(decoder\w*|mask_token|queue\w*|fc|(\w+_)?(head|projector|projection|predictor|prototypes))(\.|$)"
)
IMAGE_TEXT_PROJECTION = re.compile(
    r"visual\.(proj|head\.proj\.weight|attnpool\.c_proj\.(weight|bias))"
)
# Parts of a model that an encoder may lack, besides the head: MAE has no norm after its average
# pooling.
NEAR_HEAD = re.compile(r"(fc_norm|head|classifier)\.")
CHUNK = re.compile(r"blocks\.\d+\.(\d+)\.")


@contextmanager
def prefix_errors(key: str) -> Iterator[None]:
    """Put the config's `key` before the problem of every CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error.problem}", error.remedy) from error


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], num_classes: int, head_may_differ: bool = True
) -> str:
    """Load `state` into `model`, in place. Returns one sentence about what was done, and perhaps a
    line with a warning.

    All names and shapes must match, with these exceptions: a prefix of all names is removed;
    position embeddings of another grid are resized, and an original author's names translated, by
    the model's library; further BatchNorm layers of `model.split_bn` are ignored; counters
    `num_batches_tracked` may be missing (torch < 0.4.1). Where head_may_differ, a head of another
    size stays as initialized, and the state may be the encoder of a pre-training file. num_classes:
    the model's, to find its head. Raises CheckpointError with counts and the first three names of
    each kind.
    """
    expected = model.state_dict()
    head = [name for name in head_names(model, num_classes) if name in expected]
    given = without_split_bn(state)
    state, notes = _convert_if_needed(model, given, head)
    given_head = [name for name in head if name in state]
    resized = [name for name in given_head if _differs_in_size(expected[name], state[name])]
    left_out = given_head if head_may_differ and resized else []
    loaded = {name: value for name, value in state.items() if name not in left_out}
    required = {
        name: value
        for name, value in expected.items()
        if name in loaded or not (name in left_out or _is_counter(name))
    }
    sentence = ", ".join([f"loaded {len(loaded)} tensors", *notes])
    if left_out:
        old_classes = state[left_out[0]].shape[0]
        new_classes = expected[left_out[0]].shape[0]
        sentence += f"; {new_head_note(left_out, old_classes, new_classes)}"
    if mismatch := state_dict_mismatch(required, loaded):
        prefix = next(iter(given), "").partition(".")[0] + "."
        is_wrapper = all(name.startswith(prefix) and name not in expected for name in given)
        if given and is_wrapper and prefix not in PRETRAINING_PREFIXES:
            inner = {name.removeprefix(prefix): value for name, value in given.items()}
            with prefix_errors(f"without the prefix {prefix} of all names"):
                sentence = load_weights(model, inner, num_classes, head_may_differ)
            return f"removed the prefix {prefix} of all names, {sentence}"
        encoder = _find_encoder(model, given, head) if head_may_differ else None
        if encoder is None:
            classes = f"model.num_classes={state[resized[0]].shape[0]}, " if resized else ""
            raise CheckpointError(
                f"The checkpoint's weights don't fit this model: {mismatch}.",
                f"Set {classes}model.name and model.kwargs as the checkpoint was trained.",
            )
        loaded, sentence = encoder
    model.load_state_dict(loaded, strict=False)  # only the head and counters may be missing
    return sentence


def _find_encoder(
    model: nn.Module, state: Mapping[str, Tensor], head: list[str]
) -> tuple[dict[str, Tensor], str] | None:
    """The encoder's tensors in a file of pre-training, without a head, and a sentence about them.

    None if the file has no encoder of this model.
    """
    expected = model.state_dict()
    for prefix in (*ENCODER_PREFIXES, *PRETRAINING_PREFIXES):
        named = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix)
        }
        part, notes = _convert_if_needed(model, _join_chunks(named, expected), head)
        if not prefix and any(name in head for name in part):
            continue  # a classifier
        loaded = {name: value for name, value in part.items() if name not in head}
        for name in loaded.keys() - expected.keys():
            is_replaced = name.startswith("norm.") and "fc_norm.weight" in expected
            if PRETRAINING_ONLY.match(name) or is_replaced:
                del loaded[name]
        initial = {
            name
            for name in expected.keys() - loaded.keys()
            if name in head or NEAR_HEAD.match(name) or _is_counter(name)
        }
        required = {name: value for name, value in expected.items() if name not in initial}
        if not state_dict_mismatch(required, loaded):
            new = [name for name in expected if name in initial and not _is_counter(name)]
            parts = [
                f"loaded {len(loaded)} tensors",
                *notes,
                f"dropped {len(state) - len(loaded)}",
                f"newly initialized {len(new)} ({', '.join(new)})",
            ]
            encoder, warning = f"an encoder ({prefix}*)", ""
            of_size = [
                name
                for name, value in state.items()
                if head and value.shape == expected[head[0]].shape
                if name.removeprefix(prefix) not in loaded
            ]
            if of_size:
                encoder += " without its head"
                warning = (
                    f"\nwarning: the head is newly initialized, but {join_names(of_size)} in the "
                    f"file has its size; to use it, rename it to {prefix}{head[0]}"
                )
            return loaded, f"found {encoder}: {', '.join(parts)}{warning}"
    return None


def _join_chunks(state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename `blocks.1.10.` (DINOv2's chunked blocks) to `blocks.10.`."""
    if any(CHUNK.match(name) for name in expected):
        return state
    return {CHUNK.sub(r"blocks.\1.", name): value for name, value in state.items()}


def state_dict_mismatch(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> str:
    """How the names and shapes of two state dicts differ: counts and three names of each kind; ""
    if they don't.
    """
    other_shape = _names_with_other_shape(expected, actual)
    kinds = {
        "missing": [name for name in expected if name not in actual],
        "unexpected": [name for name in actual if name not in expected],
        "of another shape": [
            f"{name} {tuple(actual[name].shape)} for {tuple(expected[name].shape)}"
            for name in other_shape
        ],
    }
    parts = []
    for kind, names in kinds.items():
        if names:
            examples = names[:3] if len(names) <= 3 else [*names[:3], "..."]
            parts.append(f"{len(names)} {kind} ({', '.join(examples)})")
    return "; ".join(parts)


def without_split_bn(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` without the BatchNorm layers that `model.split_bn` adds, which only training uses."""
    return {name: value for name, value in state.items() if ".aux_bn." not in name}


def _differs_in_size(expected: Tensor, actual: Tensor) -> bool:
    """Whether two shapes differ in the first dimension only."""
    same_rank = expected.ndim == actual.ndim > 0
    return (
        same_rank
        and expected.shape[0] != actual.shape[0]
        and expected.shape[1:] == actual.shape[1:]
    )


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def _names_with_other_shape(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]
) -> list[str]:
    """The names that both have with different shapes, in the order of `expected`."""
    return [
        name
        for name, value in expected.items()
        if name in actual and actual[name].shape != value.shape
    ]


def _convert_if_needed(
    model: nn.Module, state: dict[str, Tensor], head: list[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The state as converted by the model's library, if names or shapes differ beyond the head; and
    notes about it.

    Only position embeddings may be resized: timm would also resample a ViT's patches for another
    patch size.
    """
    expected = model.state_dict()
    # timm would take the output of CLIP's image towers for a classifier.
    state = {
        name: value for name, value in state.items() if not IMAGE_TEXT_PROJECTION.fullmatch(name)
    }
    same_names = all(_is_counter(name) for name in expected.keys() ^ state.keys())
    if same_names and set(_names_with_other_shape(expected, state)) <= set(head):
        return state, []
    converted = _convert_state_dict(model, state)
    reshaped = _names_with_other_shape(state, converted)
    resized = [name for name in reshaped if converted[name].numel() != state[name].numel()]
    if not all("pos" in name for name in resized):
        return state, []
    notes = []
    if converted.keys() != state.keys():
        notes.append("their names translated as timm does")
    if resized:
        notes.append(f"{len(resized)} position embeddings resized to this model's grid")
    return converted, notes


def _convert_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` as the model's library would load it: by timm's `checkpoint_filter_fn`, or
    torchvision's for its ViT.

    A state dict of another model may come back changed or unchanged: compare it with the model's.
    """
    state = dict(state)
    try:
        if isinstance(model, TorchvisionTransformer):
            return interpolate_embeddings(model.image_size, model.patch_size, state)
        module = sys.modules[type(model).__module__]
        translate = getattr(module, "checkpoint_filter_fn", None)
        if translate is None or not module.__name__.startswith("timm."):
            return state
        # timm prints a line for each bias of DINOv3 that the model lacks
        with redirect_stdout(StringIO()):
            return dict(translate(state, model))
    # these functions expect a state dict of their model, and fail in many ways on another
    except Exception:
        return state
