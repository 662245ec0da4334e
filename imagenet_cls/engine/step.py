"""One optimizer update: unscale, clip, step, skip gradients that are not finite. Also SAM.

docs/architecture.md lists where a training step waits for the device.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn

from imagenet_cls.config.schema import TrainConfig
from imagenet_cls.parallel.wrap import preserve_values
from imagenet_cls.private_names import norm_of_each, skips_on_device


class Updater:
    """Updates the weights from the gradients in `.grad`.

    The update is skipped if the norm of the gradient is not finite: an element is NaN or infinite,
    or the norm overflows float32. After the all-reduce all ranks have the same gradient, so they
    skip the same updates.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        scaler: torch.amp.GradScaler,
        head_names: Sequence[str] = (),
        keep_gradients: bool = False,
        explain_errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """head_names: the names of the head's parameters. keep_gradients: after a step, set
        gradients to zero in the same memory, not to None; needed if the compiled model returns each
        gradient in the same memory (see `engine.build.keeps_gradients`). explain_errors: the
        context of the optimizer's first step.
        """
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.keep_gradients = keep_gradients
        self.optimizer = optimizer
        self.clip = build_clipper(model, train, head_names)
        self.scaler = scaler
        self.explain_errors = explain_errors
        # Fused optimizers skip without waiting for the device. Whether those of MPS do is untested.
        on_mps = any(parameter.is_mps for parameter in self.parameters)
        self.optimizer_skips = skips_on_device(optimizer) and not on_mps
        self.has_stepped = False

    def allocate_gradients(self) -> None:
        """Set gradients that are kept to zero; call it before the first step."""
        if self.keep_gradients:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)

    def update(self, lr: float) -> tuple[Tensor, Tensor]:
        """Unscale, clip, step, and clear the gradients.

        lr: the learning rate, before the factor `lr_scale` of each parameter group.

        Returns the gradient's global norm before clipping (fp32) and whether the update was skipped
        (bool): scalars on the device.
        """
        self.scaler.unscale_(self.optimizer)
        norm = gradient_norm(self.parameters)
        skipped = (norm - norm) != 0  # NaN - NaN and infinity - infinity are NaN
        self.clip(self.parameters, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        # The first update of a fused SGD allocates uninitialized momentum, which a skip on the
        # device would keep.
        if self.optimizer_skips and self.has_stepped:
            self.optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.found_inf  # type: ignore[attr-defined]
        elif not skipped.item():  # has waited for the device, so the errors are those of the step
            with self.explain_errors():
                self.optimizer.step()
            self.has_stepped = True
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
        return norm, skipped


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients together, with the operators of `nn.utils.get_total_norm`, which
    also converts each norm.
    """
    gradients = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    if len({gradient.dtype for gradient in gradients}) != 1:
        return nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(torch.stack(norm_of_each(gradients)))


def build_clipper(
    model: nn.Module, train: TrainConfig, head_names: Sequence[str] = ()
) -> Callable[[list[nn.Parameter], Tensor], None]:
    """Return a function of the parameters and the global norm of their gradients, which clips the
    gradients in place. A config sets at most one of the three keys.

    `clip_norm` scales the whole gradient down to that norm, `clip_value` clamps each element, and
    `clip_agc` limits the norm of each unit's gradient to that share of the norm of its weights
    (Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization",
    equation 3, from timm). `clip_agc` leaves out the head; timm's script leaves out the last two
    parameters, which are the head's in most models.
    """
    clip_norm = train.clip_norm
    clip_value = train.clip_value
    clip_agc = train.clip_agc
    if clip_norm is not None:
        return lambda parameters, norm: nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    if clip_value is not None:
        return lambda parameters, _: nn.utils.clip_grad_value_(parameters, clip_value)
    if clip_agc is not None:
        body = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in head_names
        ]
        return lambda _, __: adaptive_clip_grad(body, clip_agc)
    return lambda parameters, norm: None


class Sam:
    """Sharpness-aware minimization (SAM): says in which steps it is due, and perturbs the weights
    for the second gradient of these steps.

    Foret et al. 2020, "Sharpness-Aware Minimization for Efficiently Improving Generalization". rho:
    radius of the neighborhood; None: disabled.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rho: float | None = None,
        every_steps: int = 1,
        keep_gradients: bool = False,
    ):
        """keep_gradients: as for `Updater`."""
        self.model = model
        self.optimizer = optimizer
        self.rho = rho
        self.every_steps = every_steps
        self.keep_gradients = keep_gradients

    def due(self, step: int) -> bool:
        """Whether this step takes a second forward and backward pass inside `perturbed_weights`."""
        return self.rho is not None and step % self.every_steps == 0

    @contextmanager
    def perturbed_weights(self) -> Iterator[None]:
        """Inside, the weights are w + rho * g / |g| (arXiv:2010.01412, equation 2, p = 2), g the
        gradient in `.grad`.

        `.grad` is cleared on entry. On exit weights and buffers are restored exactly, so running
        statistics come from the first pass only. Under DistributedDataParallel g is the mean over
        all ranks, where the paper lets each accelerator use its own. A gradient that is zero or not
        finite leaves the weights unchanged.
        """
        assert self.rho is not None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        perturbed = [p for p in parameters if p.grad is not None]
        with preserve_values([*perturbed, *self.model.buffers()]):
            # No variable refers to the gradients, so that `zero_grad` frees them: the second pass
            # allocates gradients of the same size.
            norm = gradient_norm(perturbed)
            has_direction = torch.isfinite(norm) & (norm > 0)
            with torch.no_grad():
                for parameter in perturbed:
                    parameter.add_(
                        torch.where(has_direction, parameter.grad * (self.rho / norm), 0.0)
                    )
            self.optimizer.zero_grad(set_to_none=not self.keep_gradients)
            yield
