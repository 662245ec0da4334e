"""A simulated GPU: real numbers, computed on the CPU, and the rules of CUDA.

Inside `simulated_gpus` the whole program runs as if torch had GPUs. An error is raised for tensors
on several devices, a race between streams, an operator without a deterministic kernel, a generator
of another device, and a collective of nccl on another GPU than the group's. Host waits are counted.

Not simulated: the kernels of a GPU (cuDNN, torch's SyncBatchNorm), torch.compile, CUDA graphs,
memory, speed, and the random numbers of a GPU.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from rehearsal.collectives import data_parallel_patches, distributed_patches
from rehearsal.modes import FunctionMode, OperatorMode
from rehearsal.state import (
    SimulatedEvent,
    SimulatedGenerator,
    SimulatedGpus,
    SimulatedStream,
    activate,
)
from torch import Tensor


class SimulatedAutocast(torch.amp.autocast_mode.autocast):
    """CPU autocast under the name of CUDA's, whose default dtype is float16."""

    def __init__(
        self, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ):
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.float16 if dtype is None else dtype
        super().__init__(device_type, dtype, enabled, cache_enabled)


@contextmanager
def simulated_gpus(gpus: int = 1, major: int = 9) -> Iterator[SimulatedGpus]:
    """Inside, torch has `gpus` simulated GPUs of compute capability `major`.0."""
    state = SimulatedGpus.__new__(SimulatedGpus)
    activate(state)
    state.__init__(gpus)  # type: ignore[misc]
    functions, operators = FunctionMode(state), OperatorMode(state)
    real_backward = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # torch disables it during a call; Python code in the backward pass needs it
        with functions:
            return real_backward(*args, **kwargs)

    patches = [
        *cuda_patches(state, major),
        *tensor_patches(state),
        *data_parallel_patches(),
        *distributed_patches(state),
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
    ]
    try:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(operators)
            stack.enter_context(functions)
            yield state
    finally:
        torch.use_deterministic_algorithms(False)
        activate(None)


def cuda_patches(state: SimulatedGpus, major: int) -> list[Any]:
    """Patches of torch.cuda and torch.accelerator."""
    properties = types.SimpleNamespace(
        name="Simulated GPU",
        total_memory=80 << 30,
        major=major,
        minor=0,
        uuid="simulated",
        multi_processor_count=132,
        L2_cache_size=50 << 20,
    )

    @contextmanager
    def use_device(device: Any) -> Iterator[None]:
        before = state.current_index
        set_device(device)
        try:
            yield
        finally:
            state.current_index = before

    @contextmanager
    def use_stream(stream: SimulatedStream) -> Iterator[None]:
        index = stream.device.index
        before, state.current_streams[index] = state.current_streams[index], stream
        try:
            yield
        finally:
            state.current_streams[index] = before

    def set_device(device: Any) -> None:
        state.current_index = state.resolve(device).index

    def nothing(*_: Any, **__: Any) -> None:
        pass

    shared = {
        "is_available": lambda: True,
        "device_count": lambda: state.gpus,
        "synchronize": nothing,
        "current_stream": lambda device=None: state.current_stream(device),
    }
    cuda = shared | {
        "_lazy_init": nothing,
        "init": nothing,
        "is_initialized": lambda: True,
        "current_device": lambda: state.current_index,
        "set_device": set_device,
        "device": use_device,
        "stream": use_stream,
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        "default_generators": state.generators,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "is_bf16_supported": lambda including_emulation=True: major >= 8 or including_emulation,
        "max_memory_allocated": lambda *_: 1 << 30,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda value, *_: torch.set_rng_state(value),
    }
    accelerator = shared | {
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: state.current_index,
        "set_device_index": set_device,
        "device_index": use_device,
    }
    return [
        *(mock.patch.object(torch.cuda, name, value) for name, value in cuda.items()),
        *(mock.patch.object(torch.accelerator, name, value) for name, value in accelerator.items()),
    ]


def tensor_patches(state: SimulatedGpus) -> list[Any]:
    """Patches of autocast, generators, and functions that look at the real device of a tensor."""
    is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    real_kind = {"cuda": "cpu"}
    # It compares devices of the forward pass, inside a call of torch, with those of the backward
    # pass.
    checkpoint_metadata = "torch.utils.checkpoint._allowed_determinism_checks_to_fns"
    real_grouping = torch.utils._foreach_utils._group_tensors_by_device_and_dtype

    def group_tensors(tensorlists: Any, with_indices: bool = False) -> Any:
        """C++ groups by the real device; the keys get the simulated ones."""
        groups = {}
        for (_, dtype), found in real_grouping(tensorlists, with_indices).items():
            first = next(tensor for tensor in found[0][0] if tensor is not None)
            groups[state.device(first), dtype] = found
        return groups

    importers = [
        module
        for module in list(sys.modules.values())
        if getattr(module, real_grouping.__name__, None) is real_grouping
    ]

    def enabled(kind: str = "cuda") -> bool:
        return is_enabled(real_kind.get(kind, kind))

    def dtype_of(kind: str) -> torch.dtype:
        return get_dtype(real_kind.get(kind, kind))

    pin: Callable[..., Tensor] = lambda tensor, *_: state.pin(tensor)  # noqa: E731
    return [
        mock.patch.object(torch, "Generator", SimulatedGenerator),
        mock.patch.object(torch, "autocast", SimulatedAutocast),
        mock.patch.object(torch.amp, "autocast", SimulatedAutocast),
        mock.patch.object(torch, "is_autocast_enabled", enabled),
        mock.patch.object(torch, "get_autocast_dtype", dtype_of),
        mock.patch.dict(checkpoint_metadata, default=lambda tensor: (tensor.shape, tensor.dtype)),
        mock.patch.object(Tensor, "pin_memory", pin),
        mock.patch.object(
            Tensor, "record_stream", lambda tensor, stream: state.record_stream(tensor, stream)
        ),
        *(mock.patch.object(module, real_grouping.__name__, group_tensors) for module in importers),
    ]
