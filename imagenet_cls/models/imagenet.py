"""The outputs of weights that were published for ImageNet-1k, in the order of a dataset's classes.

The outputs are in the order of the WordNet ids, class folders in that of their names (`0`, `1`, `10`, ... or `tench`).
"""

from collections.abc import Sequence
from functools import cache

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn
from torchvision.models import ResNet18_Weights

from imagenet_cls.errors import DataError
from imagenet_cls.models.adapt import head_names

IMAGENET_CLASSES = 1000


def imagenet_order(classes: Sequence[str]) -> list[int]:
    """For each class its output in weights that were published for ImageNet-1k; then all other outputs.

    The classes are named by WordNet ids, torchvision's categories or the first synonym of timm's descriptions; 1,000
    classes also by the numbers 0 to 999. Raises DataError for other names.
    """
    return _match_names(classes)[0]


def _match_names(classes: Sequence[str]) -> tuple[list[int], list[str]]:
    """`imagenet_order`, and the names of all classes by the kind of name that `classes` have."""
    names = [name.replace("_", " ").partition(",")[0] for name in classes]
    names = [str(int(name)) if name.isdecimal() else name for name in names]
    candidates = _all_names()
    if len(classes) < IMAGENET_CLASSES:
        candidates = candidates[1:]  # with fewer than 1,000 classes, numbers are not accepted
    for known in candidates:
        if names == known:  # also with a name that two classes share (there are two cranes)
            return list(range(IMAGENET_CLASSES)), known
        outputs = {name: output for output, name in enumerate(known) if known.count(name) == 1}
        if len(set(names)) == len(names) and outputs.keys() >= set(names):
            order = [outputs[name] for name in names]
            return order + sorted(set(range(IMAGENET_CLASSES)).difference(order)), known
    closest = max(candidates, key=lambda known: len(set(names).intersection(known)))
    unknown = next((name for name in names if name not in closest), "a name that two classes share")
    raise DataError(
        f"the published weights have the classes of ImageNet-1k, and the dataset's {unknown!r} is not one of them\n"
        "name the classes by WordNet ids (n01440764), by torchvision's categories, or all by the numbers 0 to 999"
    )


def imagenet_classes(count: int) -> tuple[str, ...]:
    """The WordNet ids of the version of ImageNet with `count` classes, in the order of outputs; empty if unknown."""
    subset = infer_imagenet_subset({"num_classes": count})
    return tuple(ImageNetInfo(subset).label_names()) if subset else ()


def imagenet_outputs(classes: Sequence[str], count: int) -> tuple[str, ...]:
    """The names of `count` outputs, in their order, if `classes` are ImageNet's; else empty.

    The classes are named by WordNet ids, or all by the numbers from 0. Those of ImageNet-1k may
    also be named as for `imagenet_order`, and keep their names.
    """
    wordnet_ids = imagenet_classes(count)
    if set(classes) <= set(wordnet_ids) or set(classes) == set(map(str, range(count))):
        return wordnet_ids
    if count != IMAGENET_CLASSES:
        return ()
    try:
        order, known = _match_names(classes)
    except DataError:
        return ()
    names = dict(enumerate(known)) | dict(zip(order, classes, strict=False))
    return tuple(names[output] for output in range(count))


def match_outputs(model: nn.Module, classes: Sequence[str]) -> str:
    """Permute the rows of the head, in place, so that its outputs are in the order of `classes`.

    Returns the end of a message about it, "" where the order is the same. Raises DataError, see `imagenet_order`.
    """
    order = imagenet_order(classes)
    if order == list(range(IMAGENET_CLASSES)):
        return ""
    head = [model.get_parameter(name) for name in head_names(model, IMAGENET_CLASSES)]
    assert head and all(len(parameter) == IMAGENET_CLASSES for parameter in head), type(model)
    with torch.no_grad():
        for parameter in head:
            parameter.copy_(parameter[order])
    return "; its outputs were put in the order of the dataset's classes"


@cache
def _all_names() -> tuple[list[str], ...]:
    """The classes in the order of the outputs, by each kind of name; the numbers come first."""
    info = ImageNetInfo("imagenet-1k")
    first_synonyms = [description.partition(",")[0] for description in info.label_descriptions()]
    numbers = [str(number) for number in range(IMAGENET_CLASSES)]
    return numbers, info.label_names(), ResNet18_Weights.DEFAULT.meta["categories"], first_synonyms
