"""The parts of `plain_loop`: timm's, torch's and torchvision's own, as far as the quick recipes use them.

The package does not build any of them; only the numbers come from its config.
"""

import math
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, JsdCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler, StepLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torchvision import transforms

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALISED = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
Images = list[tuple[Image.Image, int]]


def samples_per_epoch(num_images: int, multiple: int | None) -> int:
    return num_images // multiple * multiple if multiple else num_images


def eval_batch(images: Images, cfg: Any) -> tuple[Tensor, Tensor]:
    """All validation images as one batch."""
    resize_px = cfg.eval.resize_px or math.floor(cfg.eval.crop_px / cfg.eval.crop_pct)
    mode = transforms.InterpolationMode(cfg.eval.interpolation)
    resize = [transforms.Resize(resize_px, mode), transforms.CenterCrop(cfg.eval.crop_px)]
    prepare = transforms.Compose([*resize, *NORMALISED])
    return torch.stack([prepare(image) for image, _ in images]), torch.tensor([target for _, target in images])


def mixup(cfg: Any, num_classes: int) -> Mixup | None:
    mix = cfg.mix
    if not mix.mixup_alpha and not mix.cutmix_alpha:
        return None
    options = {"label_smoothing": cfg.loss.label_smoothing, "num_classes": num_classes}
    return Mixup(mix.mixup_alpha, mix.cutmix_alpha, None, mix.prob, mix.switch_prob, mix.mode, **options)


def loss_function(cfg: Any, mixes: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """timm's and torch's. Mixed targets come smoothed from Mixup."""
    loss, smoothing = cfg.loss, cfg.loss.label_smoothing
    weights = None if loss.class_weights is None else torch.tensor(loss.class_weights)
    if loss.name == "jsd":
        return JsdCrossEntropy(cfg.augment.splits, smoothing=smoothing)
    if loss.name == "bce":
        return BinaryCrossEntropy(0.0 if mixes else smoothing, **loss.kwargs)
    if loss.name == "focal":
        assert weights is not None

        def focal(logits: Tensor, targets: Tensor) -> Tensor:
            chosen = functional.softmax(logits, 1).gather(1, targets[:, None])[:, 0]
            balance = weights[targets] / weights.mean()
            return (-balance * (1 - chosen) ** loss.kwargs["gamma"] * chosen.log()).mean()

        return focal
    return SoftTargetCrossEntropy() if mixes else nn.CrossEntropyLoss(weights, label_smoothing=smoothing)


def parameter_groups(model: nn.Module, optimizer: Any) -> list[dict[str, Any]]:
    """All alike; norms spared, as torchvision's script does; or timm's, with layers or without."""
    decay = optimizer.weight_decay
    spared: Any = getattr(model, "no_weight_decay", set)()
    if optimizer.layer_decay is not None:
        return param_groups_layer_decay(model, decay, spared, layer_decay=optimizer.layer_decay)
    if optimizer.bias_weight_decay is not None:
        return param_groups_weight_decay(model, decay, no_weight_decay_list=spared)
    norms = [p for module in model.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()]
    if optimizer.norm_weight_decay is None:
        norms = []
    known = set(norms)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in known:
            scale = next((factor for pattern, factor in optimizer.lr_scales.items() if fnmatch(name, pattern)), 1.0)
            groups.setdefault(scale, []).append(parameter)
    found = [{"params": params, "weight_decay": decay, "lr_scale": scale} for scale, params in groups.items()]
    return [*found, {"params": norms, "weight_decay": optimizer.norm_weight_decay}] if norms else found


def build_optimizer(model: nn.Module, optimizer: Any, lr: float) -> torch.optim.Optimizer:
    groups = parameter_groups(model, optimizer)
    torchs: dict[str, type[torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
    }
    if optimizer.name in torchs:
        return torchs[optimizer.name](groups, lr=lr, **optimizer.kwargs)
    name = optimizer.name.removeprefix("timm:")
    return create_optimizer_v2(groups, name, lr=lr, weight_decay=optimizer.weight_decay, **optimizer.kwargs)


def schedule(
    optimizer: torch.optim.Optimizer, cfg: Any, lr: float, per_epoch: int
) -> Callable[[int, list[float]], None]:
    """Called before each step, with its number and the top-1s so far: sets the optimizer's rates."""
    name, kwargs = cfg.schedule.name, dict(cfg.schedule.kwargs)
    unit = 1 if cfg.schedule.by_epoch else per_epoch
    warmup_steps = round(cfg.schedule.warmup_epochs * unit)
    warmup_lr = cfg.schedule.warmup_start_lr
    if warmup_lr is None:
        warmup_lr = lr * cfg.schedule.warmup_start_factor
    length = cfg.train.epochs * unit - round(cfg.schedule.cooldown_epochs * unit)
    if cfg.schedule.warmup_prefix:
        length -= warmup_steps

    if name in ("cosine", "step"):
        common = {"warmup_t": warmup_steps, "warmup_lr_init": warmup_lr, "warmup_prefix": cfg.schedule.warmup_prefix}
        common["t_in_epochs"] = cfg.schedule.by_epoch
        timms: Any
        if name == "cosine":
            timms = CosineLRScheduler(optimizer, length, kwargs.get("min_lr", 0.0), **common)
        else:
            timms = StepLRScheduler(optimizer, kwargs["every_epochs"] * unit, kwargs["gamma"], **common)
        return lambda step, _: timms.step(step // per_epoch) if cfg.schedule.by_epoch else timms.step_update(step)

    if name == "plateau":
        plateau = lr_scheduler.ReduceLROnPlateau(
            optimizer, "max", kwargs["gamma"], kwargs["patience"], threshold=kwargs["threshold"]
        )

        def after_evaluations(step: int, top1s: list[float]) -> None:
            if step <= warmup_steps:  # torch's has none of its own
                for group in optimizer.param_groups:
                    group["lr"] = warmup_lr + (lr - warmup_lr) * step / warmup_steps
            elif step % per_epoch == 0:
                plateau.step(top1s[-1])

        return after_evaluations

    assert not warmup_steps
    if name == "one_cycle":
        momenta = {"base_momentum": kwargs.pop("min_momentum"), "max_momentum": kwargs.pop("max_momentum")}
        torchs: Any = lr_scheduler.OneCycleLR(optimizer, lr, length, **kwargs, **momenta)
    else:
        assert name == "piecewise"
        points, factors = kwargs["epochs"], kwargs["factors"]
        torchs = lr_scheduler.LambdaLR(optimizer, lambda step: float(np.interp(step / per_epoch, points, factors)))
    return lambda step, _: torchs.step() if step else None
