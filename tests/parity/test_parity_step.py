"""Whole optimizer steps of two recipes, written out in plain tensors beside ours, in fp64. One with
SGD: tests/quick.

From bytes to weights: normalized pixels, mixing, loss, rate of the step, clipping inside the
optimizer, weight decay. The networks are small; the settings are those of the shipped configs of
ResNet-50 with RSB A2 and of DeiT-S, read from their files; what they should come to is written out
in the tests.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from helpers import REPOSITORY
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import Config, DistillConfig, ErasingConfig
from imagenet_cls.data.device import Normalize, TrainPreprocess, build_mixing
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.step import Updater
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.losses import build_loss, build_training_loss
from imagenet_cls.optim.optimizers import build_optimizer
from imagenet_cls.optim.schedule import build_schedule, scaled_lr
from imagenet_cls.seeding import hash_key

CLASSES, BATCH, SIDE, STEPS_PER_EPOCH, SEED = 10, 8, 16, 3, 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Weights = dict[str, Tensor]


def away_from_zero(model: nn.Module) -> nn.Module:
    """In fp64, with no parameter at 0 or 1: biases and tokens that are near 0 would not show
    whether they decay.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.5 if parameter.ndim == 1 else 0.2))
    return model.double()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    body = [
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.ReLU(),
    ]
    return away_from_zero(
        nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES))
    )


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return away_from_zero(
        VisionTransformer(SIDE, 8, embed_dim=12, depth=2, num_heads=2, num_classes=CLASSES)
    )


def batches(first_step: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Two steps: the second one meets momenta."""
    for step in (first_step, first_step + 1):
        draws = torch.Generator().manual_seed(step)
        images = torch.randint(0, 256, (BATCH, 3, SIDE, SIDE), generator=draws, dtype=torch.uint8)
        yield step, images, torch.randint(0, CLASSES, (BATCH,), generator=draws)


def ours(config: Config, model: nn.Module, first_step: int) -> Weights:
    """The parts that `engine.build` makes, used as `engine.train` uses them."""
    lr, _ = scaled_lr(config.optimizer, config.train.global_batch_size)
    schedule = build_schedule(config.schedule, lr, STEPS_PER_EPOCH, config.train.epochs)
    mixing = build_mixing(config.mix, CLASSES)
    preprocess = Normalize(MEAN, STD, torch.device("cpu"), config.train.channels_last)
    prepare = TrainPreprocess(preprocess, ErasingConfig(), mixing, SEED, rank=0)
    training_loss = build_training_loss(build_loss(config.loss, CLASSES), DistillConfig())
    optimizer = build_optimizer(config.optimizer, parameter_groups(model, config.optimizer))
    updater = Updater(model, optimizer, config.train, torch.amp.GradScaler("cpu", enabled=False))
    for step, images, targets in batches(first_step):
        pixels, mixed_targets = prepare(
            TrainBatch(images, targets), step // STEPS_PER_EPOCH, step, 0
        )
        pixels = pixels.double()
        training_loss(model(pixels), mixed_targets, pixels).backward()
        updater.update(schedule(step))
    return {name: p.detach() for name, p in model.named_parameters()}


# What follows uses nothing of the package but the hash that seeds the draws of a step.


@dataclass
class Recipe:
    """A recipe written out. mix: normalized images, targets, step -> mixed images, probabilities.
    update: with a rate, changes weights, by name, from gradients and a memory of tensors by kind
    and name, in step 1, 2, ... of this test.
    """

    config: str
    model: Callable[[], nn.Module]
    lr: Callable[[int], float]
    mix: Callable[..., tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    update: Callable[..., None]

    def trained(self, epoch: int) -> Weights:
        """The weights after two steps at the beginning of an epoch."""
        model = self.model()
        weights = {name: p.detach() for name, p in model.named_parameters()}
        memory: dict[str, Weights] = {
            kind: {n: torch.zeros_like(w) for n, w in weights.items()} for kind in ("m", "v")
        }
        mean, std = (torch.tensor(x, dtype=torch.float64).view(1, 3, 1, 1) for x in (MEAN, STD))
        for number, (step, images, targets) in enumerate(batches(epoch * STEPS_PER_EPOCH), start=1):
            pixels, probabilities = self.mix((images.double() / 255 - mean) / std, targets, step)
            value = self.loss(model(pixels), probabilities)
            gradients = torch.autograd.grad(value, list(model.parameters()))
            self.update(
                self.lr(epoch), weights, dict(zip(weights, gradients, strict=True)), memory, number
            )
        return weights


def one_hot(targets: Tensor) -> Tensor:
    return torch.eye(CLASSES, dtype=torch.float64)[targets]


def mix(images: Tensor, targets: Tensor, step: int, mixup_alpha: float) -> tuple[Tensor, Tensor]:
    """Mixup (Zhang et al. 2017) or cutmix with alpha 1 (Yun et al. 2019), of each image with its
    mirror in the batch.

    The draws, in timm's order: whether to mix, which of both, its share, the rectangle's center.
    """
    draws = np.random.RandomState(hash_key("mix", SEED, step, 0, 0) & 0xFFFFFFFF)
    draws.rand()
    cuts = draws.rand() < 0.5
    share = draws.beta(1.0, 1.0) if cuts else draws.beta(mixup_alpha, mixup_alpha)
    if cuts:
        side = int(SIDE * math.sqrt(1 - share))
        y, x = draws.randint(0, SIDE), draws.randint(0, SIDE)
        top, left = max(y - side // 2, 0), max(x - side // 2, 0)
        bottom, right = min(y + (side + 1) // 2, SIDE), min(x + (side + 1) // 2, SIDE)
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = images.flip(0)[:, :, top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / SIDE**2
    else:
        mixed = share * images + (1 - share) * images.flip(0)
    return mixed, share * one_hot(targets) + (1 - share) * one_hot(targets).flip(0)


def cosine_lr(epoch: int, highest: float, start: float, lowest: float) -> float:
    """timm's: a warm-up of 5 epochs over the beginning of a cosine of 300, by epoch."""
    if epoch < 5:
        return start + (highest - start) * epoch / 5
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * epoch / 300)) / 2


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    log_p = logits - logits.exp().sum(1, keepdim=True).log()
    return -(((1 - smoothing) * targets + smoothing / CLASSES) * log_p).sum(1).mean()


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    p, hard = 1 / (1 + (-logits).exp()), (targets > 0.2).double()
    return -(hard * p.log() + (1 - hard) * (1 - p).log()).mean()


def adam_moments(
    name: str, gradient: Tensor, memory: dict[str, Weights], number: int
) -> tuple[Tensor, Tensor]:
    memory["m"][name] = 0.9 * memory["m"][name] + 0.1 * gradient
    memory["v"][name] = 0.999 * memory["v"][name] + 0.001 * gradient.square()
    return memory["m"][name] / (1 - 0.9**number), memory["v"][name] / (1 - 0.999**number)


def lamb(
    lr: float, weights: Weights, gradients: Weights, memory: dict[str, Weights], number: int
) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    for name, w in weights.items():
        m, v = adam_moments(name, gradients[name] / max(norm, 1.0), memory, number)
        direction = m / (v.sqrt() + 1e-6)
        if w.ndim > 1:  # norms and biases have neither decay nor a trust ratio
            direction = direction + 0.02 * w
            direction = direction * w.norm() / direction.norm()
        w.sub_(lr * direction)


def adamw(
    lr: float, weights: Weights, gradients: Weights, memory: dict[str, Weights], number: int
) -> None:
    for name, w in weights.items():
        m, v = adam_moments(name, gradients[name], memory, number)
        if w.ndim > 1 and name not in ("cls_token", "pos_embed"):
            w.mul_(1 - lr * 0.05)
        w.sub_(lr * m / (v.sqrt() + 1e-8))


RECIPES = {
    # LAMB (You et al. 2020) on gradients of norm 1 at most, BCE with targets above 0.2 as 1, mixup
    # 0.1 or cutmix.
    "RSB A2": Recipe(
        "resnet/resnet50_rsb_a2.yaml",
        convolutions,
        partial(cosine_lr, highest=5e-3, start=1e-4, lowest=1e-6),
        partial(mix, mixup_alpha=0.1),
        binary_cross_entropy,
        lamb,
    ),
    # AdamW, 5e-4 for 512 images, smoothed and mixed targets, no decay on tokens and whatever has
    # one dimension.
    "DeiT-S": Recipe(
        "deit/deit_small_paper.yaml",
        transformer,
        partial(cosine_lr, highest=5e-4 * 1024 / 512, start=1e-6, lowest=1e-5),
        partial(mix, mixup_alpha=0.8),
        partial(cross_entropy, smoothing=0.1),
        adamw,
    ),
}


@pytest.mark.parametrize("epoch", [1, 4, 5, 150])
@pytest.mark.parametrize("name", RECIPES)
def test_step_equals_the_recipe_written_out(name: str, epoch: int) -> None:
    recipe = RECIPES[name]
    config = load_config(REPOSITORY / "configs" / recipe.config).config
    found, expected = ours(config, recipe.model(), epoch * STEPS_PER_EPOCH), recipe.trained(epoch)
    before = recipe.model().state_dict()
    assert found.keys() == expected.keys()
    for key, weight in found.items():
        torch.testing.assert_close(weight, expected[key], rtol=0, atol=1e-7, msg=key)
    moved = max(float((expected[key] - before[key]).abs().max()) for key in expected)
    assert moved > 1e-4, moved  # else any two recipes would agree
