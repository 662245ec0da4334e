"""The average: timm's and torchvision's arithmetic, updated every `every_steps` steps; the step and
the weights are its whole state.
"""

import math
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from imagenet_cls.config.schema import EmaConfig
from imagenet_cls.models.ema import build_ema


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5)
    ).double()


def train_step(model: nn.Module, step: int) -> None:
    """Change weights and running statistics, as a pure function of the step."""
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(4, 3, 8, 8, generator=generator).double())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def copy_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def floats(module: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in module.state_dict().items() if value.is_floating_point()}


def test_ema_without_decay_is_off() -> None:
    ema = build_ema(network(), EmaConfig(decay=None), 64)
    ema.update(network(), 0)
    ema.set(network())
    assert ema.module is None


class Rebinding(nn.Module):
    """Assigns other tensors to buffers in each forward. Has a frozen layer, a tied weight, no bias
    in a layer, a buffer that is None until the forward, and one that no state dict has.
    """

    center: Tensor
    images: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.body[2].requires_grad_(False)
        self.body.append(nn.Linear(4, 4))
        self.body[3].weight = self.body[0].weight
        self.to(dtype)
        self.register_buffer("center", torch.zeros(4, dtype=torch.float32))
        self.register_buffer("images", torch.zeros((), dtype=torch.int64))
        self.register_buffer("late", None)
        self.register_buffer("temporary", torch.zeros(2), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        output = self.body(input)
        self.center = 0.9 * self.center + output.detach().float().mean(0)
        self.images = self.images + len(input)
        self.temporary = self.late = output.detach()
        return output


@pytest.mark.parametrize(
    ("dtype", "every_steps", "warmup"),
    [(torch.float32, 3, False), (torch.bfloat16, 1, True)],
)
def test_average_after_resume_equals_timms_uninterrupted(
    dtype: torch.dtype, every_steps: int, warmup: bool
) -> None:
    """timm's train.py updates with the number of updates made, and makes state dicts in each. The
    first update copies.
    """
    config = EmaConfig(decay=0.7, warmup=warmup, every_steps=every_steps)
    model = Rebinding(dtype)
    ema = build_ema(model, config, 64)
    timms = ModelEmaV3(model, decay=0.7, use_warmup=warmup, stochastic_rounding=False)
    for step in range(12):
        if step == 7:
            saved = copy_of(ema.module)
            ema = build_ema(Rebinding(dtype), config, 64)
            ema.module.load_state_dict(saved)
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(8, 4, generator=generator).to(dtype))
        with torch.no_grad():
            model.body[0].weight.add_(0.25)
        expected = {key: value for key, value in copy_of(model).items() if key != "late"}
        late, model.late = model.late, None  # timm pairs the two state dicts by their order
        updates, is_between = divmod(step + 1, every_steps)
        if not is_between:
            timms.update(model, step=updates)
        model.late = late
        ema.update(model, step)
        is_first = updates == 1 and not is_between
        torch.testing.assert_close(
            copy_of(ema.module), expected if is_first else copy_of(timms.module), rtol=0, atol=0
        )
    assert ema.module.center.abs().max() > 0 and ema.module.images > 0


@pytest.mark.parametrize(("batch", "every_steps", "epochs"), [(32, 1, 10), (128, 4, 5)])
def test_update_equals_torchvisions(batch: int, every_steps: int, epochs: int) -> None:
    """`--model-ema-decay 0.998` with its adjustment, and the half-life that stands for it in a
    config.
    """
    decay = 1.0 - min(1.0, (1.0 - 0.998) * batch * every_steps / epochs)

    def average(averaged: Tensor, current: Tensor, _: Any) -> Tensor:
        return decay * averaged + (1 - decay) * current

    half_life_images = batch * every_steps * math.log(0.5) / math.log(decay)
    model = network()
    ours = build_ema(
        model, EmaConfig(half_life_images=half_life_images, every_steps=every_steps), batch
    )
    theirs = AveragedModel(model, avg_fn=average, use_buffers=True)
    for step in range(100):
        train_step(model, step)
        ours.update(model, step)
        if (step + 1) % every_steps == 0:
            theirs.update_parameters(model)
    torch.testing.assert_close(floats(ours.module), floats(theirs.module), rtol=0, atol=1e-6)
    for key, value in floats(model).items():  # an average, not a copy
        assert (value - ours.module.state_dict()[key]).abs().max() > 1e-3
