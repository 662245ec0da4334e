"""One optimizer update: unscale, clip, step, and skip gradients that are not finite. Also autocast and SAM.

All host synchronizations of a training step:
* the first update of a process reads whether the gradient is finite, and so does every update of an optimizer that is
  not fused, is wrapped (Lookahead) or is on MPS;
* `mix.mode` pair and elem copy the mixing ratios to the device, once for each micro-batch;
* `engine.meter` reads losses and accuracies every `log.every_steps` steps;
* with several ranks, `parallel.signals` waits for the flags that the ranks sent about half a second earlier, and every
  `log.every_steps` steps for the time of the slowest rank;
* `parallel.sync_bn` on GPUs: each SyncBatchNorm of torch reads which ranks have images;
* with several ranks, `guards.replicas` reads a hash of each tensor every `parallel.check_every_steps` steps;
* before a save, the same hashes and a check of the weights are read, and the state is copied to the host.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn

from imagenet_cls.checkpoint.optimizer_state import base_optimizer
from imagenet_cls.config.schema import TrainConfig
from imagenet_cls.errors import UsageError


def choose_precision(train: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast, or None for fp32. Raises UsageError for fp16 on a CPU."""
    if train.precision == "auto":
        return fastest_dtype(train, device) if device.type == "cuda" else None
    if train.precision == "fp16" and device.type == "cpu":
        raise UsageError(
            "train.precision=fp16 needs a GPU.\nOn a CPU use train.precision=fp32 (or auto, or bf16)."
        )
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[train.precision]


def fastest_dtype(train: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The dtype that `train.precision=auto` stands for on a GPU.

    GPUs before Ampere (compute capability 8.0) only emulate bf16, and cuDNN has no convolutions for
    it there. From Volta (7.0) on they have fast fp16, whose loss scale SAM can't use.
    """
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    has_fp16 = torch.cuda.get_device_capability(device) >= (7, 0)
    return torch.float16 if has_fp16 and train.sam_rho is None else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """The context of forward and loss."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def set_deterministic(deterministic: bool, device: torch.device) -> None:
    """Choose between the fastest kernels (cuDNN's benchmark mode) and deterministic ones."""
    if device.type != "cuda":
        return  # CPU kernels are deterministic for a given number of threads
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time and only matters for bugs


class Updater:
    """Updates the weights from the gradients in `.grad`.

    A gradient with an element that is NaN or infinite skips the update. After the all-reduce it is non-finite on every
    rank, so all ranks skip the same updates. With `clip_norm`, so does a gradient of finite elements whose norm
    overflows float32.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        scaler: torch.amp.GradScaler,
        head_names: Sequence[str] = (),
        keep_gradients: bool = False,
    ):
        """keep_gradients: after a step, set gradients to zero in the same memory, not to None."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.keep_gradients = keep_gradients
        if keep_gradients:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer = optimizer
        self.clip = clipping(model, train, head_names)
        self.clips_by_norm = train.clip_norm is not None
        self.scaler = scaler
        # Fused kernels read `found_inf` from their optimizer's attribute; a wrapper (Lookahead) does not pass it on.
        # Whether the fused kernels of MPS do so is untested.
        on_mps = any(parameter.is_mps for parameter in self.parameters)
        is_fused = bool(optimizer.defaults.get("fused")) and base_optimizer(optimizer) is optimizer
        self.skips_on_device = is_fused and not on_mps
        self.has_stepped = False

    def update(
        self, lr: float, momentum: float | None = None, with_norm: bool = True
    ) -> tuple[Tensor | None, Tensor]:
        """Unscale, clip, step, and clear the gradients.

        lr: multiplied by the `lr_scale` of each parameter group. momentum: or Adam's first beta; None leaves it
        unchanged. with_norm: whether to compute the norm where clipping does not need it.

        Returns the gradient's global norm before clipping (fp32; None if not computed) and whether the update was
        skipped (bool): scalars on the device.
        """
        self.scaler.unscale_(self.optimizer)
        gradients = [gradient for p in self.parameters if (gradient := p.grad) is not None]
        norm = nn.utils.get_total_norm(gradients) if with_norm or self.clips_by_norm else None
        found_inf = self._found_inf(gradients, norm)
        self.clip(self.parameters, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
            if momentum is not None and "betas" in group:  # as torch's OneCycleLR does
                group["betas"] = (momentum, *group["betas"][1:])
            elif momentum is not None:
                group["momentum"] = momentum
        # The first update of a fused SGD allocates uninitialized momentum, which a skip on the device would keep.
        if self.skips_on_device and self.has_stepped:
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.found_inf  # type: ignore[attr-defined]
        elif not found_inf.item():
            self.optimizer.step()
            self.has_stepped = True
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        return norm, found_inf.bool()

    def _found_inf(self, gradients: list[Tensor], norm: Tensor | None) -> Tensor:
        """1 where the update has to be skipped, else 0: a float32 scalar on the device."""
        if self.clips_by_norm:
            assert norm is not None
            return (~torch.isfinite(norm)).float()
        if self.scaler.is_enabled():  # `unscale_` has checked every element
            (found_inf,) = self.scaler._found_inf_per_device(self.optimizer).values()
            return found_inf
        return any_nonfinite(gradients)


def any_nonfinite(tensors: list[Tensor]) -> Tensor:
    """1 if an element of a tensor is NaN or infinite, else 0: a float32 scalar on the device of the tensors.

    float32, float64 and float16 on CPUs and GPUs by the kernel of torch's GradScaler, with a scale of 1, all tensors of
    a dtype at once; all others one by one.
    """
    device = tensors[0].device
    found, scale = torch.zeros((), device=device), torch.ones((), device=device)
    dtypes = {tensor.dtype for tensor in tensors}
    for dtype in dtypes:
        group = (
            tensors if len(dtypes) == 1 else [tensor for tensor in tensors if tensor.dtype == dtype]
        )
        if device.type in ("cpu", "cuda") and dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
        ):
            torch._amp_foreach_non_finite_check_and_unscale_(group, found, scale)
        else:
            found = torch.maximum(
                found, ~torch.stack([tensor.isfinite().all() for tensor in group]).all()
            )
    return found


def clipping(
    model: nn.Module, train: TrainConfig, head_names: Sequence[str] = ()
) -> Callable[[list[nn.Parameter], Tensor | None], None]:
    """A function of the parameters and of their gradients' global norm that clips the gradients in place.

    `clip_agc`: Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization", equation 3,
    from timm, without the head; timm's script leaves out the last two parameters instead.
    """
    if (clip_norm := train.clip_norm) is not None:
        return lambda parameters, norm: nn.utils.clip_grads_with_norm_(
            parameters, clip_norm, cast(Tensor, norm)
        )
    if (clip_value := train.clip_value) is not None:
        return lambda parameters, _: nn.utils.clip_grad_value_(parameters, clip_value)
    if (clip_agc := train.clip_agc) is not None:
        heads = tuple(f"{name}." for name in head_names)
        excluded = {
            parameter
            for name, parameter in model.named_parameters()
            if f"{name}.".startswith(heads)
        }
        return lambda parameters, _: adaptive_clip_grad(
            [p for p in parameters if p not in excluded], clip_agc
        )
    return lambda parameters, norm: None


class Sam:
    """Sharpness-aware minimization (Foret et al. 2020). rho: radius of the neighborhood; None: disabled."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rho: float | None = None,
        every_steps: int = 1,
        keep_gradients: bool = False,
    ):
        """keep_gradients: as for `Updater`."""
        self.model, self.optimizer = model, optimizer
        self.rho, self.every_steps = rho, every_steps
        self.keep_gradients = keep_gradients

    def due(self, step: int) -> bool:
        """Whether this step takes a second forward and backward pass inside `perturbed_weights`."""
        return self.rho is not None and step % self.every_steps == 0

    @contextmanager
    def perturbed_weights(self) -> Iterator[None]:
        """Inside, the weights are w + rho * g / |g| (arXiv:2010.01412, equation 2, p = 2), g the gradient in `.grad`.

        `.grad` is cleared on entry. On exit weights and buffers are restored exactly. Under DistributedDataParallel g
        is the mean over all ranks, where the paper lets each accelerator use its own. A gradient that is zero or not
        finite leaves the weights unchanged.
        """
        assert self.rho is not None
        perturbed = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        tensors = [*perturbed, *self.model.buffers()]
        values = [tensor.detach().clone() for tensor in tensors]
        gradients = [p.grad for p in perturbed if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        has_direction = torch.isfinite(norm) & (norm > 0)
        with torch.no_grad():
            for parameter, gradient in zip(perturbed, gradients, strict=True):
                parameter.add_(torch.where(has_direction, gradient * (self.rho / norm), 0.0))
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
