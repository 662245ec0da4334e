"""Sharpness-aware minimization (SAM).

Foret et al. 2020, "Sharpness-Aware Minimization for Efficiently Improving Generalization".
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Sam:
    """The perturbed weights at which SAM takes its second gradient. Without `rho` it is disabled."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rho: float | None = None, every_steps: int = 1
    ):
        """model: not wrapped. rho: radius of the neighbourhood (`train.sam_rho`)."""
        self.model = model
        self.optimizer = optimizer
        self.rho = rho
        self.every_steps = every_steps

    def due(self, step: int) -> bool:
        """Whether this step takes a second forward and backward pass inside `perturbed_weights`."""
        return self.rho is not None and step % self.every_steps == 0

    @contextmanager
    def perturbed_weights(self) -> Iterator[None]:
        """Inside, the weights are w + rho * g / |g| (equation 2, p = 2), where g is the gradient in `.grad`.

        `.grad` is cleared on entry. On exit weights and buffers are restored exactly, so running
        statistics come from the first pass only. Under DistributedDataParallel g is the mean over all ranks, where the
        paper lets each accelerator use its own. A gradient that is zero or not finite leaves the weights unchanged.
        No host synchronization.
        """
        assert self.rho is not None
        perturbed = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        tensors = [*perturbed, *self.model.buffers()]
        values = [tensor.detach().clone() for tensor in tensors]
        _perturb(perturbed, self.rho)
        self.optimizer.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)


@torch.no_grad()
def _perturb(parameters: list[nn.Parameter], rho: float) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    has_direction = torch.isfinite(norm) & (norm > 0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(torch.where(has_direction, gradient * (rho / norm), 0.0))
