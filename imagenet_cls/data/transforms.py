"""Transforms on uint8 tensors, in the workers.

Crop, flips, policy, color jitter, grayscale; resize for evaluation.

Cast and normalization happen on the device (`device`), and so does erasing: only its boxes are
drawn here.
"""

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data.constants import IMAGENET_DEFAULT_MEAN
from torch.nn.functional import interpolate, pad
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from imagenet_cls.config.schema import (
    AugmentConfig,
    ErasingConfig,
    EvalConfig,
    ProgressiveConfig,
    Size,
    height_width,
)
from imagenet_cls.data.decode import MAX_PIXELS
from imagenet_cls.data.policies import build_policy, to_pil_image
from imagenet_cls.data.turbojpeg import Box
from imagenet_cls.errors import DataError
from imagenet_cls.seeding import seed_generators

# "nearest" is Pillow's, which torch calls nearest-exact (ties aside); torch's own `nearest` is off
# by half a pixel.
INTERPOLATIONS = {
    "nearest": InterpolationMode.NEAREST_EXACT,
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
}
RANDOM_INTERPOLATIONS = ("bilinear", "bicubic")
# Upper bound of half the width of an antialiasing filter, in pixels of the smaller image.
_SUPPORTS = {"nearest": 1.0, "bilinear": 1.0, "bicubic": 2.0}
HAS_AVX2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
# Attempts to draw a box that is smaller than the image; 10 as in timm.
BOX_ATTEMPTS = 10


def size_px_at(config: AugmentConfig, epoch: int) -> Size:
    """Size of the training images of epoch `epoch` (from 0): `augment.size_px`, or with progressive
    resizing a side.

    Interpolated and rounded to a multiple of `multiple_px` as in FFCV's `rn50_train.py`.
    """
    if config.progressive.epochs is None:
        return config.size_px
    return int(_sides_at(config.progressive, np.array([epoch]))[0])


def sizes_px(config: AugmentConfig) -> list[Size]:
    """All sizes of a run's training images, ascending."""
    points = config.progressive
    if points.epochs is None:
        return [config.size_px]
    return np.unique(_sides_at(points, np.arange(math.ceil(points.epochs[-1]) + 1))).tolist()


def _sides_at(config: ProgressiveConfig, epochs: NDArray[np.integer]) -> NDArray[np.integer]:
    assert config.epochs is not None and config.sizes_px is not None
    sizes = np.interp(epochs, config.epochs, config.sizes_px)
    return np.rint(sizes / config.multiple_px).astype(np.int64) * config.multiple_px


class TrainTransform:
    """From a decoded image, uint8 (3, H, W), to its splits, each uint8 (C, *size). size:
    `size_px_at` the epoch. C: 3, or 1 if `mean` has one number: gray.

    Order: crop and resize as `augment.crop` says, horizontal flip, vertical flip, policy, color
    jitter, grayscale, as in torchvision and timm (which omits color jitter beside most policies).
    Draws the same numbers as torchvision's v2, in the same order, from torch's default CPU
    generator. Resizing is antialiased.

    Several splits, as in timm's AugMixDataset, share one crop and its flips; the first has no other
    transform.
    """

    def __init__(self, config: AugmentConfig, mean: Sequence[float] = IMAGENET_DEFAULT_MEAN):
        """mean: per channel, of values scaled to 0..1; timm's policies fill empty corners with
        it.
        """
        self.augment = config
        self.channels = len(mean)
        self.splits = config.splits
        # Built for all sizes at once: a policy that draws in its constructor must not draw from a
        # sample's generators.
        sizes = [height_width(size_px) for size_px in sizes_px(config)]
        self.policies = {size: build_policy(config, min(size), mean) for size in sizes}
        # float32, as in torchvision
        self.log_ratio: list[float] = torch.tensor(config.ratio).log().tolist()
        jitter = config.color_jitter
        amounts = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        self.jitter = v2.ColorJitter(*amounts) if any(amounts) and jitter.prob > 0 else None

    def __call__(
        self,
        image: torch.Tensor,
        epoch: int,
        keys: Sequence[int],
        crop: Box | None = None,
    ) -> list[tuple[torch.Tensor, list[Box]]]:
        """The splits, each with the boxes to erase. crop: None to draw it.

        keys: one for each split. The caller has seeded the default generators with the first one.
        """
        assert len(keys) == self.splits, (keys, self.splits)
        base = self.crop_and_flip(image, epoch, crop)
        if self.splits == 1:
            return [self.color_and_boxes(base)]
        splits: list[tuple[torch.Tensor, list[Box]]] = [(base, [])]
        for key in keys[1:]:
            seed_generators(key)
            splits.append(self.color_and_boxes(base))
        return splits

    def color_and_boxes(self, image: torch.Tensor) -> tuple[torch.Tensor, list[Box]]:
        """The image after `color_transforms`, and its boxes to erase."""
        image = self.color_transforms(image)
        erasing = self.augment.erasing
        return image, draw_boxes(erasing, list(image.shape[1:])) if erasing.prob > 0 else []

    def crop_and_flip(
        self,
        image: torch.Tensor,
        epoch: int,
        crop: Box | None = None,
    ) -> torch.Tensor:
        """uint8 (3, H, W) -> uint8 (C, *size)"""
        augment = self.augment
        size = height_width(size_px_at(augment, epoch))
        top, left, height, width = crop or self.draw_crop(*image.shape[1:])
        interpolation: str = augment.interpolation
        if interpolation == "random":
            interpolation = RANDOM_INTERPOLATIONS[int(torch.randint(2, ()))]
        if (height, width) != image.shape[1:]:
            image = image.narrow(1, top, height).narrow(2, left, width)
        image = to_channels(image, self.channels)
        image = resize(image, size, interpolation)
        if augment.crop == "pad_crop":
            image = self.pad_and_crop(image)
        if draw_bernoulli(augment.hflip_prob):
            image = image.flip(2)
        if draw_bernoulli(augment.vflip_prob):
            image = image.flip(1)
        return image

    def pad_and_crop(self, image: torch.Tensor) -> torch.Tensor:
        """A random crop of the padded image, of the image's size: the same draws and pixels as of
        `v2.RandomCrop`, in less time.
        """
        pad_px = self.augment.pad_px
        if pad_px == 0:
            return image
        top, left = torch.randint(2 * pad_px + 1, (2,)).tolist()
        if self.augment.pad_mode == "constant":  # negative padding crops
            down, right = pad_px - top, pad_px - left
            return pad(image, [right, -right, down, -down])
        height, width = image.shape[1:]
        image = F.pad(image, [pad_px], padding_mode=self.augment.pad_mode)
        return image[:, top : top + height, left : left + width]

    def draw_crop(self, height: int, width: int) -> Box:
        """A random crop, from the draws of `v2.RandomResizedCrop`, in less time; else the whole
        image, without draws.

        If ten crops do not fit, it is the largest centered crop with a ratio within the bounds.
        """
        if self.augment.crop != "random_resized":
            return Box(0, 0, height, width)
        real = torch.empty(())
        whole = torch.empty((), dtype=torch.int64)
        for _ in range(10):
            area = height * width * real.uniform_(*self.augment.scale).item()
            ratio = real.uniform_(*self.log_ratio).exp_().item()
            crop_width = round(math.sqrt(area * ratio))
            crop_height = round(math.sqrt(area / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(whole.random_(height - crop_height + 1))
                left = int(whole.random_(width - crop_width + 1))
                return Box(top, left, crop_height, crop_width)
        low, high = self.augment.ratio
        ratio = min(max(width / height, low), high)
        crop_width = min(width, round(height * ratio))
        crop_height = min(height, round(width / ratio))
        top = (height - crop_height) // 2
        left = (width - crop_width) // 2
        return Box(top, left, max(crop_height, 1), max(crop_width, 1))

    def color_transforms(self, image: torch.Tensor) -> torch.Tensor:
        """Policy (which may also shear and translate), color jitter, grayscale: uint8 (C, *size) ->
        the same.
        """
        policy = self.policies[image.shape[1], image.shape[2]]
        if policy is not None:
            image = policy(image)
        jitter_prob = self.augment.color_jitter.prob
        if self.jitter is not None and (jitter_prob == 1 or draw_bernoulli(jitter_prob)):
            # with channels-last memory, some sums round differently
            image = self.jitter(image.contiguous())
        if draw_bernoulli(self.augment.grayscale_prob):
            image = F.rgb_to_grayscale(image, num_output_channels=self.channels)
        return image


def to_channels(image: torch.Tensor, channels: int) -> torch.Tensor:
    """uint8 (3, H, W) -> uint8 (channels, H, W): unchanged for 3; for 1 gray, as by Pillow's
    `convert("L")`.
    """
    if channels == 3:
        return image
    if image.stride(0) == 0:  # an expanded gray image, which Pillow would not change
        return image[:1]
    return torch.from_numpy(np.array(to_pil_image(image).convert("L")))[None]


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: str,
) -> torch.Tensor:
    """uint8 (C, H, W) -> uint8 (C, *size): torchvision's `F.resize` with antialiasing, the same
    bits, in less time.

    torch's AVX2 kernel is fastest on channels-last memory without gaps; it converts any other crop
    to planes first.
    """
    if image.shape[1:] == tuple(size):
        return image
    size = list(size)
    is_channels_last = image.stride(0) == 1  # as decoders return it
    if HAS_AVX2 and is_channels_last and interpolation in RANDOM_INTERPOLATIONS:
        images = image.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
        return interpolate(images, size, mode=interpolation, antialias=True)[0]
    return F.resize(image, size, interpolation=INTERPOLATIONS[interpolation], antialias=True)


def draw_bernoulli(prob: float) -> bool:
    """True with this probability, drawn as by torchvision's v2; nothing is drawn for 0."""
    return prob > 0 and torch.rand(1).item() < prob


def draw_boxes(config: ErasingConfig, size_px: Size) -> list[Box]:
    """At most max_count boxes for one image. A box that fits in no attempt is left out.

    Draws the same numbers as timm's RandomErasing, in its order, from `random`'s default generator.
    Unlike algorithm 1 of Zhong et al., "Random Erasing Data Augmentation", 2017, it draws the
    logarithm of the aspect ratio uniformly, and not the ratio itself.
    """
    if random.random() > config.prob:
        return []
    boxes = []
    count = random.randint(1, config.max_count) if config.max_count > 1 else 1
    rows, columns = height_width(size_px)
    log_ratio = [math.log(bound) for bound in config.ratio]
    for _ in range(count):
        for _ in range(BOX_ATTEMPTS):
            area = random.uniform(*config.scale) * rows * columns / count
            ratio = math.exp(random.uniform(*log_ratio))
            height = round(math.sqrt(area * ratio))
            width = round(math.sqrt(area / ratio))
            if height < rows and width < columns:
                top = random.randint(0, rows - height)
                left = random.randint(0, columns - width)
                boxes.append(Box(top, left, height, width))
                break
    return boxes


class EvalTransform:
    """Resize as `eval.mode` says, then crop the center: uint8 (3, H, W) -> uint8 (C, *crop_px).

    `crop` resizes the short side to resize_px, `pad` the long side, and `squash` both sides. The
    default of resize_px is floor(crop_px / crop_pct), as in timm's `transforms_imagenet_eval`. For
    a [height, width], `crop` makes the image just cover both, and `pad` fits it into both.

    A smaller image gets a border, of zeros unless `pad` fills it with the mean.

    mean: per channel, of values scaled to 0..1. C: 3, or 1 if it has one number.
    """

    def __init__(self, config: EvalConfig, mean: Sequence[float] = IMAGENET_DEFAULT_MEAN):
        self.mode = config.mode
        self.channels = len(mean)
        self.fill = [round(255 * value) if config.mode == "pad" else 0 for value in mean]
        self.crop = height_width(config.crop_px)
        height, width = (
            config.resize_px or math.floor(side / config.crop_pct) for side in self.crop
        )
        self.resized = height, width
        self.interpolation: str = config.interpolation

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """The result depends only on the pixels in `needed_region`."""
        image = to_channels(image, self.channels)
        size = self.resized_size(*image.shape[1:])
        top, left = map(first_of_crop, size, self.crop)
        height, width = self.crop
        image = resize(image, size, self.interpolation)
        image = image[:, top : top + height, left : left + width]
        rows = height - image.shape[1]
        columns = width - image.shape[2]
        if rows or columns:
            borders = [columns // 2, rows // 2, (columns + 1) // 2, (rows + 1) // 2]
            image = F.pad(image, borders, fill=self.fill)
        return image

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the resized image, as timm computes them; not below 1. Raises
        DataError with the reason, without a name, for more than `MAX_PIXELS` pixels.
        """
        rows, columns = self.resized
        if self.mode == "squash":
            return rows, columns
        if self.mode == "pad" or rows != columns:
            scales = height / rows, width / columns
            scale = max(scales) if self.mode == "pad" else min(scales)
            rows, columns = max(round(height / scale), 1), max(round(width / scale), 1)
        elif height <= width:  # torchvision's resize of the short side
            columns = int(rows * width / height)
        else:
            rows = int(rows * height / width)
        if rows * columns > MAX_PIXELS:
            raise DataError(
                f"its {height} x {width} pixels would be resized to {rows} x {columns}, more than "
                f"the {MAX_PIXELS} allowed",
                "Replace the file.",
            )
        return rows, columns

    def needed_region(self, height: int, width: int) -> Box:
        """A box that contains all pixels of an image of this size that the resized center crop
        depends on.

        The whole image is resized, undefined pixels included: resizing only the box would use other
        filter weights.
        """
        resized_height, resized_width = self.resized_size(height, width)
        top, bottom = self._needed_range(height, resized_height, self.crop[0])
        left, right = self._needed_range(width, resized_width, self.crop[1])
        return Box(top, left, bottom - top, right - left)

    def _needed_range(self, side: int, resized: int, crop: int) -> tuple[int, int]:
        """The rows or columns that the crop depends on: first, and last plus one."""
        scale = side / resized
        # one more pixel for rounding
        support = _SUPPORTS[self.interpolation] * max(scale, 1.0) + 1.0
        first = first_of_crop(resized, crop)
        begin = scale * (first + 0.5) - support
        end = scale * (first + crop - 0.5) + support
        return max(math.floor(begin), 0), min(math.ceil(end), side)


def first_of_crop(side: int, crop: int) -> int:
    """The first row or column of a centered crop, as `F.center_crop` rounds."""
    return max(round((side - crop) / 2.0), 0)
