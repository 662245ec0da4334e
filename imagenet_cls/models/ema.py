"""The exponential moving average of a model's weights, with the arithmetic of timm's ModelEmaV3.

All floating-point entries of the state dict are averaged, BatchNorm's running statistics too.
Integer entries (BatchNorm's `num_batches_tracked`) are copied. The decay of an update is a pure
function of the step.

`ema.half_life_images` is the number of images after which a weight counts half in the average,
whatever the batch and the update interval. For a published decay d of updates every n images it is
n * log(0.5) / log(d): DeiT's 0.99996 at each step of 1024 images is 17.7 million.

torchvision's reference script multiplies 1 - decay by batch (of all ranks) * `--model-ema-steps` /
epochs: its 0.99998 with 1024 images, every 32 steps and 600 epochs is a decay of 0.998908, a
half-life of 20.8 million images. It updates after the first batch of an epoch and every 32nd from
there, and copies the weights during warm-up; here the first update copies the weights.
"""

from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from imagenet_cls.config.schema import EmaConfig
from imagenet_cls.private_names import copy_each_, lerp_each_, state_entries


class ModelEma:
    """The average of a model's weights. module: the averaged model, in evaluation mode; None where
    EMA is off.
    """

    def __init__(self, average: ModelEmaV3 | None = None, every_steps: int = 1):
        self.average = average
        self.every_steps = every_steps
        self.model: nn.Module | None = None

    @property
    def module(self) -> nn.Module | None:
        return None if self.average is None else self.average.module

    def set(self, model: nn.Module) -> None:
        """Copy the model's weights."""
        if self.average is not None:
            self.average.set(model)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """average = d * average + (1 - d) * model, every `every_steps` steps. Does nothing where
        EMA is off.

        model: without its DDP wrapper; it may assign other tensors to its parameters and buffers
        between two updates. step: index of the optimizer step just made, from 0. For update n = 1,
        2, ... d is 0 for n = 1, then `ema_decay`, or with warm-up min(ema_decay, 1 - n ** (-2/3)),
        timm's with warmup_gamma 1 and warmup_power 2/3.
        """
        if self.average is None or (step + 1) % self.every_steps:
            return
        update = (step + 1) // self.every_steps
        if model is not self.model:
            self.model = model
            self.floats: list[Pair] = []
            self.others: list[Pair] = []
            for (average, key), (current, _) in zip(
                state_entries(self.average.module), state_entries(model), strict=True
            ):
                if average[key] is not None:
                    is_float = average[key].is_floating_point()
                    (self.floats if is_float else self.others).append((average, current, key))
        lerp_each_(*tensors_of_pairs(self.floats), 1.0 - self.average.get_decay(update))
        if self.others:
            copy_each_(*tensors_of_pairs(self.others))


# A dictionary of the average, the model's, and the key in both.
Pair = tuple[dict[str, Any], dict[str, Any], str]


def tensors_of_pairs(pairs: list[Pair]) -> tuple[list[Tensor], list[Tensor]]:
    averages = [average[key] for average, _, key in pairs]
    return averages, [model[key] for _, model, key in pairs]


def build_ema(model: nn.Module, config: EmaConfig, global_batch_size: int) -> ModelEma:
    """The average of `model`, which starts as a copy. model: on its device, in its memory format,
    not yet compiled.
    """
    decay = ema_decay(config, global_batch_size)
    if decay is None:
        return ModelEma()
    average = ModelEmaV3(model, decay=decay, use_warmup=config.warmup)
    # For bfloat16 weights timm rounds at random, with a generator whose state no checkpoint has.
    average.stochastic_rounding = False
    return ModelEma(average, config.every_steps)


def ema_decay(config: EmaConfig, global_batch_size: int) -> float | None:
    """The decay of each update; None where EMA is off."""
    if config.half_life_images is None:
        return config.decay
    return 0.5 ** (global_batch_size * config.every_steps / config.half_life_images)
