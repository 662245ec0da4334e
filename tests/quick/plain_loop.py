"""A recipe as a plain training loop, made of timm's, torch's and torchvision's own parts: those of
the quick recipes.

The package reads the config, splits off the held-out images, and gives parameter groups and
learning rates, which tests/parity compares with those of the libraries.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from helpers import newest
from PIL import Image
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score
from timm.data import Mixup
from timm.layers import convert_splitbn_model
from timm.loss import (
    AsymmetricLossMultiLabel,
    BinaryCrossEntropy,
    JsdCrossEntropy,
    SoftTargetCrossEntropy,
)
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import Tensor, nn
from torch.nn import functional
from torchvision import transforms

from imagenet_cls.config.load import load_config
from imagenet_cls.data.builtin import ComposedDigits
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.schedule import Schedule

NUM_CLASSES = 10
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TORCHS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}


def val_images(root: Path) -> list[tuple[Image.Image, int]]:
    """The held-out images and their classes."""
    data = load_config(None, [f"data.root={root}"]).config.data
    source = open_datasets(data, ("val",)).val
    assert source is not None
    paths = [root / data.train / source.name(index) for index in range(len(source))]
    return [(Image.open(path).convert("RGB"), int(path.parent.name)) for path in paths]


def build_teacher(recipe: Path, run_folder: Path | None) -> nn.Module | None:
    """The trained network of a recipe's run, in evaluation mode."""
    if run_folder is None:
        return None
    model = load_config(recipe).config.model
    network = timm.create_model(model.name, num_classes=NUM_CLASSES, **model.kwargs)
    network.load_state_dict(load_file(newest(run_folder) / "model.safetensors"))
    return network.eval().requires_grad_(False)


class Plain:
    """The state of a plain loop, and its step."""

    def __init__(self, cfg: Any, schedule: Schedule, start: nn.Module | None):
        """start: a trained network, the teacher or the starting weights."""
        self.cfg, self.schedule, self.teacher = cfg, schedule, start
        self.model = build_model(cfg, start)
        self.optimizer = build_optimizer(self.model, cfg.optimizer)
        self.mixup = build_mixup(cfg)
        self.criterion = loss_function(cfg, self.mixup is not None)
        self.ema = build_ema(self.model, cfg)
        self.steps = 0

    def start_epoch(self, epoch: int) -> None:
        set_training(self.model, self.cfg)
        if self.mixup is not None and self.cfg.mix.off_epoch is not None:
            self.mixup.mixup_enabled = epoch < self.cfg.mix.off_epoch

    def step(self, images: Tensor, targets: Tensor) -> None:
        """images: float (B, 3, S, S), normalized and erased; with splits, one view of all after the
        other.
        """
        train = self.cfg.train
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(self.steps) * group["lr_scale"]
        if self.mixup is not None:
            images, targets = self.mixup(images, targets)
        self.backward(images, targets)
        if train.sam_rho is not None and self.steps % train.sam_every_steps == 0:
            with at_highest_loss(self.model, self.optimizer, train.sam_rho):
                self.backward(images, targets)
        clip(self.model, train)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.ema is not None and self.steps % self.cfg.ema.every_steps == 0:
            self.ema.update(self.model, self.steps // self.cfg.ema.every_steps)

    def backward(self, images: Tensor, targets: Tensor) -> None:
        at_once = self.cfg.train.micro_batch_size or len(images)
        for some, their_targets in zip(images.split(at_once), targets.split(at_once), strict=True):
            (self.loss(some, their_targets) * len(some) / len(images)).backward()

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        outputs, distill = self.model(images), self.cfg.distill
        if distill.kind == "none":
            return self.criterion(outputs, targets)
        assert self.teacher is not None and distill.kind == "hard"
        outputs, from_teacher = outputs
        with torch.no_grad():
            best = self.teacher(images).argmax(1)
        return (1 - distill.alpha) * self.criterion(
            outputs, targets
        ) + distill.alpha * functional.cross_entropy(from_teacher, best)


def build_mixup(cfg: Any) -> Mixup | None:
    mix = cfg.mix
    if not mix.mixup_alpha and not mix.cutmix_alpha:
        return None
    options = {"label_smoothing": cfg.loss.label_smoothing, "num_classes": NUM_CLASSES}
    return Mixup(
        mix.mixup_alpha, mix.cutmix_alpha, None, mix.prob, mix.switch_prob, mix.mode, **options
    )


def loss_function(cfg: Any, mixes: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """timm's and torch's. Mixed targets come smoothed from Mixup."""
    loss, smoothing = cfg.loss, cfg.loss.label_smoothing
    weights = None if loss.class_weights is None else torch.tensor(loss.class_weights)
    if loss.name == "jsd":
        return JsdCrossEntropy(cfg.augment.splits, smoothing=smoothing)
    if loss.name == "asymmetric":
        return AsymmetricLossMultiLabel(**loss.kwargs)
    if loss.name == "bce":
        return BinaryCrossEntropy(0.0 if mixes else smoothing, **loss.kwargs)
    if loss.name == "focal":
        assert weights is not None

        def focal(logits: Tensor, targets: Tensor) -> Tensor:
            chosen = functional.softmax(logits, 1).gather(1, targets[:, None])[:, 0]
            balance = weights[targets] / weights.mean()
            return (-balance * (1 - chosen) ** loss.kwargs["gamma"] * chosen.log()).mean()

        return focal
    return (
        SoftTargetCrossEntropy()
        if mixes
        else nn.CrossEntropyLoss(weights, label_smoothing=smoothing)
    )


def build_optimizer(model: nn.Module, optimizer: Any) -> torch.optim.Optimizer:
    groups = parameter_groups(model, optimizer)
    if optimizer.name in TORCHS:
        return TORCHS[optimizer.name](groups, lr=optimizer.lr, **optimizer.kwargs)
    name = optimizer.name.removeprefix("timm:")
    return create_optimizer_v2(
        groups, name, lr=optimizer.lr, weight_decay=optimizer.weight_decay, **optimizer.kwargs
    )


def build_model(cfg: Any, start: nn.Module | None) -> nn.Module:
    """Without gradient checkpointing, which must not change results."""
    model: nn.Module = timm.create_model(
        cfg.model.name, num_classes=NUM_CLASSES, **cfg.model.kwargs
    )
    if cfg.model.split_bn:
        model = convert_splitbn_model(model, cfg.augment.splits)
    if cfg.distill.kind != "none":
        model.set_distilled_training(True)
    if cfg.model.checkpoint is not None:
        assert start is not None
        model.load_state_dict(start.state_dict())
    for pattern in cfg.model.freeze:
        for name, parameter in model.named_parameters():
            if name.startswith(pattern.removesuffix("*")):
                parameter.requires_grad_(False)
    return model


def set_training(model: nn.Module, cfg: Any) -> None:
    model.train()
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(pattern.removesuffix("*")) for pattern in cfg.model.freeze):
            module.eval()


def build_ema(model: nn.Module, cfg: Any) -> ModelEmaV3 | None:
    ema = cfg.ema
    if ema.decay is None and ema.half_life_images is None:
        return None
    decay = ema.decay or 0.5 ** (
        cfg.train.global_batch_size * ema.every_steps / ema.half_life_images
    )
    return ModelEmaV3(model, decay, use_warmup=ema.warmup)


@contextmanager
def at_highest_loss(
    model: nn.Module, optimizer: torch.optim.Optimizer, rho: float
) -> Iterator[None]:
    """SAM: moves the weights up along the gradient for the second backward pass, then restores
    weights and buffers.
    """
    parameters = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    kept = [*parameters, *model.buffers()]
    before = [tensor.detach().clone() for tensor in kept]
    with torch.no_grad():
        for parameter in parameters:
            parameter += rho * parameter.grad / norm
    optimizer.zero_grad()
    yield
    with torch.no_grad():
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)


def clip(model: nn.Module, train: Any) -> None:
    for mode in ("norm", "value", "agc"):
        limit = getattr(train, f"clip_{mode}")
        if limit is not None:
            parameters = list(model.parameters())
            dispatch_clip_grad(parameters[:-2] if mode == "agc" else parameters, limit, mode)


@torch.no_grad()
def map_pct(model: nn.Module) -> float:
    """Mean average precision (%) on the held-out composed digits."""
    dataset = ComposedDigits("", "val")
    images = torch.stack([dataset[i][0] for i in range(len(dataset))]).float() / 255
    pixels = transforms.Normalize(MEAN, STD)(images)
    logits = copy.deepcopy(model).eval()(pixels)
    return 100 * float(average_precision_score(dataset.targets, logits, average="macro"))


@torch.no_grad()
def top1_pct(model: nn.Module, held_out: list[tuple[Image.Image, int]], cfg: Any) -> float:
    resize_px = cfg.eval.resize_px or math.floor(cfg.eval.crop_px / cfg.eval.crop_pct)
    resize = transforms.Resize(resize_px, transforms.InterpolationMode(cfg.eval.interpolation))
    normalize = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    prepare = transforms.Compose([resize, transforms.CenterCrop(cfg.eval.crop_px), *normalize])
    images = torch.stack([prepare(image) for image, _ in held_out])
    targets = torch.tensor([target for _, target in held_out])
    model = copy.deepcopy(model).eval()
    logits = model(images)
    if cfg.eval.flip_tta:
        logits = logits + model(images.flip(3))
    return 100 * float((logits.argmax(1) == targets).double().mean())
