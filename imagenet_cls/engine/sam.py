"""Where the gradient of a step is taken: at the weights, or where the loss is highest around them.

Owns sharpness-aware minimisation (Foret et al. 2020, "Sharpness-Aware Minimization for Efficiently Improving
Generalization"). Leaves forward and backward to the loop, which goes over the micro-batches once for each point.
Refuses nothing: `config.rules` keeps it from a loss scale. `engine.build` makes it, `engine.train` asks it each step.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from imagenet_cls.config.schema import TrainConfig

T = TypeVar("T")


def build_sam(train: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> "Sam":
    """model: itself, not a wrapper. Without `train.sam_rho` the one point of every step is where the weights are."""
    return Sam(model, optimizer, train.sam_rho, train.sam_every_steps)


class Sam:
    """The points at which a step's gradient is taken, one after the other; that of the last one counts."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rho: float | None = None, every_steps: int = 1
    ):
        self.model = model
        self.optimizer = optimizer
        self.rho = rho
        self.every_steps = every_steps

    def points(self, step: int, micro_batches: Iterator[T]) -> Iterator[Iterable[T]]:
        """The micro-batches of `step`, once for each point: the loop sums up their gradient in `.grad` each time.

        Without SAM, or in a step that is not a multiple of `every_steps`, there is one point, and the micro-batches are
        handed on as they come. Else they are kept and come a second time, with the weights at w + rho * g / |g|, where
        g is the gradient of the first time, over all parameters (equation 2, with p = 2). Before this iterator ends,
        the weights are put back in the same bits.

        What is drawn in both passes has the same keys, and so is the same. The loss to report is that of the first one.
        Buffers, such as BatchNorm's running statistics, are changed by the first pass only. Under
        DistributedDataParallel g is the mean over all ranks already, so all move alike, where the paper lets each
        accelerator use its own. A gradient that is not finite moves nothing; nor does one of 0. The second pass then
        meets the same gradient, and the guard of `engine.step` skips the update. Nothing waits for the device.
        """
        if self.rho is None or step % self.every_steps != 0:
            yield micro_batches
            return
        kept = list(micro_batches)
        yield kept
        with self._at_highest_loss(self.rho):
            yield kept

    @contextmanager
    def _at_highest_loss(self, rho: float) -> Iterator[None]:
        """Weights moved by their gradients, which are dropped; within, buffers may change; after, all is as before."""
        moved = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        kept = [*moved, *self.model.buffers()]
        values = [tensor.detach().clone() for tensor in kept]
        _climb(moved, rho)
        self.optimizer.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(kept, values, strict=True):
                    tensor.copy_(value)


@torch.no_grad()
def _climb(parameters: list[nn.Parameter], rho: float) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    has_direction = torch.isfinite(norm) & (norm > 0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(torch.where(has_direction, gradient * (rho / norm), 0.0))
