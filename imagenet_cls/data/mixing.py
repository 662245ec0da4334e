"""Mixup and cutmix: images and targets of a micro-batch mixed in pairs, on the device."""

from timm.data.mixup import Mixup
from torch import Tensor

from imagenet_cls.config.schema import MixConfig
from imagenet_cls.errors import Problem


class Mixing:
    """Callable: a micro-batch -> the mixed micro-batch. timm's `Mixup`, which pairs image i with image B - 1 - i.

    Draws from numpy's default generator, on the host: the caller seeds it by (seed, step, micro-batch, rank). With mode
    `batch` nothing waits for a GPU; `pair` and `elem` copy their B ratios to it. Label smoothing is left to the loss
    (`optim.losses`), with the same result.
    """

    def __init__(self, mix: MixConfig, num_classes: int):
        self._mixup = Mixup(
            mixup_alpha=mix.mixup_alpha,
            cutmix_alpha=mix.cutmix_alpha,
            cutmix_minmax=mix.cutmix_minmax,
            prob=mix.prob,
            switch_prob=mix.switch_prob,
            mode=mix.mode,
            label_smoothing=0.0,
            num_classes=num_classes,
        )
        self._off_epoch = mix.off_epoch

    def __call__(self, images: Tensor, targets: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """images: float (B, 3, H, W), B even; **changed in place**. targets: int64 (B,), on the same device.

        Returns images and float32 targets (B, classes) whose rows sum to 1, also where the draw is not to mix. From
        `mix.off_epoch` on, returns its arguments.
        """
        if self._off_epoch is not None and epoch >= self._off_epoch:
            return images, targets
        mixed: tuple[Tensor, Tensor] = self._mixup(images, targets)
        return mixed


def mixes(mix: MixConfig) -> bool:
    """Whether mixup or cutmix is on."""
    return mix.mixup_alpha > 0 or mix.cutmix_alpha > 0 or mix.cutmix_minmax is not None


def build_mixing(mix: MixConfig, num_classes: int) -> Mixing | None:
    """The mixing of a run, or None where neither mixup nor cutmix is on. num_classes: the model's outputs."""
    return Mixing(mix, num_classes) if mixes(mix) else None


def mixing_problems(mix: MixConfig, loader_batch: int, global_batch: int | None = None) -> list[Problem]:
    """The problem of micro-batches with an odd number of images, which mixing can't pair.

    loader_batch: images in a rank's micro-batch. global_batch: of a whole step, to suggest the nearest that work.
    """
    if not mixes(mix) or loader_batch % 2 == 0:
        return []
    remedy = "set train.micro_batch_size to an even divisor of each rank's share of the batch"
    if global_batch is not None:
        micro_batches = global_batch // loader_batch
        nearest = [size * micro_batches for size in (loader_batch - 1, loader_batch + 1) if size > 0]
        remedy = f"use {' or '.join(map(str, nearest))}, or {remedy}"
    text = f"makes micro-batches of {loader_batch} images, and mixup and cutmix need an even number; {remedy}"
    return [Problem("train.global_batch_size", text)]
