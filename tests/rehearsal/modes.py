"""The two modes through which torch's calls pass: operators, and functions that Python code
calls.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rehearsal.state import ANY, CPU, DeviceError, SimulatedGenerator, SimulatedGpus, caller
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that take tensors of several devices, or do not look at them.
ANY_DEVICES = {
    *("copy_", "_to_copy", "_local_scalar_dense", "set_", "detach", "resize_"),
    "_has_compatible_shallow_copy_type",
}
# A CPU tensor without dimensions may stand beside CUDA tensors in elementwise operators, not here.
SAME_DEVICE = {
    *("cat", "stack", "index_add", "index_add_", "scatter", "scatter_", "gather", "convolution"),
    *("addmm", "mm", "bmm", "native_batch_norm", "embedding", "nll_loss_forward"),
    *("_fused_sgd_", "_fused_adamw_", "_fused_adam_", "_foreach_lerp_", "split_with_sizes_copy"),
    *("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"),
}
# Indices may be on the CPU.
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put"}
# The host waits for their result.
WAITS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"),
    "is_nonzero",
}
MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv"}
# From the documentation of torch.use_deterministic_algorithms.
NONDETERMINISTIC = {
    *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "avg_pool3d_backward", "fractional_max_pool2d_backward"),
    *(f"reflection_pad{n}d_backward" for n in (1, 2, 3)),
    *(
        f"upsample_{kind}_backward"
        for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    ),
    *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
    *("grid_sampler_2d_backward", "grid_sampler_3d_backward", "nll_loss2d_forward"),
    *("histc", "scatter_reduce", "put_", "median", "max_unpool2d"),
}


def tensors_in(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class OperatorMode(TorchDispatchMode):
    """Sees every operator, also in the backward pass. Raises what CUDA would, and counts host
    waits.
    """

    def __init__(self, state: SimulatedGpus):
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state, kwargs, name = self.state, dict(kwargs or {}), func._opname
        requested = kwargs.get("device")
        if requested is not None:
            requested = state.resolve(requested)
            kwargs["device"] = CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        tensors = list(tensors_in((args, kwargs)))
        device = self.common_device(name, args, tensors)
        if device.type == "cuda":
            self.check(name, tensors)
        result = func(*args, **kwargs)
        if requested is not None and requested.type == "cuda":
            device = requested
        if not tensors:
            device = requested or CPU
            in_backward = torch._C._current_graph_task_id() != -1
            if device == CPU and (state.python_calls == 0 or in_backward):
                device = ANY  # made in C++, for an undefined gradient or a bucket of DDP
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        new = [t for t in tensors_in(result) if t.untyped_storage()._cdata not in known]
        for tensor in new:
            state.set_tag(tensor, device)
        returns_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if device.type == "cuda" and not returns_view:
            reads = [tensor for tensor in tensors if state.tag(tensor).type == "cuda"]
            state.launch(name, device, reads, [*self.written(func, args, kwargs), *new])
        return result

    def written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The arguments that an operator changes in place."""
        arguments = func._schema.arguments
        values = dict(zip([a.name for a in arguments], args, strict=False)) | kwargs
        changed = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        return [tensor for name in changed for tensor in tensors_in(values.get(name))]

    def common_device(self, name: str, args: Any, tensors: list[Tensor]) -> torch.device:
        """The device of all tensors of an operator. Raises DeviceError if there are several."""
        tag = self.state.tag
        if name in ANY_DEVICES:
            return tag(tensors[0]) if tensors else CPU
        if name in INDEXING:
            indices = {id(tensor) for tensor in tensors_in(args[1])}
            tensors = [t for t in tensors if id(t) not in indices or tag(t) != CPU]
        counted = [t for t in tensors if tag(t) != CPU or t.dim() > 0 or name in SAME_DEVICE]
        devices = {tag(tensor) for tensor in counted} - {ANY}
        if len(devices) > 1:
            found = ", ".join(f"{tag(tensor)} {tuple(tensor.shape)}" for tensor in tensors[:6])
            raise DeviceError(
                f"{name}: Expected all tensors to be on the same device, but found "
                f"{found} ({caller()})"
            )
        if devices:
            return devices.pop()
        return ANY if any(tag(tensor) == ANY for tensor in tensors) else CPU

    def check(self, name: str, tensors: list[Tensor]) -> None:
        """Check an operator on a GPU: its kernel, its determinism, and whether the host waits."""
        state = self.state
        has_bf16 = torch.cuda.get_device_properties(0).major >= 8
        if name == "convolution" and tensors[0].dtype == torch.bfloat16 and not has_bf16:
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        is_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
        if name in WAITS or (name in ("index", "index_put_") and is_mask):
            state.count_wait(name)
        if name == "copy_" and state.tag(tensors[0]) != state.tag(tensors[1]):
            state.count_copy(tensors[1], state.tag(tensors[1]), state.tag(tensors[0]))
        if name in MATRIX_PRODUCTS and state.deterministic_cublas is None:
            config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
            state.deterministic_cublas = config in (":4096:8", ":16:8")
        if torch.are_deterministic_algorithms_enabled():
            if name in NONDETERMINISTIC:
                raise RuntimeError(f"{name}_cuda does not have a deterministic implementation")
            if name in MATRIX_PRODUCTS and not state.deterministic_cublas:
                raise RuntimeError("CUBLAS_WORKSPACE_CONFIG was not set when cuBLAS was used first")


class FunctionMode(TorchFunctionMode):
    """What Python code sees of tensors and devices."""

    def __init__(self, state: SimulatedGpus):
        super().__init__()
        self.state = state
        device = state.device
        is_cuda: Any = Tensor.is_cuda
        is_cpu: Any = Tensor.is_cpu
        self.handlers: dict[Callable, Callable] = {
            Tensor.device.__get__: device,
            is_cuda.__get__: lambda tensor: device(tensor).type == "cuda",
            is_cpu.__get__: lambda tensor: device(tensor).type == "cpu",
            Tensor.get_device: lambda tensor: -1 if device(tensor) == CPU else device(tensor).index,
            Tensor.grad.__get__: self.grad,
            Tensor.to: self.to,
            Tensor.cpu: lambda tensor, *_, **__: self.move(tensor, CPU),
            Tensor.cuda: self.cuda,
            Tensor.numpy: functools.partial(self.on_host, Tensor.numpy),
            Tensor.__array__: functools.partial(self.on_host, Tensor.__array__),
            Tensor.tolist: self.tolist,
            Tensor.pin_memory: lambda tensor, *_, **__: state.pin(tensor),
            Tensor.is_pinned: lambda tensor, *_, **__: state.is_pinned(tensor),
            Tensor.__deepcopy__: self.deepcopy,
            Tensor.new_tensor: self.new_tensor,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.handlers:
            return self.handlers[func](*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and func is not torch.Generator:
            device = self.state.resolve(device)
            kwargs["device"] = CPU
        if isinstance(generator := kwargs.get("generator"), SimulatedGenerator):
            first = next(tensors_in(args), None)
            home = device or (CPU if first is None else self.state.device(first))
            if generator.home != home:
                raise DeviceError(
                    f"{func.__name__}: a generator of {generator.home} for a tensor of {home} "
                    f"({caller()})"
                )
        result = self.call(func, *args, **kwargs)
        if device is not None:
            known = {tensor.untyped_storage()._cdata for tensor in tensors_in(args)}
            for tensor in tensors_in(result):
                is_argument = tensor.untyped_storage()._cdata in known
                if is_argument and self.state.tag(tensor) != device:
                    raise DeviceError(
                        f"{func} returned its argument for another device ({caller()})"
                    )
                self.state.set_tag(tensor, device)
        return result

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of torch, whose factories are then not taken for those of C++."""
        self.state.python_calls += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.state.python_calls -= 1

    def move(
        self, tensor: Tensor, device: torch.device, non_blocking: bool = False, **options: Any
    ) -> Tensor:
        state, source = self.state, self.state.device(tensor)
        if device == source:
            return self.call(Tensor.to, tensor, device=CPU, **options)
        state.count_copy(tensor, source, device)
        moved = self.call(Tensor.to, tensor, **{**options, "device": CPU, "copy": True})
        state.set_tag(moved, device)
        if device.type == "cuda":
            state.launch("copy", device, [tensor] if source.type == "cuda" else [], [moved])
        return moved

    def to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to(device, dtype, non_blocking, copy)`, `to(dtype, ...)` or `to(other, ...)`."""
        options, positional = dict(kwargs), list(args)
        device, other = options.pop("device", None), options.pop("other", None)
        if positional and isinstance(positional[0], Tensor):
            other = positional.pop(0)
        if other is not None:
            device, options["dtype"] = self.state.device(other), other.dtype
        elif positional and (
            positional[0] is None or isinstance(positional[0], str | int | torch.device)
        ):
            device = positional.pop(0)
        if positional and (positional[0] is None or isinstance(positional[0], torch.dtype)):
            options["dtype"] = positional.pop(0)
        options |= dict(zip(("non_blocking", "copy"), positional, strict=False))
        options = {key: value for key, value in options.items() if value is not None}
        target = self.state.device(tensor) if device is None else self.state.resolve(device)
        return self.move(tensor, target, **options)

    def cuda(self, tensor: Tensor, device: Any = None, **_: Any) -> Tensor:
        return self.move(tensor, self.state.resolve("cuda" if device is None else device))

    def grad(self, tensor: Tensor) -> Tensor | None:
        gradient = Tensor.grad.__get__(tensor)
        if gradient is not None and self.state.tag(tensor) != CPU:
            # The buckets of DDP, of which gradients are views, are made in C++.
            self.state.set_tag(gradient, self.state.tag(tensor))
        return gradient

    def on_host(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = self.state.device(tensor)
        if device.type == "cuda":
            raise TypeError(f"can't convert {device} device type tensor to numpy ({caller()})")
        return func(tensor, *args, **kwargs)

    def tolist(self, tensor: Tensor) -> Any:
        if self.state.device(tensor).type == "cuda":
            self.state.count_wait("tolist")
        return Tensor.tolist(tensor)

    def deepcopy(self, tensor: Tensor, memo: Any) -> Tensor:
        copied = self.call(Tensor.__deepcopy__, tensor, memo)
        self.state.set_tag(copied, self.state.tag(tensor))
        return copied

    def new_tensor(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = self.state.resolve(kwargs.pop("device", None) or self.state.device(tensor))
        made = self.call(Tensor.new_tensor, tensor, *args, **kwargs)
        self.state.set_tag(made, device)
        return made
