"""Random erasing: colors by the sample's key alone, in place, and boxes that stay within the
image.
"""

import pytest
import torch

from imagenet_cls.config.schema import ErasingConfig, Size
from imagenet_cls.data.device import erase
from imagenet_cls.data.transforms import draw_boxes
from imagenet_cls.seeding import hash_key, seed_generators

MODES = ("const", "rand", "pixel")


def boxes_for(keys: list[int], erasing: ErasingConfig, size_px: Size) -> torch.Tensor:
    boxes = torch.zeros(len(keys), erasing.max_count, 4, dtype=torch.int32)
    for row, key in enumerate(keys):
        seed_generators(key)
        for number, box in enumerate(draw_boxes(erasing, size_px)):
            boxes[row, number] = torch.tensor(box)
    return boxes


@pytest.mark.parametrize("mode", MODES)
def test_erase_has_the_bits_of_boxes_one_after_another(mode: str) -> None:
    """In place. Also for pixels that are NaN, boxes that overlap, and images that are not square.
    The colors of a box are normal, and depend on the key of the sample alone.
    """
    keys = list(range(11, 19))
    boxes = boxes_for(keys, ErasingConfig(prob=0.7, max_count=3, scale=[0.2, 0.9]), [20, 31])
    images = torch.full((8, 3, 20, 31), torch.nan).contiguous(memory_format=torch.channels_last)
    expected = images.clone()
    for image, image_boxes, key in zip(expected, boxes.tolist(), keys, strict=True):
        draws = torch.Generator().manual_seed(hash_key("erase", key))
        for top, left, height, width in image_boxes:
            region = image[:, top : top + height, left : left + width]
            if mode == "const":
                region.zero_()
            elif height and width:
                size = (1, 1) if mode == "rand" else (height, width)
                region.copy_(torch.empty(3, *size).normal_(generator=draws))
    erased = erase(images, boxes, torch.tensor(keys), mode)
    assert erased is images and 0 < boxes.any(2).any(1).sum() < 8
    assert torch.equal(erased.isnan(), expected.isnan())
    assert torch.equal(erased.nan_to_num(), expected.nan_to_num())
