"""Simulated nccl, and the copies of DataParallel.

nccl is gloo that takes tensors of the rank's own GPU only, and is bound to a GPU when a group is
made.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rehearsal.modes import tensors_in
from rehearsal.state import CPU, DeviceError, SimulatedGpus, caller, current
from torch import Tensor

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "send", "recv", "reduce")


class SyncBatchNormKernels:
    """In place of torch's kernels, which exist for GPUs only: the package's own for CPUs."""

    @staticmethod
    def apply(
        x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, eps: float, momentum: float, *_: Any
    ) -> Tensor:
        from imagenet_cls.parallel.sync_bn import _Normalize

        output, new_mean, new_var = _Normalize.apply(x, weight, bias, eps)
        with torch.no_grad():
            for running, new in ((mean, new_mean), (var, new_var)):
                if running is not None:
                    running.mul_(1 - momentum).add_(new, alpha=momentum)
        return output


def distributed_patches(state: SimulatedGpus) -> list[Any]:
    """Patches of torch.distributed."""
    real_init, real_backend, real_new_group = (
        dist.init_process_group,
        dist.get_backend,
        dist.new_group,
    )

    def check_bound(device: torch.device) -> None:
        if device != torch.device("cuda", state.current_index):
            raise DeviceError(
                f"nccl is bound to {device}, and this rank uses cuda:{state.current_index}"
            )

    def init_process_group(
        backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> None:
        if backend == "nccl":
            # Since torch 2.15 a group without device_id is bound to a GPU by the rank.
            state.nccl_device = device_id or torch.device(
                "cuda", kwargs.get("rank", 0) % state.gpus
            )
            check_bound(state.nccl_device)
            backend = "gloo"
        real_init(backend, *args, **kwargs)

    def new_group(*args: Any, backend: Any = None, device_id: Any = None, **kwargs: Any) -> Any:
        if backend != "nccl":
            return real_new_group(*args, **{**kwargs, "backend": backend})
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        check_bound(device_id or torch.device("cuda", local_rank % state.gpus))
        return None

    def get_backend(group: Any = None) -> Any:
        return "nccl" if group is None and state.nccl_device is not None else real_backend(group)

    def checked(collective: Callable) -> Callable:
        name = collective.__name__

        @functools.wraps(collective)
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            tensors = list(tensors_in((args, kwargs)))
            devices = {state.tag(tensor) for tensor in tensors}
            if group is not None and devices - {CPU}:
                raise DeviceError(f"{name} on a CPU group with tensors on {devices} ({caller()})")
            if group is None and state.nccl_device is not None:
                if devices - {torch.device("cuda", state.current_index)}:
                    raise DeviceError(f"{name} on nccl with tensors on {devices} ({caller()})")
                if not all(tensor.is_contiguous() for tensor in tensors):
                    raise DeviceError(
                        f"{name} on nccl with a tensor that is not contiguous ({caller()})"
                    )
            return collective(*args, group=group, **kwargs)

        return call

    return [
        mock.patch.object(dist, "init_process_group", init_process_group),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "get_backend", get_backend),
        mock.patch("torch.nn.modules.batchnorm.sync_batch_norm", SyncBatchNormKernels),
        *(mock.patch.object(dist, name, checked(getattr(dist, name))) for name in COLLECTIVES),
    ]


def data_parallel_patches() -> list[Any]:
    """Patches of what DataParallel calls; replicas run one after the other."""
    comm = torch.nn.parallel.comm
    functions = (broadcast_coalesced, reduce_add_coalesced, scatter, gather)
    return [
        *(mock.patch.object(comm, function.__name__, function) for function in functions),
        mock.patch("torch.nn.parallel.data_parallel.parallel_apply", parallel_apply),
    ]


def parallel_apply(
    modules: Any, inputs: Any, kwargs_tup: Any = None, devices: Any = None
) -> list[Any]:
    """With the autocast that torch gives the threads of replicas: enabled, with its default
    dtype.
    """
    enabled, outputs = torch.is_autocast_enabled("cuda"), []
    for module, args, kwargs, device in zip(modules, inputs, kwargs_tup, devices, strict=True):
        with torch.cuda.device(device), torch.autocast("cuda", enabled=enabled):
            outputs.append(module(*args, **kwargs))
    return outputs


def broadcast_coalesced(tensors: Any, devices: Any, *_: Any) -> list[Any]:
    """The first device gets the tensors themselves, others copies.

    As in torch, a tensor that is the only one of its dtype is not copied if the same device is
    named again.
    """
    counts = Counter(tensor.dtype for tensor in tensors)
    replicas = [tensors]
    for device in (torch.device("cuda", index) for index in devices[1:]):
        copies = []
        for tensor in tensors:
            is_same = counts[tensor.dtype] == 1 and tensor.device == device
            copies.append(tensor.detach() if is_same else tensor.detach().clone().to(device))
        replicas.append(copies)
    return replicas


def reduce_add_coalesced(inputs: Any, destination: Any = None, *_: Any) -> tuple[Tensor, ...]:
    home = current().resolve("cuda" if destination is None else destination)
    return tuple(
        functools.reduce(torch.add, [t.to(home) for t in ts]) for ts in zip(*inputs, strict=True)
    )


def scatter(
    tensor: Tensor, devices: Any, chunk_sizes: Any = None, dim: int = 0, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    chunks = tensor.chunk(len(devices), dim)
    return tuple(c.to(torch.device("cuda", d)) for c, d in zip(chunks, devices, strict=False))


def gather(tensors: Any, dim: int = 0, destination: Any = None, **_: Any) -> Tensor:
    home = current().resolve(destination)
    return torch.cat([tensor.to(home) for tensor in tensors], dim)
