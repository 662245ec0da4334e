"""DistributedDataParallel or DataParallel around the model; BatchNorm's running statistics."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from imagenet_cls.errors import ConfigError
from imagenet_cls.parallel.collectives import all_reduce_mean, broadcast_as_bytes
from imagenet_cls.parallel.devices import Devices
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.parallel.sync_bn import is_synchronized
from imagenet_cls.private_names import BatchNormBase, has_reduced_gradients, state_entries
from imagenet_cls.text import join_names


def wrap_ddp(
    model: nn.Module, context: RankContext, mode: str, find_unused: bool = False
) -> nn.Module:
    """The model in DistributedDataParallel if there are several ranks or `mode` is `ddp`, else the
    model itself. find_unused: `parallel.find_unused_parameters`.

    Every rank's parameters and buffers become rank 0's. A collective. `BatchNormStatistics`
    averages the running statistics later. DDP's static_graph is not used: under `no_sync`
    (accumulation) it fails with an internal assert (pytorch#143580).
    """
    if context.world_size == 1 and mode != "ddp":
        return model
    with warnings.catch_warnings():
        # Deprecated since torch 2.13. Its replacement broadcasts buffers once, and gloo does not
        # support every dtype.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[context.device.index] if context.device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused,
        )
    if context.world_size > 1:
        broadcast_buffers(model)
    return wrapped


def broadcast_buffers(model: nn.Module) -> None:
    """Broadcast rank 0's buffers, which DDP does not do with broadcast_buffers=False. A
    collective.
    """
    for buffer in model.buffers():
        received = buffer.detach().contiguous()
        broadcast_as_bytes(received)
        buffer.detach().copy_(received)


def gradient_sync(wrapped: nn.Module, enabled: bool) -> AbstractContextManager:
    """Context of one micro-batch's forward and backward: DDP all-reduces gradients only if
    `enabled`.
    """
    if isinstance(wrapped, DistributedDataParallel) and not enabled:
        return wrapped.no_sync()
    return contextlib.nullcontext()


def rebuild_ddp_buckets(wrapped: nn.Module, forward_backward: Callable[[], object]) -> None:
    """Make DDP rebuild its gradient buckets now, before the first step and before any state is
    loaded.

    Makes two passes, clears the gradients and restores the buffers. See "DDP's buckets" in
    docs/architecture.md. With find_unused_parameters, DDP never rebuilds them. Raises ConfigError
    as `check_gradients_reduced`.
    """
    if not isinstance(wrapped, DistributedDataParallel) or wrapped.find_unused_parameters:
        return
    with preserve_values(wrapped.module.buffers()):
        for _ in range(2):
            forward_backward()
            check_gradients_reduced(wrapped)
            wrapped.zero_grad(set_to_none=True)


def check_gradients_reduced(wrapped: nn.Module) -> None:
    """Raise ConfigError after a backward pass that left parameters without a gradient: under DDP,
    other ranks would wait for it.
    """
    if not isinstance(wrapped, DistributedDataParallel) or has_reduced_gradients(wrapped):
        return
    unused = [
        name.removeprefix("model.")  # `ModelWithLoss` adds it
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    raise ConfigError(
        [
            "parallel.find_unused_parameters: the loss does not use "
            f"{join_names(unused or ['all parameters'])} in every micro-batch, and other ranks "
            "would wait for these gradients; set this key to true, or list parameters that are "
            "never used in model.freeze"
        ]
    )


@contextlib.contextmanager
def preserve_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """On exit the tensors have the values from before."""
    tensors = list(tensors)
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)


def wrap_data_parallel(model: nn.Module, devices: Devices) -> nn.Module:
    """`model`, whose tensors are on the first device, replicated on all devices; the model itself
    if there is one.
    """
    if len(devices.all) < 2:
        return model
    wrapped = AutocastDataParallel(model, list(devices.all))
    wrapped.training = model.training  # a new module is in training mode
    return wrapped


class AutocastDataParallel(nn.DataParallel):
    """torch's DataParallel with the caller's autocast in every replica."""

    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        return super().parallel_apply(
            [with_callers_autocast(replica, "cuda") for replica in replicas], inputs, kwargs
        )


def with_callers_autocast(replica: Callable[..., Tensor], device_type: str) -> Any:
    """A function that calls `replica` in another thread with the autocast of this thread.

    DataParallel enables autocast in the threads of its replicas, but with the default dtype.
    """
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def forward(*arguments: Any, **keywords: Any) -> Tensor:
        with torch.autocast(device_type, dtype, enabled=enabled):
            return replica(*arguments, **keywords)

    return forward


class BatchNormStatistics:
    """BatchNorm's running means and variances, kept equal on all ranks.

    `sync` averages them over the ranks after each optimizer step, in one all-reduce; after a
    skipped step it restores the previous values. If all layers are SyncBN, the values are equal
    already and are not averaged: the mean of three equal numbers may differ in its last bit. Layers
    in evaluation mode when this is constructed are frozen and ignored.
    """

    def __init__(self, model: nn.Module, context: RankContext):
        norms = [
            module
            for module in model.modules()
            if isinstance(module, BatchNormBase) and module.training
        ]
        self.entries = [
            (owner, key)
            for norm in norms
            for owner, key in state_entries(norm)
            if key in ("running_mean", "running_var") and owner[key] is not None
        ]
        self.are_equal = context.world_size == 1 or all(is_synchronized(norm) for norm in norms)
        self.context = context
        self.addresses: list[int] = []
        self.flat: list[Tensor] = []
        self.store_current()

    def flatten(self) -> None:
        """Make the buffers of each dtype views of one tensor. Does so again if the model has
        assigned other tensors to their names.
        """
        buffers = [owner[key] for owner, key in self.entries]
        if [buffer.data_ptr() for buffer in buffers] == self.addresses:
            return
        self.flat = []
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            same = [buffer for buffer in buffers if buffer.dtype is dtype]
            # Kernels of GPUs may expect addresses that are multiples of 16 bytes, so each buffer
            # gets a multiple of 16 elements.
            multiple = 1 if self.context.device.type == "cpu" else 16
            padded = [functional.pad(buffer, (0, -len(buffer) % multiple)) for buffer in same]
            flat = torch.cat(padded)
            self.flat.append(flat)
            for buffer, view in zip(same, flat.split(list(map(len, padded))), strict=True):
                buffer.data = view[: len(buffer)]
        # `flat` keeps the memory, so that no other tensor gets one of these addresses.
        self.addresses = [buffer.data_ptr() for buffer in buffers]

    def store_current(self) -> None:
        """Store the current values, to which `sync` returns after a skipped step. Call it after
        loading state.
        """
        self.flatten()
        self.last = [flat.clone() for flat in self.flat]

    @torch.no_grad()
    def sync(self, skipped: Tensor) -> None:
        """Average over the ranks and store the values; after a skipped step, restore the stored
        ones. skipped: bool scalar on the device, equal on all ranks.
        """
        self.flatten()
        for flat, last in zip(self.flat, self.last, strict=True):
            if not self.are_equal:
                all_reduce_mean(flat, self.context)
            torch.where(skipped, last, flat, out=last)
            flat.copy_(last)
