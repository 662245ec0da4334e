"""Augmentation policies: timm's by their strings, torchvision's by name, or a user's own.

A policy draws from the default generators of torch, `random` and numpy, which are seeded for each
sample.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment as timm_policies
from timm.data.constants import IMAGENET_DEFAULT_MEAN
from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from imagenet_cls.config.schema import AugmentConfig
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.lookup import (
    NameNotFoundError,
    component,
    did_you_mean,
    import_factory,
    is_factory_name,
    kwargs_problems,
)
from imagenet_cls.text import describe_type

Policy = Callable[[Tensor], Tensor]

TORCHVISION = "torchvision:"
FROM_TORCHVISION: dict[str, Callable[..., Any]] = {
    "torchvision:rand_augment": v2.RandAugment,
    "torchvision:trivial_augment_wide": v2.TrivialAugmentWide,
    "torchvision:auto_augment": v2.AutoAugment,
    "torchvision:aug_mix": v2.AugMix,
}

FROM_TIMM = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")


def build_policy(
    config: AugmentConfig, size_px: int, mean: Sequence[float] = IMAGENET_DEFAULT_MEAN
) -> Policy | None:
    """The policy of the section for images whose short side is size_px: uint8 (C, H, W) -> the
    same; None without one.

    mean: per channel (C: 3 or 1), of values scaled to 0..1; timm fills empty corners with it. The
    policy interpolates as the crop does; for `random` timm draws for each operation, and
    torchvision takes bilinear. timm's translations are at most 0.45 of the side
    (`timm.data.transforms_factory`). Expects a config without `policy_problems`. Raises ConfigError
    for settings and arguments that the library rejects, and what a user's factory raises.
    """
    name = config.policy
    if name is None:
        return None
    policy: Policy
    with component("augment.policy", name, config.policy_kwargs):
        if name in FROM_TORCHVISION:
            policy = OnPillow(_torchvision_policy(name, config))
        elif is_factory_name(name):
            policy = import_factory(name)(**config.policy_kwargs)
        else:
            policy = OnPillow(_timm_policy(name, config.interpolation, size_px, mean))
    return CheckedPolicy(name, policy)


class CheckedPolicy:
    """A policy whose images are checked.

    Called with a tensor. Raises ConfigError if a library's policy fails, or if the result is no
    uint8 tensor of the same shape.
    """

    def __init__(self, name: str, policy: Policy):
        self.name = name
        self.policy = policy

    def __call__(self, image: Tensor) -> Tensor:
        if not isinstance(self.policy, OnPillow):  # a user's, which may write into its argument
            image = image.clone(memory_format=torch.contiguous_format)
        with component("augment.policy", self.name, {}):
            result: Any = self.policy(image)
        is_tensor = isinstance(result, Tensor)
        if is_tensor and result.dtype == torch.uint8 and result.shape == image.shape:
            return result
        raise ConfigError(
            [
                f"augment.policy: {self.name!r} returned {describe_type(result)} for an image; "
                f"return uint8 of {tuple(image.shape)}, as given"
            ]
        )


class OnPillow:
    """A policy for Pillow images, applied to tensors."""

    def __init__(self, policy: Callable[[Image.Image], Image.Image]):
        self.policy = policy

    def __call__(self, image: Tensor) -> Tensor:
        changed = np.array(self.policy(to_pil_image(image)))
        return torch.from_numpy(changed.reshape(*image.shape[1:], len(image))).permute(2, 0, 1)


def to_pil_image(image: Tensor) -> Image.Image:
    """uint8 (3, H, W) or (1, H, W) -> a Pillow image of mode RGB or L."""
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels if len(image) == 3 else pixels[..., 0])


def _timm_policy(name: str, interpolation: str, size_px: int, mean: Sequence[float]) -> Any:
    settings: dict[str, Any] = {
        "translate_const": int(size_px * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in mean),
    }
    if interpolation != "random":
        settings["interpolation"] = Image.Resampling[interpolation.upper()]
    family = name.partition("-")[0]
    if family == "rand":
        policy = timm_policies.rand_augment_transform(name, settings)
    elif family == "augmix":
        policy = timm_policies.augment_and_mix_transform(name, {**settings, "translate_pct": 0.3})
    else:
        policy = timm_policies.auto_augment_transform(name, settings)
    for operation in timm_operations(policy):
        if operation.aug_fn is timm_policies.posterize:
            operation.aug_fn = posterize
    return policy


def timm_operations(policy: Any) -> Iterator[timm_policies.AugmentOp]:
    """All operations of a timm policy."""
    for entry in policy.policy if isinstance(policy, timm_policies.AutoAugment) else policy.ops:
        yield from entry if isinstance(entry, list) else [entry]


def posterize(image: Image.Image, bits_to_keep: int, **others: Any) -> Image.Image:
    """timm's posterize, which sometimes draws 0 bits: black, as in Pillow up to 12; from 13 on,
    Pillow raises.
    """
    if bits_to_keep < 1:
        return Image.new(image.mode, image.size)
    return timm_policies.posterize(image, bits_to_keep)


def _torchvision_policy(name: str, config: AugmentConfig) -> Any:
    kwargs = dict(config.policy_kwargs)
    by_crop = "bilinear" if config.interpolation == "random" else config.interpolation
    kwargs["interpolation"] = InterpolationMode(kwargs.get("interpolation", by_crop))
    if isinstance(kwargs.get("alpha"), int):
        # AugMix draws from a Dirichlet distribution, which needs a float
        kwargs["alpha"] = float(kwargs["alpha"])
    if "policy" in kwargs:
        kwargs["policy"] = AutoAugmentPolicy(kwargs["policy"])
    return FROM_TORCHVISION[name](**kwargs)


def policy_problems(config: AugmentConfig) -> list[Problem]:
    """All problems of `augment.policy` and `augment.policy_kwargs` that show without building the
    policy.
    """
    name = config.policy
    if name is None or (":" not in name and config.policy_kwargs):
        text = "is an argument of torchvision's policies and your own only"
        return [Problem(f"augment.policy_kwargs.{kwarg}", text) for kwarg in config.policy_kwargs]
    if ":" not in name:
        return _timm_policy_problems(name)
    if name.startswith(TORCHVISION) and name not in FROM_TORCHVISION:
        return [_unknown(name)]
    try:
        factory = FROM_TORCHVISION.get(name) or import_factory(name)
    except NameNotFoundError as error:
        return [Problem("augment.policy", str(error))]
    return kwargs_problems("augment.policy_kwargs", factory, config.policy_kwargs)


def _timm_policy_problems(name: str) -> list[Problem]:
    """An unknown family, or a setting without a number, which timm ignores; it raises for other
    settings that it does not know.
    """
    family, *settings = name.split("-")
    if family not in FROM_TIMM:
        return [_unknown(name)]
    for setting in settings:
        if setting != "tweights" and not re.search("[0-9]", setting):
            text = f"{setting!r} is not a setting of timm's {family!r}"
            return [Problem("augment.policy", text)]
    return []


def _unknown(name: str) -> Problem:
    names = [*FROM_TIMM, *FROM_TORCHVISION]
    hint = did_you_mean(name if ":" in name else name.partition("-")[0], names)
    allowed = f"(allowed: {', '.join(names)} or my_module:my_factory)"
    return Problem("augment.policy", f"unknown policy {name!r}{hint} {allowed}")
