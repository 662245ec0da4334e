"""Which parameters are pulled towards zero.

Owns the split of a model's parameters into groups with and without weight decay. Decides by shape, never by name, so
that it holds for every model. Called by `engine.build`; the groups go to `build_optimizer`.
"""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float, decay_norm_and_bias: bool) -> list[dict[str, Any]]:
    """One or two groups for an optimizer: `params` (tensors), `names` (theirs, in parallel) and `weight_decay`.

    decay_norm_and_bias: true puts all into one group; false puts tensors of at most one dimension, which are the norms'
    weights and all biases, into a second one with weight decay 0 (as in He et al., "Bag of Tricks for Image
    Classification", 2019, section 3.1). Frozen parameters are left out, a parameter shared by two modules comes once,
    an empty group is dropped, and the order is that of `model.named_parameters()`. `names` lets a checkpoint store the
    optimizer's state by parameter name.

    timm's groups differ for models that list further tensors to spare (ViT's position embedding and class token).
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [(name, parameter) for name, parameter in trained if decay_norm_and_bias or parameter.ndim > 1]
    spared = [(name, parameter) for name, parameter in trained if not (decay_norm_and_bias or parameter.ndim > 1)]
    return [
        {"params": [p for _, p in members], "names": [name for name, _ in members], "weight_decay": decay}
        for members, decay in ((decayed, weight_decay), (spared, 0.0))
        if members
    ]
