"""Outputs of models, and the classes that they name."""

from collections.abc import Sequence

from torch import Tensor

EvalOutputs = tuple[dict[str, Tensor], Tensor, Tensor]
"""fp32 logits (B, classes) of each model, targets (`data.targets`), indices (B,)."""


def output_names(classes: Sequence[str], count: int) -> list[str]:
    """The names of `count` outputs, of which there may be more than classes."""
    return [*classes, *(f"class {index}" for index in range(len(classes), count))]


def ranked_classes(
    probabilities: Tensor, classes: Sequence[str], count: int, least: float = 0.0
) -> list[list[tuple[str, float]]]:
    """For each row of probabilities (B, C) the likeliest classes that have at least `least`, at
    most `count`, with their probabilities, likeliest first.
    """
    if count < 1:
        raise ValueError(f"top={count}: give a number of classes from 1")
    outputs = probabilities.shape[1]
    best = probabilities.topk(min(count, outputs), dim=1)
    # in float32, as in evaluations
    lengths = (best.values >= least).sum(dim=1)
    names = output_names(classes, outputs)
    ranked = []
    for indices, values, length in zip(best.indices, best.values, lengths, strict=True):
        named = [names[i] for i in indices[:length].tolist()]
        ranked.append(list(zip(named, values[:length].tolist(), strict=True)))
    return ranked
