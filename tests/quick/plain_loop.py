"""A recipe as a plain training loop, made of timm's, torch's and torchvision's own parts (`plain_parts`).

The package only reads the config file and splits off the held-out images.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import plain_parts as parts
import timm
import torch
from helpers import newest
from PIL import Image
from safetensors.torch import load_file
from timm.layers import convert_splitbn_model
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import Tensor, nn
from torch.nn import functional

from imagenet_cls.config.load import load_config
from imagenet_cls.data import open_datasets

NUM_CLASSES = 10


@cache
def decoded_digits(root: Path) -> tuple[parts.Images, parts.Images]:
    """The training images and the held-out images."""
    data = load_config(None, [f"data.root={root}"]).config.data
    sets = open_datasets(data)
    found = []
    for source in (sets.train, sets.val):
        assert source is not None
        paths = [root / data.train / source.name(i).rpartition("train/")[2] for i in range(len(source))]
        found.append([(Image.open(path).convert("RGB"), int(path.parent.name)) for path in paths])
    return found[0], found[1]


def build_teacher(recipe: Path, run_folder: Path | None) -> nn.Module | None:
    """The trained network of a recipe's run, in evaluation mode."""
    if run_folder is None:
        return None
    model = load_config(recipe).config.model
    network = timm.create_model(model.name, num_classes=NUM_CLASSES, **model.kwargs)
    network.load_state_dict(load_file(newest(run_folder) / "model.safetensors"))
    return network.eval().requires_grad_(False)


class Plain:
    """The state of a plain loop, and its step. top1s: of the evaluations so far, for the plateau schedule."""

    def __init__(self, cfg: Any, num_images: int, start: nn.Module | None):
        """num_images: in the training set. start: a trained network, the teacher or the starting weights."""
        per_epoch = parts.samples_per_epoch(num_images, cfg.data.repeats_multiple) // cfg.train.global_batch_size
        lr = cfg.optimizer.lr
        if cfg.optimizer.lr_base_batch:
            lr *= cfg.train.global_batch_size / cfg.optimizer.lr_base_batch
        self.cfg, self.teacher = cfg, start
        self.model = build_model(cfg, start)
        self.optimizer = parts.build_optimizer(self.model, cfg.optimizer, lr)
        self.set_rates = parts.schedule(self.optimizer, cfg, lr, per_epoch)
        self.mixup = parts.mixup(cfg, NUM_CLASSES)
        self.criterion = parts.loss_function(cfg, self.mixup is not None)
        self.ema = build_ema(self.model, cfg)
        self.steps, self.top1s = 0, list[float]()

    def start_epoch(self, epoch: int) -> None:
        set_training(self.model, self.cfg)
        if self.mixup is not None and self.cfg.mix.off_epoch is not None:
            self.mixup.mixup_enabled = epoch < self.cfg.mix.off_epoch

    def step(self, images: Tensor, targets: Tensor) -> None:
        """images: float (B, 3, S, S), normalised and erased; with splits, one view of all after the other."""
        train = self.cfg.train
        self.set_rates(self.steps, self.top1s)
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
        return (1 - distill.alpha) * self.criterion(outputs, targets) + distill.alpha * functional.cross_entropy(
            from_teacher, best
        )


def build_model(cfg: Any, start: nn.Module | None) -> nn.Module:
    """Without gradient checkpointing, which must not change results."""
    model: nn.Module = timm.create_model(cfg.model.name, num_classes=NUM_CLASSES, **cfg.model.kwargs)
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
    halvings = (
        0 if ema.half_life_images is None else cfg.train.global_batch_size * ema.every_steps / ema.half_life_images
    )
    return ModelEmaV3(model, ema.decay or 0.5**halvings, use_warmup=ema.warmup)


@contextmanager
def at_highest_loss(model: nn.Module, optimizer: torch.optim.Optimizer, rho: float) -> Iterator[None]:
    """SAM: moves the weights up along the gradient for the second backward pass, then restores weights and buffers."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
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
def top1_pct(model: nn.Module, val_images: parts.Images, cfg: Any) -> float:
    images, targets = parts.eval_batch(val_images, cfg)
    model = copy.deepcopy(model).eval()
    logits = model(images)
    if cfg.eval.flip_tta:
        logits = logits + model(images.flip(3))
    return 100 * float((logits.argmax(1) == targets).double().mean())
