"""What happens to an image between its file and the batch: crops, flips, colour, all on uint8 tensors.

Owns geometry and colour. Refuses floats: the cast and the normalisation happen on the device (`device`). Called by
`loader` in the workers. `TrainTransform` draws first and then applies: draws are the only part that needs the default
generators, so that the application may later move to other threads.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from imagenet_cls.config.schema import AugmentConfig, EvalConfig

Transform = Callable[[torch.Tensor], torch.Tensor]

# "nearest" is Pillow's, which torch calls nearest-exact (ties aside); torch's own `nearest` is off by half a pixel.
INTERPOLATIONS = {
    "nearest": InterpolationMode.NEAREST_EXACT,
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
}


class TrainTransform:
    """Random crop, flips and colour jitter: uint8 (3, H, W) -> uint8 (3, size_px, size_px), contiguous.

    The draws are torchvision's (v2), from torch's default CPU generator, in this order: crop, horizontal flip,
    vertical flip, colour. What cannot happen (probability 0, no jitter) draws nothing. Resizing is always antialiased,
    as Pillow's is.
    """

    def __init__(self, augment: AugmentConfig):
        self.size = [augment.size_px, augment.size_px]
        self.interpolation = INTERPOLATIONS[augment.interpolation]
        self.crop = v2.RandomResizedCrop(self.size, scale=tuple(augment.scale), ratio=tuple(augment.ratio))
        self.hflip_prob, self.vflip_prob = augment.hflip_prob, augment.vflip_prob
        jitter = augment.color_jitter
        amounts = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        self.jitter = v2.ColorJitter(*amounts) if any(amounts) else None

    def draw(self, image: torch.Tensor) -> dict[str, Any]:
        """All random choices for an image of this size; its pixels are not looked at."""
        return {
            "crop": self.crop.make_params([image]),
            "hflip": self.hflip_prob > 0 and torch.rand(1).item() < self.hflip_prob,
            "vflip": self.vflip_prob > 0 and torch.rand(1).item() < self.vflip_prob,
            "jitter": self.jitter.make_params([image]) if self.jitter else None,
        }

    def apply(self, image: torch.Tensor, draws: dict[str, Any]) -> torch.Tensor:
        """Apply what `draw` decided. Draws nothing."""
        image = F.resized_crop(image, **draws["crop"], size=self.size, interpolation=self.interpolation, antialias=True)
        if draws["hflip"]:
            image = F.horizontal_flip(image)
        if draws["vflip"]:
            image = F.vertical_flip(image)
        if self.jitter is not None:
            image = self.jitter.transform(image, draws["jitter"])
        return image.contiguous()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return self.apply(image, self.draw(image))


class EvalTransform:
    """Resize the short side, then cut out the centre: uint8 (3, H, W) -> uint8 (3, crop_px, crop_px), contiguous.

    The short side becomes resize_px, or floor(crop_px / crop_pct) as timm has it. Nothing is drawn.
    """

    def __init__(self, config: EvalConfig):
        self.resize_px = config.resize_px or math.floor(config.crop_px / config.crop_pct)
        self.crop_px = config.crop_px
        self.interpolation = INTERPOLATIONS[config.interpolation]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        image = F.resize(image, [self.resize_px], interpolation=self.interpolation, antialias=True)
        return F.center_crop(image, [self.crop_px, self.crop_px]).contiguous()


def train_transform(augment: AugmentConfig) -> Transform:
    """The transform of a training image, as the config's `augment` section says. See `TrainTransform`."""
    return TrainTransform(augment)


def eval_transform(config: EvalConfig) -> Transform:
    """The transform of an image in evaluation, as the config's `eval` section says. See `EvalTransform`."""
    return EvalTransform(config)
