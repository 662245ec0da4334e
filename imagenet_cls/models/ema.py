"""The exponential moving average of a model's weights.

Owns when the average is updated and with which decay, both as pure functions of the step, so that a resumed run needs
the averaged weights and the step and nothing else. The arithmetic is timm's ModelEmaV3. Called by `engine.build` (to
make it), `engine.train` (after each optimizer step) and `engine.checkpoint` (its `module` is saved as
`ema.safetensors`).

What is averaged: all floating-point entries of the state dict, so BatchNorm's running statistics too, by the same
formula. Integer entries (BatchNorm's `num_batches_tracked`) are copied.
"""

from timm.utils import ModelEmaV3
from torch import nn

from imagenet_cls.config.schema import EmaConfig


class ModelEma(ModelEmaV3):
    """timm's average with the config's rhythm. The averaged model is `module`, in evaluation mode, on the model's
    device."""

    def __init__(self, model: nn.Module, ema: EmaConfig):
        super().__init__(model, decay=ema.decay, use_warmup=ema.warmup)
        self.every_steps = ema.every_steps
        # For bfloat16 weights timm draws random roundings from a generator of its own, which a resumed run would lack.
        self.stochastic_rounding = False


def build_ema(model: nn.Module, ema: EmaConfig) -> ModelEma | None:
    """A copy of `model` to average into, or None where the config keeps no average.

    model: on its device, in its memory format and with its starting weights, but not yet compiled; wrapped or not.
    """
    return None if ema.decay is None else ModelEma(model, ema)


def update_ema(ema: ModelEma, model: nn.Module, step: int) -> None:
    """Move the average towards `model`: average = d * average + (1 - d) * model.

    model: the bare model that is trained (not its DDP wrapper). step: number of the optimizer step that was just made,
    from 0, the same number that the schedule got. Update n = 1, 2, ... follows every `every_steps` steps; d is 0 for n
    = 1 (the average starts as a copy), then `decay`, or with warm-up min(decay, 1 - n ** (-2/3)), which is timm's with
    inv_gamma 1.
    """
    if (step + 1) % ema.every_steps == 0:
        ema.update(model, step=(step + 1) // ema.every_steps)
