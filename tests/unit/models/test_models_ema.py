"""The average: timm's arithmetic in the config's rhythm, and nothing to remember but weights and step."""

import copy

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from imagenet_cls.config.schema import EmaConfig
from imagenet_cls.models.ema import build_ema, update_ema


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 5))


def train_step(model: nn.Module, step: int) -> None:
    """A stand-in for training: other weights and other running statistics after each step, the same each time."""
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(4, 3, 8, 8, generator=generator))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def bits(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(a[key], b[key]) for key in a) and a.keys() == b.keys()


def test_none_is_none() -> None:
    assert build_ema(small(), EmaConfig(decay=None)) is None


def test_formula_by_hand() -> None:
    model = small()
    ema = build_ema(model, EmaConfig(decay=0.9))
    expected: dict[str, torch.Tensor] = {}
    for step in range(6):
        train_step(model, step)
        update_ema(ema, model, step)
        for key, value in model.state_dict().items():
            if step == 0 or not value.is_floating_point():
                expected[key] = value.clone()
            else:
                expected[key] = 0.9 * expected[key] + 0.1 * value
    for key, value in ema.module.state_dict().items():
        torch.testing.assert_close(value, expected[key], msg=key)
    assert ema.module[1].num_batches_tracked == 6
    assert not torch.equal(ema.module[1].running_mean, model[1].running_mean)  # averaged, not copied


@pytest.mark.parametrize("warmup", [False, True])
def test_equals_timms_own_loop(warmup: bool) -> None:
    model = small()
    ema, reference = build_ema(model, EmaConfig(decay=0.99, warmup=warmup)), None
    reference = ModelEmaV3(model, decay=0.99, use_warmup=warmup)
    for step in range(8):
        train_step(model, step)
        update_ema(ema, model, step)
        reference.update(model, step=step + 1)  # timm counts the updates made
    assert_same(bits(ema.module), bits(reference.module))


def test_every_steps() -> None:
    model = small()
    ema = build_ema(model, EmaConfig(decay=0.5, every_steps=3, warmup=True))
    reference = ModelEmaV3(model, decay=0.5, use_warmup=True)
    for step in range(8):
        before = bits(ema.module)
        train_step(model, step)
        update_ema(ema, model, step)
        if step in (2, 5):
            reference.update(model, step=step // 3 + 1)
        else:
            assert_same(before, bits(ema.module))
    assert_same(bits(ema.module), bits(reference.module))


@pytest.mark.parametrize("every_steps", [1, 3])
def test_stopped_and_resumed_equals_undisturbed(every_steps: int) -> None:
    config = EmaConfig(decay=0.97, warmup=True, every_steps=every_steps)
    model = small().to(memory_format=torch.channels_last)
    ema = build_ema(model, config)
    for step in range(10):
        if step == 5:
            saved_model, saved_ema = copy.deepcopy(bits(model)), copy.deepcopy(bits(ema.module))
        train_step(model, step)
        update_ema(ema, model, step)
    other = small().to(memory_format=torch.channels_last)
    other_ema = build_ema(other, config)
    other.load_state_dict(saved_model)
    other_ema.module.load_state_dict(saved_ema)
    for step in range(5, 10):
        train_step(other, step)
        update_ema(other_ema, other, step)
    assert_same(bits(model), bits(other))
    assert_same(bits(ema.module), bits(other_ema.module))
