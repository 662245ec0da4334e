"""The average: timm's arithmetic in the config's rhythm, and nothing to remember but weights and step."""

import copy

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from imagenet_cls.config.schema import EmaConfig
from imagenet_cls.models.ema import build_ema, ema_decay, half_life_of, torchvision_decay, update_ema


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
    assert build_ema(small(), EmaConfig(decay=None), 64) is None


def test_formula_by_hand() -> None:
    model = small()
    ema = build_ema(model, EmaConfig(decay=0.9), 64)
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
    ema = build_ema(model, EmaConfig(decay=0.99, warmup=warmup), 64)
    reference = ModelEmaV3(model, decay=0.99, use_warmup=warmup)
    for step in range(8):
        train_step(model, step)
        update_ema(ema, model, step)
        reference.update(model, step=step + 1)  # timm counts the updates made
    assert_same(bits(ema.module), bits(reference.module))


def test_every_steps() -> None:
    model = small()
    ema = build_ema(model, EmaConfig(decay=0.5, every_steps=3, warmup=True), 64)
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
    ema = build_ema(model, config, 64)
    for step in range(10):
        if step == 5:
            saved_model, saved_ema = copy.deepcopy(bits(model)), copy.deepcopy(bits(ema.module))
        train_step(model, step)
        update_ema(ema, model, step)
    other = small().to(memory_format=torch.channels_last)
    other_ema = build_ema(other, config, 64)
    other.load_state_dict(saved_model)
    other_ema.module.load_state_dict(saved_ema)
    for step in range(5, 10):
        train_step(other, step)
        update_ema(other_ema, other, step)
    assert_same(bits(model), bits(other))
    assert_same(bits(ema.module), bits(other_ema.module))


def test_half_life_is_what_is_left_of_a_weight() -> None:
    """A weight that is at 1 once and at 0 from then on is at 1/2 in the average after so many images."""
    model = nn.Linear(1, 1, bias=False)
    ema = build_ema(model, EmaConfig(half_life_images=1000, every_steps=5), 20)
    for step, weight in enumerate([1.0] * 5 + [0.0] * 50):
        nn.init.constant_(model.weight, weight)
        update_ema(ema, model, step)
    assert ema.module.weight.item() == pytest.approx(0.5)


@pytest.mark.parametrize(("batch", "every_steps"), [(256, 1), (1024, 1), (1024, 32)])
def test_half_life_means_the_same_for_every_batch_and_rhythm(batch: int, every_steps: int) -> None:
    decay = ema_decay(EmaConfig(half_life_images=1e6, every_steps=every_steps), batch)
    updates = 1e6 / (batch * every_steps)
    assert decay**updates == pytest.approx(0.5)
    assert half_life_of(decay, batch * every_steps) == pytest.approx(1e6)


def test_published_decays_as_half_lives() -> None:
    decay = torchvision_decay(0.99998, 1024, 32, 600)
    assert decay == pytest.approx(1 - 2e-5 * 1024 * 32 / 600)
    assert half_life_of(decay, 1024 * 32) == pytest.approx(20.8e6, rel=2e-3)
    assert half_life_of(0.99996, 1024) == pytest.approx(17.7e6, rel=5e-3)
    assert torchvision_decay(0.9, 1024, 32, 1) == 0  # never less than a copy
