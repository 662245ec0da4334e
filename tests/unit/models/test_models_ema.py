"""The average: timm's arithmetic, updated every `every_steps` steps; the step and the weights are its whole state."""

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from imagenet_cls.config.schema import EmaConfig
from imagenet_cls.models.ema import build_ema, ema_decay


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 5))


def train_step(model: nn.Module, step: int) -> None:
    """Change weights and running statistics, as a pure function of the step."""
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(4, 3, 8, 8, generator=generator))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def copy_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(a[key], b[key]) for key in a) and a.keys() == b.keys()


def test_ema_without_decay_is_off() -> None:
    ema = build_ema(small(), EmaConfig(decay=None), 64)
    ema.update(small(), 0)
    ema.set(small())
    assert ema.module is None


def test_update_equals_the_formula() -> None:
    model = small()
    ema = build_ema(model, EmaConfig(decay=0.9), 64)
    expected: dict[str, torch.Tensor] = {}
    for step in range(6):
        train_step(model, step)
        ema.update(model, step)
        for key, value in model.state_dict().items():
            if step == 0 or not value.is_floating_point():
                expected[key] = value.clone()
            else:
                expected[key] = 0.9 * expected[key] + 0.1 * value
    for key, value in ema.module.state_dict().items():
        torch.testing.assert_close(value, expected[key], msg=key)
    assert ema.module[1].num_batches_tracked == 6
    assert not torch.equal(ema.module[1].running_mean, model[1].running_mean)  # averaged, not copied


@pytest.mark.parametrize("every_steps", [1, 3])
def test_update_after_resume_equals_uninterrupted(every_steps: int) -> None:
    """And timm's own loop over the same steps."""
    config = EmaConfig(decay=0.97, warmup=True, every_steps=every_steps)
    model = small().to(memory_format=torch.channels_last)
    ema, timms = build_ema(model, config, 64), ModelEmaV3(model, decay=0.97, use_warmup=True)
    for step in range(10):
        if step == 5:
            saved_model, saved_ema = copy_of(model), copy_of(ema.module)
        train_step(model, step)
        ema.update(model, step)
        if (step + 1) % every_steps == 0:
            timms.update(model, step=(step + 1) // every_steps)
    other = small().to(memory_format=torch.channels_last)
    other_ema = build_ema(other, config, 64)
    other.load_state_dict(saved_model)
    other_ema.module.load_state_dict(saved_ema)
    for step in range(5, 10):
        train_step(other, step)
        other_ema.update(other, step)
    assert_same(copy_of(model), copy_of(other))
    assert_same(copy_of(ema.module), copy_of(other_ema.module))
    assert_same(copy_of(ema.module), copy_of(timms.module))


def test_half_life_images_halve_a_weight() -> None:
    """A weight that is 1 once and 0 from then on is 1/2 in the average after so many images."""
    model = nn.Linear(1, 1, bias=False)
    ema = build_ema(model, EmaConfig(half_life_images=1000, every_steps=5), 20)
    for step, weight in enumerate([1.0] * 5 + [0.0] * 50):
        nn.init.constant_(model.weight, weight)
        ema.update(model, step)
    assert ema.module.weight.item() == pytest.approx(0.5)


@pytest.mark.parametrize(("batch", "every_steps"), [(256, 1), (1024, 32)])
def test_half_life_is_independent_of_batch_and_interval(batch: int, every_steps: int) -> None:
    decay = ema_decay(EmaConfig(half_life_images=1e6, every_steps=every_steps), batch)
    assert decay ** (1e6 / (batch * every_steps)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("half_life_images", "every_steps", "decay"),
    [(17_744_213, 1, 0.99996), (20_783_057, 32, 1 - 2e-5 * 1024 * 32 / 600)],  # DeiT, torchvision's reference script
)
def test_half_lives_of_recipes_are_the_published_decays(half_life_images: int, every_steps: int, decay: float) -> None:
    ema = EmaConfig(half_life_images=half_life_images, every_steps=every_steps)
    assert ema_decay(ema, 1024) == pytest.approx(decay, rel=1e-6)
