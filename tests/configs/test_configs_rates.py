"""Learning rates of recipes over whole runs, against the schedulers and formulas that their sources' scripts have."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from golden import schedule_of
from published import TIMM, TORCHVISION, recipe
from timm.scheduler import CosineLRScheduler, StepLRScheduler
from torch import nn
from torch.optim import lr_scheduler

from imagenet_cls.config.schema import Config
from imagenet_cls.optim.scaling import scaled_lr


def an_optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def torchvision_rates(epochs: int, lr: float, shape: tuple[float, ...]) -> list[float]:
    """The rate of each epoch, from the schedulers that torchvision's reference script makes."""
    optimizer = an_optimizer(lr)
    schedule: lr_scheduler.LRScheduler
    if len(shape) == 2:
        schedule = lr_scheduler.StepLR(optimizer, int(shape[0]), shape[1])
    else:
        warmup, decay, lowest = int(shape[0]), shape[1], shape[2]
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs - warmup, eta_min=lowest)
        linear = lr_scheduler.LinearLR(optimizer, start_factor=decay, total_iters=warmup)
        schedule = lr_scheduler.SequentialLR(optimizer, [linear, cosine], milestones=[warmup])
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def assert_rates_by_epoch(config: Config, rates: list[float], tolerance: float = 0.0) -> None:
    """The first and the last step of each epoch have its rate; tolerance: in shares of the highest."""
    schedule = schedule_of(config)
    steps = schedule.steps_per_epoch
    margin = max(tolerance, 1e-9) * max(rates)
    assert config.train.epochs == len(rates)
    for epoch, rate in enumerate(rates):
        assert abs(schedule(epoch * steps) - rate) <= margin, epoch
        assert abs(schedule(epoch * steps + steps - 1) - rate) <= margin, epoch


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stem", TORCHVISION)
def test_rates_of_torchvisions_script(stem: str) -> None:
    batch, epochs, lr, shape = TORCHVISION[stem]
    assert recipe(stem).train.global_batch_size == batch
    assert_rates_by_epoch(recipe(stem), torchvision_rates(epochs, lr, shape))


@pytest.mark.parametrize("stem", TIMM)
def test_rates_of_timms_script(stem: str) -> None:
    batch, epochs, lr, (warmup, first), shape = TIMM[stem]
    optimizer = an_optimizer(lr)
    warm = {"warmup_t": warmup, "warmup_lr_init": first}
    schedule: Any
    if "lr_min" in shape:
        schedule = CosineLRScheduler(optimizer, t_initial=epochs, **warm, **shape)
    else:
        schedule = StepLRScheduler(optimizer, decay_t=2.4, warmup_prefix=False, **warm, **shape)
    rates = []
    for epoch in range(epochs):
        schedule.step(epoch)
        rates.append(optimizer.param_groups[0]["lr"])
    assert recipe(stem).train.global_batch_size == batch
    assert_rates_by_epoch(recipe(stem), rates)


def nvidia_rates(epochs: int, lr: float, warmup: int) -> list[float]:
    """`lr_cosine_policy` of DeepLearningExamples: its warm-up ends at the rate an epoch before the cosine begins."""
    return [
        lr * (e + 1) / warmup if e < warmup else lr * 0.5 * (1 + math.cos(math.pi * (e - warmup) / (epochs - warmup)))
        for e in range(epochs)
    ]


@pytest.mark.parametrize(
    ("stem", "batch", "reference", "margin"),
    [
        ("resnet50_nvidia_90e", 2048, nvidia_rates(90, 2.048, 8), 0.02),
        ("resnet50_nvidia_250e", 2048, nvidia_rates(250, 2.048, 8), 0.02),
        ("efficientnet_b0_nvidia", 4096, nvidia_rates(400, 0.08, 16), 0.005),
        ("efficientnet_b4_nvidia", 4096, nvidia_rates(400, 0.16, 16), 0.005),
    ],
)
def test_rates_of_nvidias_script_are_as_near_as_the_notes_say(
    stem: str, batch: int, reference: list[float], margin: float
) -> None:
    config = recipe(stem)
    assert config.train.global_batch_size == batch
    assert_rates_by_epoch(config, reference, margin)
    schedule, warm = schedule_of(config), round(config.schedule.warmup_epochs) + 1
    assert [schedule(e * schedule.steps_per_epoch) for e in range(warm)] == pytest.approx(reference[:warm])


def test_rates_of_pycls_are_as_near_as_the_note_says() -> None:
    """`get_epoch_lr` of pycls: the warm-up multiplies the cosine."""
    rates = [0.4 * 0.5 * (1 + math.cos(math.pi * e / 100)) for e in range(100)]
    rates[:5] = [rate * (0.1 * (1 - e / 5) + e / 5) for e, rate in enumerate(rates[:5])]
    assert_rates_by_epoch(recipe("regnet_y_3_2gf_pycls"), rates, 0.006)


@pytest.mark.parametrize(("network", "lr", "batch", "decay"), [(18, 0.5, 1024, 5e-5), (50, 1.7, 4096, 1e-4)])
@pytest.mark.parametrize(
    ("epochs", "ramp"), [(16, (11, 13)), (24, (17, 20)), (32, (23, 27)), (40, (29, 34)), (56, (41, 48)), (88, (65, 76))]
)
def test_rates_and_sides_of_ffcv(
    network: int, lr: float, batch: int, decay: float, epochs: int, ramp: tuple[int, int]
) -> None:
    config = recipe(f"resnet{network}_ffcv_{epochs}e")
    schedule = schedule_of(config)
    steps = epochs * schedule.steps_per_epoch
    assert (config.train.global_batch_size, config.optimizer.weight_decay) == (batch, decay)
    for step in range(0, steps, 97):
        expected = np.interp(step / schedule.steps_per_epoch, [0, 2, epochs], [1e-4 * lr, lr, 0])
        assert schedule(step) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    points = config.augment.progressive
    assert (points.epochs, points.sizes_px, points.multiple_px) == ([*ramp], [160, 192], 32)
    assert (config.eval.crop_px, config.eval.crop_pct, config.eval.flip_tta) == (256, 224 / 256, True)


@pytest.mark.parametrize(
    ("stem", "batch", "lr"),
    [
        ("deit_small_paper", 2048, 5e-4 * 2048 / 512),
        ("deit_small_mmpretrain", 512, 5e-4 * 512 / 512),
        ("deit3_small_paper", 1024, 4e-3),  # --unscale-lr
        ("resnet50_nvidia_90e", 4096, 4.096),
        ("efficientnet_b4_nvidia", 2048, 0.08),
        ("resnet50_rsb_a2", 1024, 5e-3),  # its source states no rule
    ],
)
def test_rates_follow_the_batch_where_the_source_says_so(stem: str, batch: int, lr: float) -> None:
    assert scaled_lr(recipe(stem).optimizer, batch)[0] == pytest.approx(lr, rel=1e-12)


def convnext_rate(step: int) -> float:
    """`cosine_scheduler` of ConvNeXt's utils.py, whose warm-up is np.linspace(0, lr, steps)."""
    warm, whole, lr, lowest = 20 * 312, 300 * 312, 4e-3, 1e-6
    if step < warm:
        return lr * step / (warm - 1)
    return lowest + 0.5 * (lr - lowest) * (1 + math.cos(math.pi * (step - warm) / (whole - warm)))


def mmpretrain_rate(step: int) -> float:
    """LinearLR by step, CosineAnnealingLR by epoch behind it, as `imagenet_bs1024_adamw_swin.py` has them."""
    warm, lr, lowest = 20 * 1251, 1e-3, 1e-5
    if step < warm:
        return lr * (1e-3 + (1 - 1e-3) * step / (warm - 1))
    return lowest + 0.5 * (lr - lowest) * (1 + math.cos(math.pi * (step // 1251 - 20) / (300 - 20)))


def big_vision_rate(step: int) -> float:
    """`create_learning_rate_schedule` of big_vision, for all images: 1,251 steps an epoch."""
    warm, whole = 10_000, 90 * 1251
    return 1e-3 * min(1, step / warm) * 0.5 * (1 + math.cos(math.pi * max(step - warm, 0) / (whole - warm)))


def mosaic_rate(epochs: int) -> Callable[[int], float]:
    """CosineAnnealingWithWarmupScheduler of composer, 625 steps an epoch, eight epochs of warm-up."""
    warm, whole = 8 * 625, epochs * 625

    def rate(step: int) -> float:
        if step < warm:
            return 2.048 * step / warm
        return 2.048 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (whole - warm)))

    return rate


@pytest.mark.parametrize(
    ("stem", "reference", "margin"),
    [
        ("convnext_tiny_paper", convnext_rate, 1 / (20 * 312)),
        ("deit_small_mmpretrain", mmpretrain_rate, math.pi / 2 / 280),  # an epoch where the cosine is steepest
        ("vit_small_big_vision_90e", big_vision_rate, 1e-9),
        ("resnet50_mosaic_mild", mosaic_rate(36), 1e-9),
        ("resnet50_mosaic_medium", mosaic_rate(135), 1e-9),
        ("resnet50_mosaic_hot", mosaic_rate(270), 1e-9),
    ],
)
def test_rates_that_change_with_every_step(stem: str, reference: Callable[[int], float], margin: float) -> None:
    config = recipe(stem)
    schedule = schedule_of(config)
    steps = config.train.epochs * schedule.steps_per_epoch
    for step in [*range(0, steps, 101), steps - 1]:
        assert abs(schedule(step) - reference(step)) <= margin * schedule.span.base_lr, step
