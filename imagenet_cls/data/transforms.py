"""What happens to an image between its file and the batch: crops, flips, policies, colour, all on uint8 tensors.

Owns geometry and colour, their order, and which view of an image gets which. Refuses floats: the cast and the
normalisation happen on the device (`device`), and so does erasing, of which only the boxes are drawn here. Called by
`loader` in the workers. What is ours draws first and then applies: draws are the only part that needs the default
generators, so that the application may later move to other threads. A policy (`policies`) draws while it is applied.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from imagenet_cls.config.schema import AugmentConfig, EvalConfig
from imagenet_cls.data.erasing import draw_boxes
from imagenet_cls.data.policies import build_policy
from imagenet_cls.data.resolution import size_px_at, sizes_px
from imagenet_cls.seeding import seed_generators

Transform = Callable[[torch.Tensor], torch.Tensor]

# "nearest" is Pillow's, which torch calls nearest-exact (ties aside); torch's own `nearest` is off by half a pixel.
INTERPOLATIONS = {
    "nearest": InterpolationMode.NEAREST_EXACT,
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
}
RANDOM_INTERPOLATIONS = ("bilinear", "bicubic")


class View(NamedTuple):
    """One view of an image. image: uint8 (3, S, S), contiguous. boxes: int32 (n, 4) to erase; None: no erasing."""

    image: torch.Tensor
    boxes: torch.Tensor | None


class TrainTransform:
    """From a decoded image, uint8 (3, H, W), to the views that a batch gets of it, each uint8 (3, S, S), contiguous.

    In this order: random crop, horizontal flip, vertical flip, policy, colour jitter, grey; S is the side for the epoch
    (`resolution`). That is torchvision's order and timm's, where timm leaves colour jitter out beside most policies:
    a config says so by leaving it at 0. The draws are torchvision's (v2), from torch's default CPU generator, in the
    same order, and `interpolation: random` draws between crop and flips; the policy draws as it likes. What cannot
    happen (probability 0, no jitter) draws nothing. Resizing is always antialiased, as Pillow's is.

    With `splits`, as in timm's AugMixDataset, all views share one crop and its flips; the first has nothing else.
    """

    def __init__(self, augment: AugmentConfig, mean: Sequence[float] = IMAGENET_DEFAULT_MEAN):
        """mean: per channel, of values scaled to 0..1; what timm's policies fill empty corners with."""
        self.augment = augment
        self.splits = augment.splits
        # For every side from the beginning: a policy that draws while it is made must not do so amid a sample.
        self.policies = {side: build_policy(augment, side, mean) for side in sizes_px(augment)}
        self.crop = v2.RandomResizedCrop(augment.size_px, scale=tuple(augment.scale), ratio=tuple(augment.ratio))
        jitter = augment.color_jitter
        amounts = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        self.jitter = v2.ColorJitter(*amounts) if any(amounts) and jitter.prob > 0 else None

    def __call__(self, image: torch.Tensor, epoch: int = 0) -> torch.Tensor:
        """The whole way, as a batch of single views has it."""
        return self.colour(self.crop_and_flip(image, epoch))

    def views(self, image: torch.Tensor, epoch: int, keys: Sequence[int]) -> list[View]:
        """`splits` views, with the boxes to erase in each. keys: one for each view.

        The default generators are as seeded with the first key, and are seeded with each other one before its view is
        made. The boxes of a view are drawn last; the first of several views has none.
        """
        assert len(keys) == self.splits, (keys, self.splits)
        base = self.crop_and_flip(image, epoch)
        if self.splits == 1:
            return [self._view(base)]
        boxes = torch.zeros(self.augment.erasing.max_count, 4, dtype=torch.int32)
        views = [View(base, boxes if self.augment.erasing.prob > 0 else None)]
        for key in keys[1:]:
            seed_generators(key)
            views.append(self._view(base))
        return views

    def _view(self, base: torch.Tensor) -> View:
        image = self.colour(base)
        erasing = self.augment.erasing
        return View(image, draw_boxes(erasing, image.shape[-1]) if erasing.prob > 0 else None)

    def crop_and_flip(self, image: torch.Tensor, epoch: int) -> torch.Tensor:
        """uint8 (3, H, W) -> uint8 (3, S, S), S being the side for `epoch`."""
        return self.apply(image, self.draw(image), size_px_at(self.augment, epoch))

    def draw(self, image: torch.Tensor) -> dict[str, Any]:
        """Crop, resampling and flips for an image of this size; its pixels are not looked at."""
        augment = self.augment
        crop = self.crop.make_params([image])
        sides = {name: max(crop[name], 1) for name in ("height", "width")}  # 0 for ratios that no image can have
        return {
            "crop": crop | sides,
            "interpolation": RANDOM_INTERPOLATIONS[int(torch.randint(2, ()))]
            if augment.interpolation == "random"
            else augment.interpolation,
            "hflip": happens(augment.hflip_prob),
            "vflip": happens(augment.vflip_prob),
        }

    def apply(self, image: torch.Tensor, draws: dict[str, Any], size_px: int) -> torch.Tensor:
        """Apply what `draw` decided. Draws nothing."""
        image = F.resized_crop(
            image,
            **draws["crop"],
            size=[size_px, size_px],
            interpolation=INTERPOLATIONS[draws["interpolation"]],
            antialias=True,
        )
        if draws["hflip"]:
            image = F.horizontal_flip(image)
        if draws["vflip"]:
            image = F.vertical_flip(image)
        return image.contiguous()

    def colour(self, image: torch.Tensor) -> torch.Tensor:
        """Policy (which may shear and shift, too), colour jitter and grey: uint8 (3, S, S) -> uint8 (3, S, S)."""
        policy = self.policies[image.shape[-1]]
        if policy is not None:
            image = policy(image)
        jitter_prob = self.augment.color_jitter.prob
        if self.jitter is not None and (jitter_prob == 1 or happens(jitter_prob)):
            image = self.jitter.transform(image, self.jitter.make_params([image]))
        if happens(self.augment.grayscale_prob):
            image = F.rgb_to_grayscale(image, num_output_channels=3)
        return image.contiguous()


def happens(prob: float) -> bool:
    """Draw whether something of this probability happens, as torchvision's v2 does; for 0 nothing is drawn."""
    return prob > 0 and torch.rand(1).item() < prob


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


def train_transform(augment: AugmentConfig, mean: Sequence[float] = IMAGENET_DEFAULT_MEAN) -> TrainTransform:
    """The transform of a training image, as the config's `augment` section says. See `TrainTransform`."""
    return TrainTransform(augment, mean)


def eval_transform(config: EvalConfig) -> Transform:
    """The transform of an image in evaluation, as the config's `eval` section says. See `EvalTransform`."""
    return EvalTransform(config)
