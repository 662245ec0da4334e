"""The average over 100 updates against timm's ModelEmaV3 and against the one of torchvision's reference script."""

import math
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

from imagenet_cls.config.schema import EmaConfig
from imagenet_cls.models.ema import build_ema

STEPS = 100


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5)).double()


def train_step(model: nn.Module, step: int) -> None:
    """Other weights and running statistics after each step, the same each time."""
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(4, 3, 8, 8, generator=generator).double())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def differences(ours: nn.Module, theirs: nn.Module) -> dict[str, float]:
    """Of every floating-point entry of the state, statistics included."""
    other = theirs.state_dict()
    floats = {key: value for key, value in ours.state_dict().items() if value.is_floating_point()}
    assert len(floats) == 8
    return {key: (value - other[key]).abs().max().item() for key, value in floats.items()}


@pytest.mark.parametrize("every_steps", [1, 4])
@pytest.mark.parametrize("warmup", [False, True])
def test_timm(warmup: bool, every_steps: int) -> None:
    """Its train.py updates after each step, with the number of updates made; here at every fourth step, too."""
    model = small()
    ours = build_ema(model, EmaConfig(decay=0.98, warmup=warmup, every_steps=every_steps), 256)
    theirs = ModelEmaV3(model, decay=0.98, use_warmup=warmup)
    for step in range(STEPS):
        train_step(model, step)
        ours.update(model, step)
        if (step + 1) % every_steps == 0:
            theirs.update(model, step=(step + 1) // every_steps)
    assert max(differences(ours.module, theirs.module).values()) < 1e-6


class TorchvisionsAverage(AveragedModel):
    """As the reference script has it: torch's averaged model with a decay, over the buffers too."""

    def __init__(self, model: nn.Module, decay: float):
        def average(averaged: torch.Tensor, current: torch.Tensor, _: Any) -> torch.Tensor:
            return decay * averaged + (1 - decay) * current

        super().__init__(model, avg_fn=average, use_buffers=True)


@pytest.mark.parametrize(("batch", "every_steps", "epochs"), [(32, 1, 10), (128, 4, 5)])
def test_torchvision(batch: int, every_steps: int, epochs: int) -> None:
    """`--model-ema-decay 0.998` with its adjustment, and the half-life that stands for it in a config."""
    adjustment = batch * every_steps / epochs
    theirs_decay = 1.0 - min(1.0, (1.0 - 0.998) * adjustment)
    half_life_images = batch * every_steps * math.log(0.5) / math.log(theirs_decay)
    model = small()
    ours = build_ema(model, EmaConfig(half_life_images=half_life_images, every_steps=every_steps), batch)
    theirs = TorchvisionsAverage(model, theirs_decay)
    for step in range(STEPS):
        train_step(model, step)
        ours.update(model, step)
        if (step + 1) % every_steps == 0:
            theirs.update_parameters(model)
    assert max(differences(ours.module, theirs.module).values()) < 1e-6
    raw = differences(model, theirs.module)
    assert min(raw.values()) > 1e-3  # an average, not a copy
