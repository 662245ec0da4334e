"""Load weights by name into a model.

Of a classifier, or of an encoder of a self-supervised or image-text pre-training.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from timm.models import adapt_input_conv
from torch import Tensor, nn

from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.factory import new_head_note
from imagenet_cls.models.head import head_names
from imagenet_cls.text import join_names

# What wraps a model or parts of it: DataParallel and DistributedDataParallel, torch.compile, FSDP
# and activation checkpointing.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Tensors beside an encoder that only pre-training uses. Any other tensor that the model lacks is an
# error.
PRETRAINING_ONLY = re.compile(
    r"(decoder\w*|mask_token|queue\w*|fc|(\w+_)?(head|projector|projection|predictor|prototypes))(\.|$)"
)
# Parts of a model that an encoder may lack.
NEAR_HEAD = re.compile(r"(head|classifier)\.")
# Patterns of old names in torchvision's files of DenseNet and ViT, and the names in its models.
OLD_NAMES = {
    r"(denselayer\d+\.(?:norm|conv))\.([12]\.)": r"\1\2",
    r"(encoder_layer_\d+\.mlp\.)linear_1": r"\g<1>0",
    r"(encoder_layer_\d+\.mlp\.)linear_2": r"\g<1>3",
}


@contextmanager
def prefix_errors(key: str) -> Iterator[None]:
    """Put the config's `key` before the problem of every CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error.problem}", error.remedy) from error


@dataclass(frozen=True)
class NamedWeights:
    """Weights by a model's names of its parameters, as far as the names are known.

    prefix: what was removed from the names. others: the tensors that are not used, by their own
    names. notes: what else was done.
    """

    tensors: dict[str, Tensor]
    prefix: str
    others: dict[str, Tensor]
    notes: list[str]


def load_weights(
    model: nn.Module,
    state: Mapping[str, Tensor],
    num_classes: int,
    head_may_differ: bool = True,
    keep_head: bool = True,
) -> str:
    """Load `state` into `model`, in place. Returns one sentence about what was done.

    All names and shapes must match, except as `name_weights` says; counters `num_batches_tracked`
    may be missing (torch < 0.4.1). Where head_may_differ, a head of another size stays as
    initialized, and the state may be the encoder of a pre-training file, without the head.
    num_classes: the model's, to find its head. keep_head: with False, the head stays as
    initialized. Raises CheckpointError with counts and the first three names of each kind.
    """
    expected = model.state_dict()
    head = [name for name in head_names(model, num_classes) if name in expected]
    named = name_weights(model, state, head)
    tensors, others = named.tensors, named.others
    resized = [  # in the first dimension
        name
        for name in head
        if name in tensors
        and tensors[name].shape[1:] == expected[name].shape[1:]
        and tensors[name].shape != expected[name].shape
    ]
    is_encoder = head_may_differ and not any(name in tensors for name in head)
    if is_encoder:
        for name in filter(PRETRAINING_ONLY.match, sorted(tensors.keys() - expected.keys())):
            others[named.prefix + name] = tensors.pop(name)
        similar = [
            name for name in others if head and others[name].shape == expected[head[0]].shape
        ]
        if similar:
            raise CheckpointError(
                f"The weights lack {head[0]}, and {join_names(similar)} has its shape.",
                f"Save the state dict with this name, by state[{head[0]!r}] = "
                f"state.pop({similar[0]!r}), or without this tensor.",
            )
    new = []
    if is_encoder or (head_may_differ and (resized or not keep_head)):
        new = [
            name
            for name in expected
            if name in head or (name not in tensors and NEAR_HEAD.match(name))
        ]
    loaded = {name: value for name, value in tensors.items() if name not in new}
    required = {
        name: value
        for name, value in expected.items()
        if name in loaded or not (name in new or _is_counter(name))
    }
    note = f", without the prefix {named.prefix}" if named.prefix else ""
    if mismatch := state_dict_mismatch(required, loaded):
        classes = f"model.num_classes={len(tensors[resized[0]])}, " if resized else ""
        raise CheckpointError(
            f"The checkpoint's weights don't fit this model: {mismatch}{note}.",
            f"Set {classes}model.name and model.kwargs (such as img_size, for position "
            "embeddings), or --model, as the checkpoint was trained.",
        )
    set_tensors(model, loaded)
    sentence = ", ".join([f"loaded {len(loaded)} tensors{note}", *named.notes])
    if dropped := len(state) - len(tensors):
        sentence += f", dropped {dropped} ({join_names([*others]) or 'by the translation'})"
    if resized and new:
        return f"{sentence}; {new_head_note(head, len(tensors[resized[0]]), num_classes)}"
    if new:
        sentence += f", newly initialized {len(new)} ({', '.join(new)})"
    return sentence


def set_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers of a model by name; others keep their values.

    Unlike tensors of a file or another rank, a model's own state dict has the versions of its
    modules, without which some, such as torchvision's MNASNet, load nothing.
    """
    state = model.state_dict()
    state.update(tensors)
    model.load_state_dict(state)


def name_weights(model: nn.Module, state: Mapping[str, Tensor], head: list[str]) -> NamedWeights:
    """The weights by the model's names.

    `WRAPPERS` are removed from the names, and then the prefix before most names of the model, if it
    is before half of them. Names of the original authors are translated, and position embeddings of
    another grid resized, by timm. A first convolution for three channels is converted as timm does.
    Further BatchNorm layers of `model.split_bn` are ignored. Raises CheckpointError for several
    models. head: the names of the model's head.
    """
    expected = model.state_dict()
    wrappers = WRAPPERS.difference(*(name.split(".") for name in expected))
    inner = {
        ".".join(part for part in name.split(".") if part not in wrappers): value
        for name, value in state.items()
    }
    counts = Counter(
        name[:start]
        for name in inner
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name)))
        if name[start:] in expected
    )
    most = max(counts.values(), default=0)
    prefixes = [prefix for prefix, count in counts.items() if count == most]
    prefix = prefixes[0] if 2 * most >= len(expected) else ""
    if len(inner) < len(state) or (prefix in prefixes and len(prefixes) > 1):
        raise CheckpointError(
            f"The file has this model several times, with the prefixes {prefixes} of the names.",
            "Save the state dict of the one to use: {name.removeprefix(PREFIX): value for name, "
            "value in state.items() if name.startswith(PREFIX)}.",
        )
    part = {name.removeprefix(prefix): inner[name] for name in inner if name.startswith(prefix)}
    others = {name: inner[name] for name in inner if not name.startswith(prefix)}
    part = {name: part[name] for name in part if name in expected or ".aux_bn." not in name}
    tensors = _translate(model, part, head)
    notes = []
    if tensors.keys() != part.keys():
        notes.append("their names translated as timm does")
    resized = [
        name
        for name in _names_with_other_shape(part, tensors)
        if part[name].numel() != tensors[name].numel()
    ]
    if resized:
        notes.append(f"{len(resized)} position embeddings resized to this model's grid")
    if not all("pos" in name for name in resized):  # patches of another size: another model
        tensors = part
    for name in _names_with_other_shape(expected, tensors):
        old, new = tensors[name].shape, expected[name].shape
        if len(old) == 4 and old[1] == 3 and old[:1] + old[2:] == new[:1] + new[2:]:
            tensors[name] = adapt_input_conv(new[1], tensors[name])
            notes.append(f"{name} converted from 3 to {new[1]} channels as timm does")
    return NamedWeights(tensors, prefix, others, notes)


def _translate(model: nn.Module, state: dict[str, Tensor], head: list[str]) -> dict[str, Tensor]:
    """`state` as the model's library would load it, if its names or shapes differ beyond the head.

    timm's `checkpoint_filter_fn` may change a state dict of another model, too: compare the result
    with the model's.
    """
    expected = model.state_dict()
    same_names = all(_is_counter(name) for name in expected.keys() ^ state.keys())
    if same_names and set(_names_with_other_shape(expected, state)) <= set(head):
        return state
    for old, new in OLD_NAMES.items():
        state = {re.sub(old, new, name): value for name, value in state.items()}
    module = sys.modules[type(model).__module__]
    translate = getattr(module, "checkpoint_filter_fn", None)
    if translate is None or not module.__name__.startswith("timm."):
        return state
    try:
        return dict(translate(dict(state), model))
    # these functions expect a state dict of their model, and fail in many ways on another
    except Exception:
        return state


def count_outputs(model: nn.Module, state: Mapping[str, Tensor]) -> int:
    """The number of outputs of weights. Raises CheckpointError without the model's head.

    model: with any number of outputs.
    """
    head = head_names(model, getattr(model, "num_classes", 1000))[:1]
    found = [
        named for name, named in name_weights(model, state, head).tensors.items() if name in head
    ]
    if not found:
        raise CheckpointError(
            "The weights have no known classifier.", "Give a config that sets model.num_classes."
        )
    return len(found[0])


def state_dict_mismatch(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> str:
    """How the names and shapes of two state dicts differ: counts and three names of each kind; ""
    if they don't.
    """
    kinds = {
        "missing": [name for name in expected if name not in actual],
        "unexpected": [name for name in actual if name not in expected],
        "of another shape": [
            f"{name} {tuple(actual[name].shape)} for {tuple(expected[name].shape)}"
            for name in _names_with_other_shape(expected, actual)
        ],
    }
    parts = []
    for kind, names in kinds.items():
        if names:
            parts.append(f"{len(names)} {kind} ({join_names(names)})")
    return "; ".join(parts)


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def _names_with_other_shape(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]
) -> list[str]:
    """The names that both have with different shapes, or of which one has integers, in the order of
    `expected`.
    """
    return [
        name
        for name, value in expected.items()
        if name in actual
        and (actual[name].shape, actual[name].is_floating_point())
        != (value.shape, value.is_floating_point())
    ]
