"""Policies, erasing and repeats against the pipelines that published recipes were trained with,
timm's and torchvision's: draw by draw, from the same seeds.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import transforms_imagenet_train
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from imagenet_cls.config.schema import AugmentConfig, ColorJitterConfig, ErasingConfig
from imagenet_cls.data.device import erase
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.transforms import TrainTransform, draw_boxes
from imagenet_cls.seeding import generator, seed_generators

SIZE = 32


@pytest.fixture(scope="module")
def photographs(photographs: list[Image.Image]) -> list[Image.Image]:
    """Parts of the two photographs, each 96 px square."""
    corners = np.random.default_rng(0).integers(0, 330, (50, 2)).tolist()
    return [
        photographs[i % 2].crop((left, top, left + 96, top + 96))
        for i, (left, top) in enumerate(corners)
    ]


@pytest.fixture(scope="module")
def squares(photographs: list[Image.Image]) -> list[Image.Image]:
    return [photograph.resize((SIZE, SIZE)) for photograph in photographs]


def timms_secondary(
    policy: str, interpolation: str, **options: Any
) -> Callable[[Image.Image], Image.Image]:
    """timm's transforms between the flips and the tensor: policy, color jitter, gray."""
    options = {"color_jitter": None, **options}
    return transforms_imagenet_train(
        SIZE, auto_augment=policy, interpolation=interpolation, separate=True, **options
    )[1]


@pytest.mark.parametrize(
    "policy",
    [
        "rand-m9-mstd0.5-inc1",
        "rand-m6-n3-mstd0.5",
        "rand-m20-mmax30-p1-t3aw",
        "augmix-m3-w3",
        "augmix-m5-d2-b1",
        "original",
        "originalr-mstd0.5",
        "v0",
        "v0r",
        "3a",
    ],
)
def test_policy_equals_timms_for_each_draw(squares: list[Image.Image], policy: str) -> None:
    theirs = timms_secondary(policy, "random")
    ours = TrainTransform(AugmentConfig(size_px=SIZE, policy=policy, interpolation="random"))
    failed = 0
    for seed, square in enumerate(squares * 2):
        seed_generators(seed)
        image = ours.color_transforms(F.pil_to_tensor(square))
        seed_generators(seed)
        try:
            expected = theirs(square)
        # posterize with 0 bits, from Pillow 13 on; ours returns a black image
        except ValueError as error:
            assert "bits" in str(error)
            failed += 1
        else:
            assert torch.equal(image, F.pil_to_tensor(expected))
    assert failed <= 10


def test_deit_3_augmentation_equals_timms(squares: list[Image.Image]) -> None:
    """3-Augment and then color jitter, whose draws are equal and whose pixels are within Pillow's
    rounding.
    """
    theirs = timms_secondary("3a", "bicubic", color_jitter=0.3)
    jitter = ColorJitterConfig(brightness=0.3, contrast=0.3, saturation=0.3)
    ours = TrainTransform(
        AugmentConfig(size_px=SIZE, policy="3a", interpolation="bicubic", color_jitter=jitter)
    )
    for seed, square in enumerate(squares):
        seed_generators(seed)
        image = ours.color_transforms(F.pil_to_tensor(square)).int()
        seed_generators(seed)
        assert (image - F.pil_to_tensor(theirs(square)).int()).abs().max() <= 4


@pytest.mark.parametrize(
    ("name", "kwargs", "reference"),
    [
        ("trivial_augment_wide", {}, v2.TrivialAugmentWide),
        ("rand_augment", {"num_ops": 2, "magnitude": 10}, v2.RandAugment),
        ("auto_augment", {}, v2.AutoAugment),
        ("aug_mix", {"severity": 3, "interpolation": "bilinear"}, v2.AugMix),
    ],
)
def test_policy_equals_torchvisions_for_each_draw(
    squares: list[Image.Image], name: str, kwargs: dict, reference: Callable
) -> None:
    """The policies of torchvision's reference scripts, which run on Pillow images."""
    mode = InterpolationMode(kwargs.get("interpolation", "bicubic"))
    theirs = reference(**{**kwargs, "interpolation": mode})
    augment = AugmentConfig(
        size_px=SIZE, policy=f"torchvision:{name}", policy_kwargs=kwargs, interpolation="bicubic"
    )
    ours = TrainTransform(augment)
    for seed, square in enumerate(squares):
        seed_generators(seed)
        image = ours.color_transforms(F.pil_to_tensor(square))
        seed_generators(seed)
        assert torch.equal(image, F.pil_to_tensor(theirs(square)))


ERASING = {
    "deit": ErasingConfig(prob=0.25, mode="pixel"),
    "always": ErasingConfig(prob=1.0),
    "three": ErasingConfig(prob=0.6, mode="rand", max_count=3),
    "tall": ErasingConfig(prob=0.5, scale=[0.1, 0.5], ratio=[2.0, 8.0]),
}


def timms_erasing(erasing: ErasingConfig) -> RandomErasing:
    (least, most), (narrow, tall) = erasing.scale, erasing.ratio
    return RandomErasing(
        erasing.prob,
        least,
        most,
        narrow,
        tall,
        mode=erasing.mode,
        max_count=erasing.max_count,
        device="cpu",
    )


@pytest.mark.parametrize("size", [(48, 48), (40, 56)])
@pytest.mark.parametrize("name", ERASING)
def test_erasing_boxes_equal_timms(name: str, size: tuple[int, int]) -> None:
    erasing = ERASING[name]
    theirs = timms_erasing(erasing)
    erased = 0
    for seed in range(300):
        random.seed(seed)
        boxes = draw_boxes(erasing, list(size))
        state = random.getstate()
        random.seed(seed)
        torch.manual_seed(seed)
        expected = theirs(torch.full((3, *size), 9.0))
        assert random.getstate() == state, "as many draws, in the same order"
        images = erase(
            torch.full((1, 3, *size), 9.0),
            torch.tensor(boxes, dtype=torch.int32).reshape(1, -1, 4),
            torch.tensor([seed]),
            erasing.mode,
        )
        assert torch.equal(images[0] != 9, expected != 9)
        erased += int((expected != 9).any())
        if erasing.mode == "const":
            assert torch.equal(images[0], expected)
    assert erased == pytest.approx(300 * erasing.prob, abs=30)


def reference_order(permutation: list[int], repeats: int, world_size: int, rank: int) -> list[int]:
    """RASampler of DeiT and torchvision, by its description: each index `repeats` times in a row,
    filled up to divide among the ranks, every world_size-th from the rank on, and of those as many
    as the images, cut to a multiple of 256, give each rank.
    """
    indices = [index for index in permutation for _ in range(repeats)]
    total = -(-len(permutation) * repeats // world_size) * world_size
    indices += indices[: total - len(indices)]
    mine = indices[rank:total:world_size]
    return mine[: len(permutation) // 256 * 256 // world_size]


@pytest.mark.parametrize("repeats", [3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_repeated_augmentation_equals_rasampler(repeats: int, world_size: int) -> None:
    num_images, batch = 2807, 64
    for epoch in range(3):
        permutation = torch.randperm(
            num_images, generator=generator("permutation", 5, epoch)
        ).tolist()
        counts: Counter[int] = Counter()
        keys = []
        for rank in range(world_size):
            sampler = EpochSampler(
                num_images, batch, rank, world_size, 5, repeats, repeats_multiple=256
            )
            sampler.set_epoch(epoch)
            mine = list(sampler)
            expected = reference_order(permutation, repeats, world_size, rank)
            assert [index for _, index, _ in mine] == expected and len(
                expected
            ) == 2560 // world_size
            keys += mine
            counts.update(repeat for _, _, repeat in mine)
        assert len(set(keys)) == 2560, "every repeat has its own key"
        assert max(counts.values()) - min(counts.values()) <= 1
