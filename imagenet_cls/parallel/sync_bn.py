"""SyncBatchNorm: torch's on GPUs, and one of this package on CPUs.

torch's has no implementation for CPU tensors.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.process_group import RankContext
from imagenet_cls.private_names import BatchNormBase, change_class


def synchronize_batch_norm(model: nn.Module, context: RankContext) -> nn.Module:
    """Make every BatchNorm of `model` a SyncBN layer, before the model is wrapped. With a single
    rank: no change.

    Changes the model in place and returns it, or the new layer if the model is a BatchNorm itself.
    Names and tensors stay. Raises UsageError for a BatchNorm with another forward, such as timm's
    split BatchNorm.
    """
    if context.world_size == 1:
        return model
    from timm.layers import BatchNormAct2d, convert_sync_batchnorm  # slow to import

    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, BatchNormBase) and not is_synchronized(layer)
    ]
    for layer in layers:
        if type(layer).forward not in (BatchNormBase.forward, BatchNormAct2d.forward):
            raise UsageError(
                f"parallel.sync_bn: {type(layer).__name__} can't be synchronized, since it "
                "overrides forward.",
                "Set parallel.sync_bn to false, or use a model with plain BatchNorm layers.",
            )
    if context.device.type == "cuda":
        return convert_sync_batchnorm(model)
    for layer in layers:
        if isinstance(layer, BatchNormAct2d):
            change_class(layer, CpuSyncBatchNormAct)
        else:
            change_class(layer, CpuSyncBatchNorm)
    return model


def is_synchronized(layer: nn.Module) -> bool:
    return isinstance(layer, CpuSyncBatchNorm | nn.SyncBatchNorm)


class CpuSyncBatchNorm(BatchNormBase):
    """BatchNorm over (N, C, ...) of any floating dtype, with the statistics of all ranks in
    training.

    Ranks may have different numbers of images, at least one each. In evaluation it is plain
    BatchNorm. Formulas: Ioffe and Szegedy, 2015 (arXiv:1502.03167), section 3; statistics are
    computed in at least float32.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (N, C, ...), got {input.dim()} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        output, mean, variance = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            # Without a momentum: the mean over all batches so far.
            exponential_average_factor = self.momentum
            if exponential_average_factor is None:
                exponential_average_factor = 1.0 / float(self.num_batches_tracked)
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                assert running is not None
                running.mul_(1 - exponential_average_factor)
                running.add_(new.to(running.dtype), alpha=exponential_average_factor)
        return output


class CpuSyncBatchNormAct(CpuSyncBatchNorm):
    """CpuSyncBatchNorm for timm's BatchNormAct2d, with its dropout and activation."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


class _Normalize(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, over all ranks; a collective, forward
    and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output and, for the running statistics, all ranks' mean (C,) and unbiased
        variance (C,).
        """
        channels = input.shape[1]
        shape = _per_channel(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, [0, *range(2, input.ndim)], correction=0)
        count = mean.new_full((1,), input.numel() / channels)
        own = torch.cat([mean, variance, count])
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        # Merges means and variances; the difference of sums of squares would suffer from
        # cancellation.
        means, variances, counts = torch.stack(ranks).split([channels, channels, 1], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        inverse_std = (variance + eps).rsqrt()
        ctx.save_for_backward(input, weight, bias, mean, inverse_std, total)
        output = (wide - mean.view(shape)) * inverse_std.view(shape)
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        unbiased = variance * (total / (total - 1).clamp(min=1))
        ctx.mark_non_differentiable(mean, unbiased)
        return output.to(input.dtype), mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the sum of all ranks' losses for this rank's input; this rank's share for
        weight and bias.
        """
        input, weight, bias, mean, inverse_std, total = ctx.saved_tensors
        shape = _per_channel(input)
        others = [0, *range(2, input.ndim)]
        grad = grad.to(mean.dtype)
        normalized = (input.to(mean.dtype) - mean.view(shape)) * inverse_std.view(shape)
        sums = torch.stack([grad.sum(others), (grad * normalized).sum(others)])
        # DDP reduces the gradients of weight and bias.
        grad_bias = None if bias is None else sums[0].to(bias.dtype)
        grad_weight = None if weight is None else sums[1].to(weight.dtype)
        reduced = sums.clone()
        dist.all_reduce(reduced)
        mean_grad, mean_projection = reduced / total
        scale = inverse_std if weight is None else inverse_std * weight
        centered = grad - mean_grad.view(shape) - normalized * mean_projection.view(shape)
        return (centered * scale.view(shape)).to(input.dtype), grad_weight, grad_bias, None


def _per_channel(input: Tensor) -> list[int]:
    """The shape with which a tensor (C,) broadcasts over `input`'s channels."""
    return [1, -1, *[1] * (input.ndim - 2)]
