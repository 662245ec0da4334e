"""Finds the head of a model, and puts its outputs in another order."""

from collections.abc import Sequence

import torch
from torch import nn


def head_names(model: nn.Module, num_classes: int) -> list[str]:
    """Names of the head's parameters, such as `["fc.weight", "fc.bias"]`; empty if there is none.

    A timm model names its classifier. In another model it is the last linear layer or convolution
    with `num_classes` outputs.
    """
    parameters = [name for name, _ in model.named_parameters()]
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    owners = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    names = [name for name in parameters if any(name.startswith(owner + ".") for owner in owners)]
    if names:
        return names
    for owner, module in reversed(list(model.named_modules())):
        if is_classifier(module, num_classes):
            return [f"{owner}.{name}" if owner else name for name, _ in module.named_parameters()]
    return []


def is_classifier(layer: nn.Module, num_classes: int) -> bool:
    """Whether a layer is linear or a convolution, with `num_classes` outputs."""
    outputs = getattr(layer, "out_features", None) or getattr(layer, "out_channels", None)
    return isinstance(layer, nn.Linear | nn.Conv2d) and outputs == num_classes


def permute_outputs(model: nn.Module, order: Sequence[int]) -> str:
    """Put output `order[i]` of the head at position i, in place; `order` has all outputs once.

    Returns the end of a message about it, "" where the order is the same.
    """
    if list(order) == list(range(len(order))):
        return ""
    head = [model.get_parameter(name) for name in head_names(model, len(order))]
    assert head and all(len(parameter) == len(order) for parameter in head), type(model)
    with torch.no_grad():
        for parameter in head:
            parameter.copy_(parameter[list(order)])
    return "; its outputs were put in the order of the dataset's classes"
