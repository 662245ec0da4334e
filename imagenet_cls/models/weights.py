"""Load the weights of any checkpoint into a model.

Of a classifier, or of the encoder of a self-supervised or image-text pre-training (MAE, DINO v1 to
v3, MoCo v2 and v3, CLIP and others).
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from timm.models import adapt_input_conv
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

from imagenet_cls.errors import CheckpointError
from imagenet_cls.models.factory import new_head_note
from imagenet_cls.models.head import head_names
from imagenet_cls.text import join_names

# What wraps a model or parts of it: DataParallel and DistributedDataParallel, torch.compile, FSDP
# and activation checkpointing.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
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
KNOWN_PREFIXES = ("backbone.", "encoder.", *PRETRAINING_PREFIXES)
# Tensors beside an encoder that only pre-training uses. Any other tensor that the model lacks is an
# error.
PRETRAINING_ONLY = re.compile(
    r"(decoder\w*|mask_token|queue\w*|fc|(\w+_)?(head|projector|projection|predictor|prototypes))(\.|$)"
)
IMAGE_TEXT_PROJECTION = re.compile(
    r"(^|\.)visual\.(proj|head\.(proj|mlp\.fc2)\.weight|attnpool\.c_proj\.(weight|bias))$"
)
# Parts of a model that an encoder may lack, besides the head: MAE has no norm after its average
# pooling.
NEAR_HEAD = re.compile(r"(fc_norm|head|classifier)\.")
# Patterns of old names in torchvision's files of DenseNet and ViT, and the names in its models.
OLD_NAMES = {
    r"(denselayer\d+\.(?:norm|conv))\.([12]\.)": r"\1\2",
    r"(encoder_layer_\d+\.mlp\.)linear_1": r"\g<1>0",
    r"(encoder_layer_\d+\.mlp\.)linear_2": r"\g<1>3",
}
CHUNK = re.compile(r"^blocks\.\d+\.(\d+)\.")


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

    prefix: what was removed from the names. others: the tensors whose names lack it, by their own
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
    """Load `state` into `model`, in place. Returns one sentence about what was done, and perhaps a
    line with a warning.

    All names and shapes must match, with these exceptions: names may have a prefix, see
    `name_weights`; the head may have any name, if it is the only layer of its size beside the
    other weights; position embeddings of another grid are resized, and an original author's names
    translated, by the model's library; a first convolution for three channels is converted as timm
    does; further BatchNorm layers of `model.split_bn` are ignored; counters `num_batches_tracked`
    may be missing (torch < 0.4.1). Where head_may_differ, a head of another size stays as
    initialized, and the state may be the encoder of a pre-training file. num_classes: the model's,
    to find its head. keep_head: with False, the head stays as initialized. Raises CheckpointError
    with counts and the first three names of each kind.
    """
    expected = model.state_dict()
    head = [name for name in head_names(model, num_classes) if name in expected]
    given = without_split_bn(state, expected)
    named = name_weights(model, given, head)
    part, others = named.tensors, named.others
    _convert_channels(part, expected, named.notes)
    if named.prefix in PRETRAINING_PREFIXES:
        others |= {named.prefix + name: part.pop(name) for name in head if name in part}
    elif not any(name in part for name in head):
        _rename_head(named, expected, head)
    is_encoder = head_may_differ and not any(name in part for name in head)
    for name in part.keys() - expected.keys():
        is_replaced = name.startswith("norm.") and "fc_norm.weight" in expected
        if is_encoder and (PRETRAINING_ONLY.match(name) or is_replaced):
            others[named.prefix + name] = part.pop(name)
    resized = [  # in the first dimension
        name
        for name in head
        if name in part
        and part[name].ndim == expected[name].ndim
        and part[name].shape[1:] == expected[name].shape[1:]
        and len(part[name]) != len(expected[name])
    ]
    new = []
    if head_may_differ and (resized or not keep_head):
        new = head
    elif is_encoder:
        missing = [name for name in expected if name not in part]
        new = [name for name in missing if name in head or NEAR_HEAD.match(name)]
    loaded = {name: value for name, value in part.items() if name not in new}
    required = {
        name: value
        for name, value in expected.items()
        if name in loaded or not (name in new or _is_counter(name))
    }
    note = f", without the prefix {named.prefix}" if named.prefix else ""
    if mismatch := state_dict_mismatch(required, loaded):
        classes = f"model.num_classes={len(part[resized[0]])}, " if resized else ""
        remedy = (
            f"Set {classes}model.name and model.kwargs, or --model, as the checkpoint was trained."
        )
        reshaped = _names_with_other_shape(required, loaded)
        if required.keys() == loaded.keys() and all("pos" in name for name in reshaped):
            remedy = (
                f"The position embeddings of {type(model).__name__} are not resized: build it for "
                "the size of the weights, such as by model.kwargs.img_size."
            )
        raise CheckpointError(
            f"The checkpoint's weights don't fit this model: {mismatch}{note}.", remedy
        )
    set_tensors(model, loaded)
    sentence = ", ".join([f"loaded {len(loaded)} tensors{note}", *named.notes])
    if dropped := len(given) - len(part):
        sentence += f", dropped {dropped} ({join_names([*others]) or 'by the translation'})"
    if resized and new:
        return f"{sentence}; {new_head_note(head, len(part[resized[0]]), num_classes)}"
    if new:
        sentence += f", newly initialized {len(new)} ({', '.join(new)})"
    of_size = [
        name for name in others if new and head and others[name].shape == expected[head[0]].shape
    ]
    if of_size:
        sentence += (
            f"\nwarning: the head is newly initialized, but {join_names(of_size)} in the file has "
            "its size; to use it, save the weights by the model's names"
        )
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
    """The weights under the prefix whose removal fits most of the model's names and shapes. Names
    that fit as they are have none.

    Wrappers, which may be inside of names, are removed first. Raises CheckpointError if two
    prefixes fit equally well, and none is known from pre-training code. head: the names of the
    model's head.
    """
    expected = model.state_dict()
    state = without_wrappers(state, expected)
    best: list[NamedWeights] = []
    most = -1
    for prefix in _prefixes(state, len(expected)):
        named = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            # timm would take the output of CLIP's image towers for a classifier.
            if name.startswith(prefix) and not IMAGE_TEXT_PROJECTION.search(name)
        }
        others = {name: state[name] for name in state if name.removeprefix(prefix) not in named}
        part, notes = _convert_if_needed(model, _join_chunks(named, expected), head)
        fits = len(expected.keys() & part) - len(_names_with_other_shape(expected, part))
        if fits > most:
            best, most = [], fits
        if fits == most:
            best.append(NamedWeights(part, prefix, others, notes))
    prefixes = [found.prefix for found in best]
    if len(best) > 1 and prefixes[0] not in ("", *KNOWN_PREFIXES):
        raise CheckpointError(
            f"The file has this model's weights under each of the prefixes {join_names(prefixes)}.",
            "Save those to use alone.",
        )
    return best[0]


def _prefixes(state: Mapping[str, Tensor], count: int) -> list[str]:
    """The prefixes, with dots, that at least half as many names have as the `count` of a model, in
    order of preference.
    """
    counts: Counter[str] = Counter()
    for name in state:
        counts.update(name[: dot.end()] for dot in re.finditer(r"\.", name))
    found = [prefix for prefix, names in counts.items() if 2 * names >= count]
    return ["", *sorted(found, key=lambda prefix: (*KNOWN_PREFIXES, prefix).index(prefix))]


def count_outputs(model: nn.Module, state: Mapping[str, Tensor]) -> int:
    """The number of outputs of weights: of the layer with the name of the model's head, or of the
    only layer that the model lacks and that takes as many features. Raises CheckpointError without
    one.

    model: with any number of outputs.
    """
    expected = model.state_dict()
    head = head_names(model, getattr(model, "num_classes", 1000))[:1]
    named = name_weights(model, state, head)
    own = [named.tensors[name] for name in head if name in named.tensors]
    found = own or [
        value
        for name, value in {**named.others, **named.tensors}.items()
        if name not in expected and value.ndim > 1
        if head and value.shape[1:] == expected[head[0]].shape[1:]
    ]
    if len(found) != 1:
        raise CheckpointError(
            "The weights have no known classifier.", "Give a config that sets model.num_classes."
        )
    return len(found[0])


def _rename_head(named: NamedWeights, expected: Mapping[str, Tensor], head: list[str]) -> None:
    """Give the layer that must be the head its names in the model, in place.

    There is none if several layers have the head's parameters and shapes, or if there are others
    that only pre-training uses.
    """
    part, others = named.tensors, named.others
    unused = {**others, **{name: part[name] for name in part if name not in expected}}
    fitting = []
    for owner in {name.rpartition(".")[0] for name in unused}:
        names = {f"{owner}.{name.rpartition('.')[2]}": name for name in head}
        is_fitting = all(
            old in unused and unused[old].shape == expected[new].shape for old, new in names.items()
        )
        if names and is_fitting:
            fitting.append(names)
    if len(fitting) == 1 and not any(map(PRETRAINING_ONLY.match, unused.keys() - fitting[0])):
        for old, new in fitting[0].items():
            (part if old in part else others).pop(old)
            part[new] = unused[old]
            named.notes.append(f"{old} as {new}")


def _convert_channels(
    state: dict[str, Tensor], expected: Mapping[str, Tensor], notes: list[str]
) -> None:
    """Convert the first convolution to the model's channels, in place, and add a note. Raises
    CheckpointError if the weights are for another number than three.
    """
    first = next((name for name, value in expected.items() if value.ndim == 4), None)
    for name in _names_with_other_shape(expected, state):
        old, new = state[name].shape, expected[name].shape
        if len(old) != 4 or old[:1] + old[2:] != new[:1] + new[2:]:
            continue
        if old[1] == 3:
            state[name] = adapt_input_conv(new[1], state[name])
            notes.append(f"{name} converted from 3 to {new[1]} channels as timm does")
        elif name == first:
            raise CheckpointError(
                f"The weights are for images of {old[1]} channels ({name}), and the model takes "
                f"{new[1]}.",
                "Use weights for 3 channels, or set data.channels as these were trained.",
            )


def _join_chunks(state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename `blocks.1.10.` (DINOv2's chunked blocks) to `blocks.10.`."""
    if any(CHUNK.match(name) for name in expected):
        return state
    joined = {CHUNK.sub(r"blocks.\1.", name): value for name, value in state.items()}
    return joined if len(joined) == len(state) else state


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


def without_wrappers(state: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """`state` by the names that its model has without `WRAPPERS`, except for those in names of the
    model, `expected`. Raises CheckpointError if names become equal.
    """
    removed = WRAPPERS.difference(*(name.split(".") for name in expected))
    named = {}
    for name, value in state.items():
        named[".".join(part for part in name.split(".") if part not in removed)] = value
    if len(named) < len(state):
        raise CheckpointError(
            "The file has a model both inside and outside of a wrapper (module. or _orig_mod.).",
            "Save the one to use alone.",
        )
    return named


def without_split_bn(state: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """`state` without the BatchNorm layers that `model.split_bn` adds, which only training uses,
    unless the model itself has some of this name. expected: its names.
    """
    if any(".aux_bn." in name for name in expected):
        return dict(state)
    return {name: value for name, value in state.items() if ".aux_bn." not in name}


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


def _convert_if_needed(
    model: nn.Module, state: dict[str, Tensor], head: list[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """The state as converted by the model's library, if names or shapes differ beyond the head; and
    notes about it.

    Only position embeddings may be resized: timm would also resample a ViT's patches for another
    patch size.
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
    for old, new in OLD_NAMES.items():
        state = {re.sub(old, new, name): value for name, value in state.items()}
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
