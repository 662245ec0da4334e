"""Random erasing: boxes are drawn with the sample, in the worker; the colours that fill them, on the device."""

import math
import random
from typing import Literal

import torch
from torch import Tensor

from imagenet_cls.config.schema import ErasingConfig
from imagenet_cls.seeding import hash_key

# A box as long as the image, or longer, is drawn again; after this many draws there is none (timm: 10 as well).
ATTEMPTS = 10


def draw_boxes(erasing: ErasingConfig, size_px: int) -> Tensor:
    """Boxes for one square image: int32 (max_count, 4) of top, left, height, width in pixels; zeros where none.

    The draws are those of timm's RandomErasing, in its order, from `random`'s default generator: whether at all; how
    many, where max_count allows more than one; for each box its area (share / how many), the logarithm of height /
    width, top and left. Zhong et al., "Random Erasing Data Augmentation", 2017, algorithm 1, which draws the ratio
    itself uniformly and not its logarithm.
    """
    boxes = torch.zeros(erasing.max_count, 4, dtype=torch.int32)
    if random.random() > erasing.prob:
        return boxes
    count = random.randint(1, erasing.max_count) if erasing.max_count > 1 else 1
    for number in range(count):
        box = _draw_box(erasing, size_px, count)
        if box is not None:
            boxes[number] = torch.tensor(box, dtype=torch.int32)
    return boxes


def _draw_box(erasing: ErasingConfig, size_px: int, count: int) -> tuple[int, int, int, int] | None:
    log_ratio = [math.log(bound) for bound in erasing.ratio]
    for _ in range(ATTEMPTS):
        area = random.uniform(*erasing.scale) * size_px * size_px / count
        ratio = math.exp(random.uniform(*log_ratio))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if height < size_px and width < size_px:
            return random.randint(0, size_px - height), random.randint(0, size_px - width), height, width
    return None


def erase(images: Tensor, boxes: Tensor, keys: Tensor, mode: Literal["const", "rand", "pixel"]) -> Tensor:
    """Fill the boxes of `images`, in place, and return them.

    images: float (N, 3, H, W) on any device, normalised, so that zero is the mean colour. boxes: int32 (N, n, 4) of
    `draw_boxes`, and keys: int64 (N,) of the samples, both on the CPU, so that nothing waits for a GPU. mode, as in
    timm: zeros (`const`), one normal colour for each box (`rand`) or for each pixel (`pixel`). The same key gives the
    same colours on the same device type.
    """
    assert boxes.device.type == keys.device.type == "cpu" and len(images) == len(boxes) == len(keys)
    draws = torch.Generator(images.device)
    for image, image_boxes, key in zip(images, boxes.tolist(), keys.tolist(), strict=True):
        boxes_to_fill = [box for box in image_boxes if box[2] and box[3]]
        if boxes_to_fill and mode != "const":
            draws.manual_seed(hash_key("erase", key))  # hashed again: the worker drew from the key itself
        for top, left, height, width in boxes_to_fill:
            region = image[:, top : top + height, left : left + width]
            if mode == "const":
                region.zero_()
            else:
                shape = (len(image), 1, 1) if mode == "rand" else region.shape
                region.copy_(torch.empty(shape, dtype=images.dtype, device=images.device).normal_(generator=draws))
    return images
