"""The exponential moving average of a model's weights.

Owns when the average is updated and with which decay, both as pure functions of the step, so that a resumed run needs
the averaged weights and the step and nothing else. The arithmetic is timm's ModelEmaV3. Called by `engine.build` (to
make it), `engine.train` (after each optimizer step) and `engine.checkpoint` (its `module` is saved as
`ema.safetensors`).

What is averaged: all floating-point entries of the state dict, so BatchNorm's running statistics too, by the same
formula. Integer entries (BatchNorm's `num_batches_tracked`) are copied.

A decay means something for one batch size and one rhythm only; `ema.half_life_images` means the same for all.
`half_life_of` and `torchvision_decay` turn published decays into it.
"""

import math

from timm.utils import ModelEmaV3
from torch import nn

from imagenet_cls.config.schema import EmaConfig


class ModelEma(ModelEmaV3):
    """timm's average with the config's rhythm. The averaged model is `module`, in evaluation mode, on the model's
    device."""

    def __init__(self, model: nn.Module, decay: float, ema: EmaConfig):
        super().__init__(model, decay=decay, use_warmup=ema.warmup)
        self.every_steps = ema.every_steps
        # For bfloat16 weights timm draws random roundings from a generator of its own, which a resumed run would lack.
        self.stochastic_rounding = False


def build_ema(model: nn.Module, ema: EmaConfig, global_batch_size: int) -> ModelEma | None:
    """A copy of `model` to average into, or None where the config keeps no average.

    model: on its device, in its memory format and with its starting weights, but not yet compiled; wrapped or not.
    """
    decay = ema_decay(ema, global_batch_size)
    return None if decay is None else ModelEma(model, decay, ema)


def ema_decay(ema: EmaConfig, global_batch_size: int) -> float | None:
    """The share of the average that stays at each update; None where the config keeps no average."""
    if ema.half_life_images is None:
        return ema.decay
    return 0.5 ** (global_batch_size * ema.every_steps / ema.half_life_images)


def half_life_of(decay: float, images_per_update: int) -> float:
    """`ema.half_life_images` for a published decay: images after which a weight counts half in the average.

    decay: more than 0 and less than 1. images_per_update: the source's global batch times the steps between two
    updates. DeiT's 0.99996 at each step of 1024 images is 17.7 million.
    """
    return images_per_update * math.log(0.5) / math.log(decay)


def torchvision_decay(decay: float, global_batch_size: int, every_steps: int, epochs: int) -> float:
    """The decay that torchvision's reference script makes of its `--model-ema-decay`.

    It takes 1 - decay times batch (of all ranks) * `--model-ema-steps` / epochs, and at most 1. So 0.99998 with 1024
    images, every 32 steps and 600 epochs becomes a decay of 0.998908, a half-life of 20.8 million images:
    `half_life_of(torchvision_decay(0.99998, 1024, 32, 600), 1024 * 32)`.

    Two habits of that script are not followed: it updates behind the first batch of an epoch and every 32nd from there
    (here: every 32nd step of the run), and copies the weights as long as its learning rate warms up (here: what was
    there at the start fades, to 7e-12 of the average in those 600 epochs of ImageNet).
    """
    return 1.0 - min(1.0, (1.0 - decay) * global_batch_size * every_steps / epochs)


def update_ema(ema: ModelEma, model: nn.Module, step: int) -> None:
    """Move the average towards `model`: average = d * average + (1 - d) * model.

    model: the bare model that is trained (not its DDP wrapper). step: number of the optimizer step that was just made,
    from 0, the same number that the schedule got. Update n = 1, 2, ... follows every `every_steps` steps; d is 0 for n
    = 1 (the average starts as a copy), then `ema_decay`, or with warm-up min(ema_decay, 1 - n ** (-2/3)), which is
    timm's with inv_gamma 1.
    """
    if (step + 1) % ema.every_steps == 0:
        ema.update(model, step=(step + 1) // ema.every_steps)
