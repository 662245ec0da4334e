"""Policies by themselves: each changes images, survives draws that Pillow refuses, and bad names are told before."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from imagenet_cls.config.schema import AugmentConfig
from imagenet_cls.data import policies
from imagenet_cls.data.policies import build_policy, policy_problems
from imagenet_cls.seeding import seed_generators

TIMM = (
    *("rand-m9-mstd0.5-inc1", "rand-m9-mstd0.5", "rand-m7-n3-p0.8-mmax20-tweights", "rand-t3a", "rand-n1-t3aw-mstd101"),
    *("augmix-m3-w3", "augmix-m5-w2-d2-b1", "original", "original-mstd0.5", "originalr", "v0", "v0r-mstd1", "3a"),
)
TORCHVISION = tuple("torchvision:" + name for name in policies.FROM_TORCHVISION)
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


def built(name: str, size_px: int = 32, **options: object) -> policies.Policy:
    policy = build_policy(AugmentConfig(policy=name, **options), size_px)  # type: ignore[arg-type]
    assert policy is not None
    return policy


@pytest.fixture(scope="module")
def image(photographs: list[Image.Image]) -> Tensor:
    pixels = np.asarray(photographs[0].crop((200, 100, 456, 356)).resize((32, 32)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


@pytest.mark.parametrize("name", [*TIMM, *TORCHVISION, OWN])
def test_a_policy_changes_images_by_the_seed_alone(image: Tensor, name: str) -> None:
    assert policy_problems(AugmentConfig(policy=name)) == []
    policy = built(name)
    original, results = image.clone(), []
    for seed in range(40):
        seed_generators(seed)
        results.append(policy(image))
        assert results[-1].dtype == torch.uint8 and results[-1].shape == (3, 32, 32)
        seed_generators(seed)
        assert torch.equal(policy(image), results[-1])
    assert torch.equal(image, original), "the image itself is changed"
    changed = [not torch.equal(result, image) for result in results]
    assert sum(changed) >= 15 and len({tuple(result.flatten().tolist()) for result in results}) >= 8


def test_a_whole_number_is_an_alpha_of_augmix() -> None:
    whole, broken = ({"alpha": alpha, "interpolation": "bilinear"} for alpha in (1, 1.0))
    augment = AugmentConfig(policy="torchvision:aug_mix", policy_kwargs=whole)
    assert policy_problems(augment) == []
    assert build_policy(augment, 32).policy.alpha == broken["alpha"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rand-m11-mstd0.5", "cuts it to 10; say m10, or raise that by mmax"),
        ("rand-m21-mmax20", "cuts it to 20; say m20"),
        ("augmix-m30", "cuts it to 10; say m10"),
        ("rand-m9-mmax31", "'mmax31' is out of range: mmax 1 to 30"),
        ("rand-n101", "'n101' is out of range: n 1 to 100"),
        ("rand-p0.0", "'p0.0' is out of range: p more than 0 and at most 1"),
        ("augmix-d101", "'d101' is out of range: d 0 to 100"),
        ("rand-m" + "9" * 5000, "is beyond timm's scale"),
    ],
)
def test_numbers_that_timm_would_cut_or_never_come_to_the_end_of(name: str, text: str) -> None:
    (problem,) = policy_problems(AugmentConfig(policy=name))
    assert problem.key == "augment.policy" and text in problem.message


def test_timm_cuts_magnitudes_as_it_is_said() -> None:
    assert [op(20) for op in map(magnitude_of, ("rand-m9", "rand-m10-mmax30"))] == [10, 20]


def magnitude_of(name: str):
    """What an operation of this policy makes of a magnitude: the rotation's angle tells, 30 degrees at 10."""
    (rotate,) = [op for op in policies.timm_operations(built(name).policy) if op.name == "Rotate"]

    def cut(magnitude: float) -> float:
        rotate.prob, rotate.magnitude, seen = 1.0, magnitude, []
        rotate.aug_fn = lambda image, degrees, **others: seen.append(degrees)
        rotate(None)
        return abs(seen[0]) / 3

    return cut


def test_no_policy_is_none() -> None:
    assert build_policy(AugmentConfig(), 224) is None and policy_problems(AugmentConfig()) == []


@pytest.fixture
def bits_drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bits that every posterize from here on is asked to keep."""
    drawn: list[int] = []
    real = policies.posterize

    def recorded(image: Image.Image, bits_to_keep: int, **others: object) -> Image.Image:
        drawn.append(bits_to_keep)
        return real(image, bits_to_keep, **others)

    monkeypatch.setattr(policies, "posterize", recorded)
    return drawn


# Decreasing posterize keeps 0 bits at magnitudes below 2.5, the increasing one at 10.
@pytest.mark.parametrize("name", ["rand-m2-mstd0.5-p1", "rand-m9-mstd0.5-inc1", "v0", "originalr-mstd3"])
def test_posterize_stays_in_the_mix_with_0_bits(image: Tensor, bits_drawn: list[int], name: str) -> None:
    policy = built(name)
    seed_generators(0)
    for _ in range(2000):
        policy(image)
    assert bits_drawn.count(0) >= 2
    assert sum(bits > 0 for bits in bits_drawn) >= 20


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["rand-m9-mstd0.5-inc1", "rand-m2-mstd0.5-p1"])
def test_100000_draws(image: Tensor, bits_drawn: list[int], name: str) -> None:
    policy = built(name)
    seed_generators(0)
    for _ in range(100_000):
        assert policy(image).shape == image.shape
    assert bits_drawn.count(0) >= 100 and sum(bits > 0 for bits in bits_drawn) >= 1000


def test_0_bits_are_black_and_others_are_pillows(photographs: list[Image.Image]) -> None:
    from PIL import ImageOps

    small = photographs[1].resize((40, 30))
    assert np.asarray(policies.posterize(small, 0)).shape == (30, 40, 3)
    assert not np.asarray(policies.posterize(small, 0)).any()  # what Pillow 12 made of 0 bits: each value & ~255
    for bits in range(1, 8):
        assert policies.posterize(small, bits) == ImageOps.posterize(small, bits)
    assert policies.posterize(small, 8) is small


def test_every_operation_of_timms_is_found_and_posterize_replaced() -> None:
    for name, count in (("rand-m9", 15), ("augmix-m3", 13), ("original", 50), ("v0", 50), ("3a", 3)):
        operations = list(policies.timm_operations(built(name).policy))  # type: ignore[attr-defined]
        assert len(operations) == count
        posterizing = [operation for operation in operations if operation.name.startswith("Posterize")]
        assert bool(posterizing) == (name != "3a")
        assert all(operation.aug_fn is policies.posterize for operation in posterizing)


@pytest.mark.parametrize(
    ("crop", "asked", "expected"),
    [("bicubic", {}, "bicubic"), ("random", {}, "bilinear"), ("bilinear", {"interpolation": "nearest"}, "nearest")],
)
def test_torchvisions_policies_resample_as_the_crop_unless_told(crop: str, asked: dict, expected: str) -> None:
    policy = built("torchvision:rand_augment", interpolation=crop, policy_kwargs={"magnitude": 3, **asked}).policy  # type: ignore[attr-defined]
    assert isinstance(policy, v2.RandAugment) and policy.magnitude == 3
    assert policy.interpolation == InterpolationMode(expected)


BAD_NAMES = {
    "randd-m9": "did you mean 'rand'?",
    "rand-m9-std0.5": "'std0.5' is no setting of 'rand' (allowed: m9, n2, p0.5, mstd0.5, mmax10, inc1, tweights",
    "rand-m9.5": "'m9.5' is no setting",
    "rand-inc": "'inc' is no setting",
    "rand-tsmall": "'tsmall' is no setting",
    "rand-p2": "'p2' is no setting",
    "rand-m9-m8": "'m' is given twice",
    "rand-": "'' is no setting",
    "rand-n16-tweights": "Cannot take a larger sample",
    "augmix-w0": "'w0' is no setting of 'augmix'",
    "augmix-a0": "alpha",
    "original-m9": "'m9' is no setting of 'original' (allowed: mstd0.5)",
    "3b": "(timm: rand, augmix, original, originalr, v0, v0r, 3a; torchvision:rand_augment,",
    "torchvision:randaugment": "did you mean 'torchvision:rand_augment'",
    "no_such_module:policy": "no module 'no_such_module'",
    "test_data_policies:sprinkl": "no 'sprinkl'; did you mean 'sprinkle'?",
    "test_data_policies:floats": "gives torch.float32 (3, 96, 96); let it return",
    "test_data_policies:halves": "gives torch.uint8 (3, 48, 48); let it return",
    "test_data_policies:OWN": "is not a function",
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_told_in_one_line(name: str) -> None:
    (problem,) = policy_problems(AugmentConfig(size_px=96, policy=name))
    assert problem.key == "augment.policy" and BAD_NAMES[name] in problem.message
    assert name in problem.message or (name.startswith(("no_such", "test_data")) and "\n" not in problem.message)


@pytest.mark.parametrize(
    ("name", "kwargs", "key", "message"),
    [
        (None, {"magnitude": 9}, ".magnitude", "no policy takes none"),
        ("3a", {"magnitude": 9}, ".magnitude", "timm's '3a', whose settings are in its name, takes none"),
        ("torchvision:rand_augment", {"magnitud": 9}, ".magnitud", "did you mean 'magnitude'"),
        ("torchvision:auto_augment", {"policy": "cifar"}, ".policy", "'cifar' is not one of imagenet, cifar10, svhn"),
        ("torchvision:rand_augment", {"interpolation": "area"}, ".interpolation", "not one of nearest, bilinear, bi"),
        ("torchvision:aug_mix", {"interpolation": "bicubic"}, ".interpolation", "not one of nearest, bilinear"),
        (OWN, {"shar": 0.2}, ".shar", "did you mean 'share'?"),
    ],
)
def test_bad_arguments_are_told_by_their_key(name: str | None, kwargs: dict, key: str, message: str) -> None:
    (problem,) = policy_problems(AugmentConfig(policy=name, policy_kwargs=kwargs))
    assert problem.key == f"augment.policy_kwargs{key}" and message in problem.message


WHOLE_0_30 = "a whole number, 0 to 30"


@pytest.mark.parametrize(
    ("name", "kwargs", "key", "message"),
    [
        ("rand_augment", {"magnitude": -3}, "magnitude", f"-3 is out of range: {WHOLE_0_30}"),
        ("rand_augment", {"magnitude": 31}, "magnitude", f"31 is out of range: {WHOLE_0_30}"),
        ("rand_augment", {"magnitude": 99}, "magnitude", f"99 is out of range: {WHOLE_0_30}"),
        ("rand_augment", {"magnitude": 9.5}, "magnitude", f"9.5 is out of range: {WHOLE_0_30}"),
        ("rand_augment", {"magnitude": True}, "magnitude", f"True is out of range: {WHOLE_0_30}"),
        ("rand_augment", {"magnitude": "9"}, "magnitude", f"'9' is out of range: {WHOLE_0_30}"),
        ("rand_augment", {"magnitude": None}, "magnitude", f"None is out of range: {WHOLE_0_30}"),
        ("rand_augment", {"magnitude": 10, "num_magnitude_bins": 10}, "magnitude", "a whole number, 0 to 9"),
        ("rand_augment", {"num_ops": 0}, "num_ops", "0 is out of range: a whole number, 1 to 100"),
        ("rand_augment", {"num_ops": 10**9}, "num_ops", "a whole number, 1 to 100"),
        (
            "rand_augment",
            {"num_magnitude_bins": 0},
            "num_magnitude_bins",
            "0 is out of range: a whole number, 2 to 1,000",
        ),
        ("rand_augment", {"num_magnitude_bins": 1, "magnitude": 0}, "num_magnitude_bins", "1 is out of range"),
        ("trivial_augment_wide", {"num_magnitude_bins": 10**12}, "num_magnitude_bins", "a whole number, 2 to 1,000"),
        ("trivial_augment_wide", {"num_magnitude_bins": 1}, "num_magnitude_bins", "1 is out of range"),
        ("trivial_augment_wide", {"magnitude": -3}, "magnitude", "unknown"),
        ("aug_mix", {"alpha": -1}, "alpha", "-1 is out of range: a number, 0.001 to 1,000"),
        ("aug_mix", {"alpha": 0}, "alpha", "0 is out of range"),
        ("aug_mix", {"alpha": float("nan")}, "alpha", "nan is out of range"),
        ("aug_mix", {"mixture_width": 0}, "mixture_width", "0 is out of range: a whole number, 1 to 100"),
        ("aug_mix", {"chain_depth": 10**9}, "chain_depth", "a whole number, -1 to 100"),
        ("aug_mix", {"severity": 0}, "severity", "0 is out of range: a whole number, 1 to 10"),
        ("aug_mix", {"severity": 11}, "severity", "11 is out of range: a whole number, 1 to 10"),
        ("auto_augment", {"fill": 256}, "fill", "256 is out of range: three numbers or one, 0 to 255"),
        ("auto_augment", {"fill": [0, 0, -1]}, "fill", "[0, 0, -1] is out of range"),
        ("auto_augment", {"fill": [0, 0]}, "fill", "[0, 0] is out of range"),
    ],
)
def test_numbers_that_torchvision_would_take_for_something_else(
    name: str, kwargs: dict, key: str, message: str
) -> None:
    (problem,) = policy_problems(AugmentConfig(policy=f"torchvision:{name}", policy_kwargs=kwargs))
    assert problem.key == f"augment.policy_kwargs.{key}" and message in problem.message


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("rand_augment", {"magnitude": 0, "num_ops": 1, "num_magnitude_bins": 2}),
        ("rand_augment", {"magnitude": 30, "num_ops": 3}),
        ("rand_augment", {"magnitude": 40, "num_magnitude_bins": 41, "fill": [124, 116, 104]}),
        ("trivial_augment_wide", {"num_magnitude_bins": 2, "fill": 128}),
        ("auto_augment", {"policy": "cifar10", "fill": None}),
        ("aug_mix", {"severity": 10, "mixture_width": 1, "chain_depth": -1, "alpha": 0.001}),
        ("aug_mix", {"severity": 1, "mixture_width": 5, "chain_depth": 4, "alpha": 1000, "all_ops": False}),
    ],
)
def test_numbers_at_the_ends_of_torchvisions_ranges(image: Tensor, name: str, kwargs: dict) -> None:
    augment = AugmentConfig(policy=f"torchvision:{name}", policy_kwargs=kwargs)
    assert policy_problems(augment) == []
    policy = build_policy(augment, 32)
    seed_generators(1)
    assert policy is not None and any(not torch.equal(policy(image), image) for _ in range(20))


def test_what_a_policy_refuses_is_told() -> None:
    (problem,) = policy_problems(AugmentConfig(policy=OWN, policy_kwargs={"share": "much"}))
    assert problem.key == "augment.policy" and "fails on an image: TypeError" in problem.message
    (problem,) = policy_problems(AugmentConfig(policy="torchvision:aug_mix", interpolation="bicubic"))
    assert "say augment.policy_kwargs.interpolation: bilinear" in problem.message


def test_checking_draws_nothing_that_others_notice() -> None:
    seed_generators(4)
    expected = torch.rand(1), random.random(), np.random.rand()
    seed_generators(4)
    policy_problems(AugmentConfig(policy=OWN))
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
