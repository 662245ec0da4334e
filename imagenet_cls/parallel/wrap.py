"""The model as ranks train it together: DistributedDataParallel, its bucket layout, and BatchNorm's running statistics.

Owns that all ranks come to hold the same bits, at the start and after every step; `parallel.drift` looks whether they
do. Called by `engine.build`. The wrapped model is for forward and backward only; everything else (evaluation, EMA,
checkpoints) takes the model itself, so that no name ever carries a `module.`.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from imagenet_cls.guards.replicas import check_same_weights
from imagenet_cls.parallel.collectives import all_mean
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.sync_bn import is_synchronized


def wrap(model: nn.Module, group: Group, mode: str) -> nn.Module:
    """The model under DistributedDataParallel where there are several ranks or `mode` is `ddp`, else the model itself.

    Every rank's parameters and buffers become rank 0's, which is the only one that read weights. A collective.
    broadcast_buffers=False: `RunningStatistics` keeps the buffers equal, by averaging instead of taking rank 0's.
    Not static_graph: it fails under `no_sync` (accumulation) with an internal assert (pytorch#143580).

    Raises ResourceError where the ranks hold different weights all the same.
    """
    if group.world_size == 1 and mode != "ddp":
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[group.device.index] if group.device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    if group.world_size > 1:
        broadcast_buffers(model)
        check_same_weights(model, group)
    return wrapped


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers, as bytes: gloo does not take every dtype. A collective.

    Without `broadcast_buffers`, DDP hands out the parameters only, and only rank 0 has read the running statistics of
    weights that the run starts from.
    """
    for buffer in model.buffers():
        if buffer.numel():
            received = buffer.detach().contiguous()
            dist.broadcast(received.reshape(-1).view(torch.uint8), src=0)
            buffer.detach().copy_(received)


def gradient_sync(wrapped: nn.Module, is_last: bool) -> AbstractContextManager:
    """Around one micro-batch's forward and backward: gradients are reduced with the last one of a step only."""
    if isinstance(wrapped, DistributedDataParallel) and not is_last:
        return wrapped.no_sync()
    return contextlib.nullcontext()


def warm_up_buckets(wrapped: nn.Module, forward_backward: Callable[[], None]) -> None:
    """Make DDP lay out its gradient buckets for good, before the first step and before any state is loaded.

    DDP lays them out anew after its first backward, in the order in which gradients came. A resumed run would sum its
    first step in another order than an undisturbed one and end in other bits (seen on 3 and 4 ranks). So each run,
    fresh or resumed, makes two throw-away passes first; gradients are cleared and buffers put back.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    before = [buffer.clone() for buffer in wrapped.module.buffers()]
    for _ in range(2):
        forward_backward()
        wrapped.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in zip(wrapped.module.buffers(), before, strict=True):
            buffer.copy_(value)


class RunningStatistics:
    """BatchNorm's running means and variances, the same on every rank at all times.

    `settle` runs once after each optimizer step: one flat all-reduce (212 KB for ResNet-50) that averages over the
    ranks, and, where the step was skipped because its gradient was not finite, the values from before it, so that a
    NaN in one batch does not live on in the statistics. Only BatchNorm's buffers, and not those of synchronised layers,
    which are equal as they come: averaging equal numbers over three ranks may change their last bit. Layers that are in
    evaluation mode when this is made are frozen, and left alone.
    """

    def __init__(self, model: nn.Module, group: Group):
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
        buffers = [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]
        self.buffers: list[Tensor] = buffers
        self.sizes = [buffer.numel() for buffer in buffers]
        self.equal_already = all(is_synchronized(norm) for norm in norms)
        self.group = group
        self.remember()

    def remember(self) -> None:
        """Take the present values as those of the last good step: at the start, and after state was loaded."""
        self.last = self._flat() if self.buffers else None

    @torch.no_grad()
    def settle(self, skipped: Tensor) -> None:
        """skipped: bool scalar on the device, the same on every rank: keep the last good values instead."""
        if self.last is None:
            return
        flat = self._flat() if self.equal_already else all_mean(self._flat(), self.group)
        torch.where(skipped, self.last, flat, out=self.last)
        torch.split_with_sizes_copy(self.last, self.sizes, out=self.buffers)

    def _flat(self) -> Tensor:
        return torch.cat(self.buffers)
