"""Policies: each changes images by the seed alone, and bad names and arguments are problems."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from imagenet_cls.config.schema import AugmentConfig
from imagenet_cls.data import policies
from imagenet_cls.data.policies import build_policy, policy_problems
from imagenet_cls.errors import ConfigError
from imagenet_cls.seeding import seed_generators

TIMM = (
    *("rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.8-mmax20-tweights", "rand-n1-t3aw-mstd101"),
    *("augmix-m5-w2-d2-b1", "original", "originalr", "v0r-mstd1", "3a"),
)
TORCHVISION = tuple(policies.FROM_TORCHVISION)
OWN = "test_data_policies:sprinkle"


def sprinkle(share: float = 0.1):
    """A policy as a user might write it, drawing from all three default generators."""

    def policy(image: Tensor) -> Tensor:
        dots = torch.rand(image.shape[1:]) < share * random.random()
        return torch.where(dots, torch.tensor(np.random.randint(256), dtype=torch.uint8), image)

    return policy


def floats():
    """Not a policy for uint8 images."""
    return lambda image: image / 255


def halves():
    """A policy that changes the size."""
    return lambda image: image[:, ::2, ::2]


def built(name: str, size_px: int = 32, **options: object) -> Any:
    policy: Any = build_policy(AugmentConfig(policy=name, **options), size_px)
    return policy.policy


@pytest.fixture(scope="module")
def image(photographs: list[Image.Image]) -> Tensor:
    pixels = np.asarray(photographs[0].crop((200, 100, 456, 356)).resize((32, 32)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", [*TIMM, *TORCHVISION, OWN])
def test_policy_changes_images_by_the_seed_alone(image: Tensor, name: str, channels: int) -> None:
    augment = AugmentConfig(policy=name)
    assert policy_problems(augment) == []
    policy: Any = build_policy(augment, 32, [0.5] * channels)
    image = image[:channels]
    original, results = image.clone(), []
    for seed in range(20):
        seed_generators(seed)
        results.append(policy(image))
        assert results[-1].dtype == torch.uint8 and results[-1].shape == image.shape
        seed_generators(seed)
        assert torch.equal(policy(image), results[-1])
    assert torch.equal(image, original), "the image itself is changed"
    changed = [not torch.equal(result, image) for result in results]
    assert sum(changed) >= 5 and len({tuple(result.flatten().tolist()) for result in results}) >= 3


def test_posterize_with_0_bits_is_black_else_pillows(photographs: list[Image.Image]) -> None:
    from PIL import ImageOps

    small = photographs[1].resize((40, 30))
    # what Pillow 12 made of 0 bits: each value & ~255
    assert not np.asarray(policies.posterize(small, 0)).any()
    for bits in range(1, 8):
        assert policies.posterize(small, bits) == ImageOps.posterize(small, bits)


def test_timm_operations_all_found_and_posterize_replaced() -> None:
    for name, count in (("rand-m9", 15), ("augmix-m3", 13), ("original", 50)):
        operations = list(policies.timm_operations(built(name).policy))
        assert len(operations) == count
        posterizing = [operation.aug_fn for operation in operations if "Post" in operation.name]
        assert set(posterizing) == {policies.posterize}


@pytest.mark.parametrize(
    ("crop", "asked", "expected"),
    [
        ("bicubic", {}, "bicubic"),
        ("random", {}, "bilinear"),
        ("bilinear", {"interpolation": "nearest"}, "nearest"),
    ],
)
def test_torchvision_policy_interpolates_as_the_crop_by_default(
    crop: str, asked: dict, expected: str
) -> None:
    policy = built(
        "torchvision:rand_augment", interpolation=crop, policy_kwargs={"magnitude": 3, **asked}
    ).policy
    assert isinstance(policy, v2.RandAugment) and policy.magnitude == 3
    assert policy.interpolation == InterpolationMode(expected)


BAD_NAMES = [
    "randd-m9",
    "rand-m9-std0.5",
    "rand-m9.5",
    "rand-inc",
    "rand-",
    "rand-n16-tweights",
    "augmix-a0",
    "augmix-x3",
    "original-m9",
    "a b:c",
    "torchvision:randaugment",
    "test_data_policies:sprinkl",
    "test_data_policies:floats",
    "test_data_policies:halves",
    "test_data_policies:OWN",
]


def key_of_error(augment: AugmentConfig) -> str:
    """The key of the first error, of the check or of the policy's first images."""
    for problem in policy_problems(augment):
        return problem.key
    with pytest.raises(ConfigError) as caught:
        policy: Any = build_policy(augment, 96)
        for seed in range(20):
            seed_generators(seed)
            policy(torch.full((3, 96, 96), 90, dtype=torch.uint8))
    (line,) = caught.value.lines
    return line.partition(":")[0]


@pytest.mark.parametrize(
    ("name", "kwargs", "key"),
    [
        *((name, {}, "policy") for name in BAD_NAMES),
        (None, {"magnitude": 9}, "policy_kwargs.magnitude"),
        ("3a", {"magnitude": 9}, "policy_kwargs.magnitude"),
        (OWN, {"shar": 0.2}, "policy_kwargs.shar"),
        # values with which the policy fails on an image
        ("torchvision:aug_mix", {"interpolation": "bicubic"}, "policy"),
        ("torchvision:auto_augment", {"policy": "cifar"}, "policy"),
        ("torchvision:rand_augment", {"magnitude": 31}, "policy"),
        ("torchvision:aug_mix", {"severity": 11}, "policy"),
    ],
)
def test_bad_policy_is_a_config_error(name: str | None, kwargs: dict, key: str) -> None:
    augment = AugmentConfig(size_px=96, policy=name, policy_kwargs=kwargs)
    assert key_of_error(augment) == f"augment.{key}"


def test_torchvision_policy_takes_whole_numbers_and_names(image: Tensor) -> None:
    """AugMix draws from a Dirichlet distribution, which needs a float."""
    for name, kwargs in (
        ("auto_augment", {"policy": "cifar10", "fill": [124, 116, 104]}),
        ("aug_mix", {"severity": 10, "mixture_width": 1, "alpha": 1000, "all_ops": False}),
    ):
        augment = AugmentConfig(size_px=32, policy=f"torchvision:{name}", policy_kwargs=kwargs)
        assert policy_problems(augment) == []
        policy: Any = build_policy(augment, 32)
        seed_generators(1)
        assert any(not torch.equal(policy(image), image) for _ in range(20))
