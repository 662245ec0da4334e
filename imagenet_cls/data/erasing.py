"""Random erasing: where is drawn with the sample, in the worker; what is filled in is drawn on the device.

Owns `augment.erasing`. The boxes travel with the batch, and the colours come from the sample's key, so neither depends
on ranks, workers or where in a batch a sample lies. `draw_boxes` is called by `transforms` in the workers, `erase` once
for each micro-batch, on normalised floats, before anything is mixed.
"""

import math
import random
from typing import Literal

import torch
from torch import Tensor

from imagenet_cls.config.schema import ErasingConfig
from imagenet_cls.seeding import hash_key

# Boxes as long as the image, or longer, are drawn anew; after this many draws there is none (timm has 10 as well).
ATTEMPTS = 10


def draw_boxes(erasing: ErasingConfig, size_px: int) -> Tensor:
    """Boxes for one square image: int32 (max_count, 4) of top, left, height, width in pixels; zeros where none.

    The draws are those of timm's RandomErasing, in its order, from `random`'s default generator: whether at all; how
    many, where max_count allows more than one; for each box its area (share / how many), the logarithm of height /
    width, top and left. Zhong et al., "Random Erasing Data Augmentation", 2017, algorithm 1, which draws the ratio
    itself evenly and not its logarithm.
    """
    boxes = torch.zeros(erasing.max_count, 4, dtype=torch.int32)
    if random.random() > erasing.prob:
        return boxes
    count = random.randint(1, erasing.max_count) if erasing.max_count > 1 else 1
    for place in range(count):
        box = _draw_box(erasing, size_px, count)
        if box is not None:
            boxes[place] = torch.tensor(box, dtype=torch.int32)
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

    images: float (N, 3, H, W) on any device, normalised, so that zero is the mean colour. boxes: int32 (N, n, 4) as
    `draw_boxes` makes them, and keys: int64 (N,), the samples' keys, both on the CPU: they are bounds and seeds, and
    nothing waits for a GPU. mode: zeros (`const`), one normal colour for each box (`rand`) or each pixel (`pixel`), as
    timm names them. The same key gives the same colours on the same device type.
    """
    assert boxes.device.type == keys.device.type == "cpu" and len(images) == len(boxes) == len(keys)
    draws = torch.Generator(images.device)
    for image, image_boxes, key in zip(images, boxes.tolist(), keys.tolist(), strict=True):
        boxes_to_fill = [box for box in image_boxes if box[2] and box[3]]
        if boxes_to_fill and mode != "const":
            # Hashed once more: the worker's draws came from the key itself.
            draws.manual_seed(hash_key("erase", key))
        for top, left, height, width in boxes_to_fill:
            region = image[:, top : top + height, left : left + width]
            if mode == "const":
                region.zero_()
            else:
                shape = (len(image), 1, 1) if mode == "rand" else region.shape
                region.copy_(torch.empty(shape, dtype=images.dtype, device=images.device).normal_(generator=draws))
    return images
