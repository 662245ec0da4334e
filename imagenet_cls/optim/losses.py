"""What is minimised.

Owns the built-in losses and the check of the section. Called by `engine.build` (to make it) and `engine.train` (to
apply it). A loss sees logits in float32 whatever the model computed in: half precision has too few digits for a
log-softmax over 1,000 classes.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from imagenet_cls.config.schema import LossConfig
from imagenet_cls.errors import Problem, UserError
from imagenet_cls.lookup import check_kwargs, did_you_mean, import_factory, is_factory_name, missing_kwargs

Loss = Callable[[Tensor, Tensor], Tensor]

# name -> a class or function that returns the loss. Each takes label_smoothing, which has a key of its own.
BUILT_IN: dict[str, Callable[..., Loss]] = {"cross_entropy": nn.CrossEntropyLoss}


def build_loss(loss: LossConfig) -> Loss:
    """The mean loss over a batch, as a function of logits and targets; a scalar in float32.

    logits: (N, classes), any floating dtype. targets: (N,) int64 class indices, or (N, classes) probabilities from
    mixing. `cross_entropy` is torch's; with label smoothing s, the target becomes (1 - s) * target + s / classes
    (Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7). A factory of the user's is called as
    `factory(**kwargs)`, and what it returns as `loss(logits, targets)`: it, too, must give the mean. Raises UserError
    where it returns no function.
    """
    if loss.name in BUILT_IN:
        compute: Any = BUILT_IN[loss.name](label_smoothing=loss.label_smoothing)
    else:
        compute = import_factory(loss.name)(**loss.kwargs)
        if not callable(compute):
            returned = type(compute).__name__
            raise UserError(
                f"loss.name: {loss.name!r} returned {returned}; let it return a function of logits and targets"
            )

    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return compute(logits.float(), targets.float() if targets.is_floating_point() else targets)

    return mean_loss


def check_loss(loss: LossConfig) -> list[Problem]:
    """Everything wrong with the section that shows without data."""
    if loss.name in BUILT_IN:
        takes_none = "has no further arguments: label_smoothing is a key of its own, loss.label_smoothing"
        return [Problem(f"loss.kwargs.{name}", f"{loss.name!r} {takes_none}") for name in loss.kwargs]
    if not is_factory_name(loss.name):
        allowed = f"(built in: {', '.join(BUILT_IN)}; or my_module:my_factory)"
        return [Problem("loss.name", f"unknown loss {loss.name!r}{did_you_mean(loss.name, BUILT_IN)} {allowed}")]
    try:
        factory = import_factory(loss.name)
    except LookupError as error:
        return [Problem("loss.name", str(error))]
    problems = check_kwargs("loss", factory, loss.kwargs) + missing_kwargs("loss", factory, loss.kwargs)
    if loss.label_smoothing:
        text = f"is for cross_entropy; {loss.name!r} is given its numbers in loss.kwargs"
        problems.append(Problem("loss.label_smoothing", text))
    return problems
