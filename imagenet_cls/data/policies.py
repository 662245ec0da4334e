"""Augmentation policies: timm's by their strings, torchvision's by name, or a user's own.

Owns `augment.policy` and `augment.policy_kwargs`: from a name to a function on uint8 images, and everything that can be
wrong with the name. Refuses to draw by keys: a policy draws while it is applied, from the default generators of torch,
`random` and numpy, which are seeded for each sample. Called by `transforms`; `policy_problems` by `engine.check`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment as timm_policies
from timm.data.constants import IMAGENET_DEFAULT_MEAN
from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from imagenet_cls.config.check import Range
from imagenet_cls.config.schema import AugmentConfig
from imagenet_cls.errors import Problem
from imagenet_cls.lookup import did_you_mean, import_factory, is_factory_name, kwargs_problems, missing_kwargs_problems
from imagenet_cls.seeding import generators_left_alone, hash_key, seed_generators

Policy = Callable[[Tensor], Tensor]

TORCHVISION = "torchvision:"
FROM_TORCHVISION: dict[str, Callable[..., Any]] = {
    "rand_augment": v2.RandAugment,
    "trivial_augment_wide": v2.TrivialAugmentWide,
    "auto_augment": v2.AutoAugment,
    "aug_mix": v2.AugMix,
}

# timm's families, and the settings that each takes behind its name.
FROM_TIMM: dict[str, tuple[str, ...]] = {
    "rand": ("m", "n", "p", "mstd", "mmax", "inc", "t"),
    "augmix": ("m", "w", "d", "a", "b", "mstd"),
    **dict.fromkeys(("original", "originalr", "v0", "v0r", "3a"), ("mstd",)),
}
# What stands behind each setting's letters, and an example. timm itself passes over what it cannot read.
_SETTINGS = {
    "m": (r"[0-9]+", "m9"),
    "n": (r"[0-9]+", "n2"),
    "p": (r"0(\.[0-9]+)?|1(\.0+)?", "p0.5"),
    "mstd": (r"[0-9]+(\.[0-9]+)?", "mstd0.5"),
    "mmax": (r"[0-9]+", "mmax10"),
    "inc": (r"[01]", "inc1"),
    "t": (r"weights|3a|3aw", "tweights, t3a, t3aw"),
    "w": (r"[1-9][0-9]*", "w3"),
    "d": (r"[0-9]+", "d2"),
    "a": (r"[0-9]+(\.[0-9]+)?", "a1"),
    "b": (r"[01]", "b1"),
}
# What their numbers may be: operations, chains and their lengths cost time for each image, and none of them nothing at
# all; 30 is where the paper's scale of magnitudes ends, which timm's takes to 10 unless mmax says otherwise.
_LIMITS: dict[str, Range] = {
    "n": Range(1, 100),
    "p": Range(0, 1, low_open=True),
    "mmax": Range(1, 30),
    "w": Range(1, 100),
    "d": Range(0, 100),
    "a": Range(0, 100),
}
_TIMM_HIGHEST = 10
# The same for torchvision's keywords. Two bins are the least whose steps its posterize can divide by; a chain depth
# below 1 is drawn for each image; from tiny alphas come NaN. `magnitude` is one of the bins.
_TORCHVISION_LIMITS: dict[str, Range] = {
    "num_ops": Range(1, 100),
    "num_magnitude_bins": Range(2, 1000),
    "severity": Range(1, 10),
    "mixture_width": Range(1, 100),
    "chain_depth": Range(-1, 100),
    "alpha": Range(0.001, 1000),
    "fill": Range(0, 255),
}

# Applications that a policy is tried with, and the side of their images at most.
_TRIALS, _TRIAL_PX = 16, 224


def build_policy(augment: AugmentConfig, size_px: int, mean: Sequence[float] = IMAGENET_DEFAULT_MEAN) -> Policy | None:
    """The policy of `augment` for images of size_px by size_px: uint8 (3, H, W) -> uint8 (3, H, W). None: none.

    mean: per channel, of values scaled to 0..1; what timm fills empty corners with. As in the reference scripts, the
    policy resamples as the crop does (`random`: timm draws bilinear or bicubic for each operation, torchvision takes
    bilinear), and timm's absolute shifts are at most 0.45 of the side (`timm.data.transforms_factory`). torchvision's
    keywords may say otherwise (`interpolation`, `fill`); its images go through Pillow as timm's do, which is what
    published results were made with, is faster, and alone can resample bicubically. A factory of the user's is called
    as `factory(**policy_kwargs)`, once for each size, and what it returns with a tensor. Raises what a constructor
    raises for bad settings, and LookupError for unknown names; `policy_problems` tells both beforehand.
    """
    name = augment.policy
    if name is None:
        return None
    if name.startswith(TORCHVISION):
        return OnPillow(_torchvision_policy(augment))
    if is_factory_name(name):
        return import_factory(name)(**augment.policy_kwargs)
    return OnPillow(_timm_policy(name, augment.interpolation, size_px, mean))


class OnPillow:
    """A policy that takes a Pillow image, for tensors. Band by band: 0.12 ms for 224 px there and back, else 0.32."""

    def __init__(self, policy: Callable[[Image.Image], Image.Image]):
        self.policy = policy

    def __call__(self, image: Tensor) -> Tensor:
        changed = self.policy(Image.merge("RGB", [Image.fromarray(band) for band in image.numpy()]))
        return torch.from_numpy(np.stack([np.asarray(band) for band in changed.split()]))


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
    """Every operation of a policy that timm has built."""
    for entry in policy.policy if isinstance(policy, timm_policies.AutoAugment) else policy.ops:
        yield from entry if isinstance(entry, list) else [entry]


def posterize(image: Image.Image, bits_to_keep: int, **others: Any) -> Image.Image:
    """timm's operation, which draws 0 bits now and then: black, as Pillow made it up to 12; from 13 on it refuses."""
    return Image.new(image.mode, image.size) if bits_to_keep < 1 else timm_policies.posterize(image, bits_to_keep)


def _torchvision_policy(augment: AugmentConfig) -> Any:
    assert augment.policy is not None
    kwargs = dict(augment.policy_kwargs)
    by_crop = "bilinear" if augment.interpolation == "random" else augment.interpolation
    kwargs["interpolation"] = InterpolationMode(kwargs.get("interpolation", by_crop))
    if isinstance(kwargs.get("alpha"), int):
        kwargs["alpha"] = float(kwargs["alpha"])  # AugMix draws from a Dirichlet distribution, which takes no integer
    if "policy" in kwargs:
        kwargs["policy"] = AutoAugmentPolicy(kwargs["policy"])
    return FROM_TORCHVISION[augment.policy.removeprefix(TORCHVISION)](**kwargs)


def policy_problems(augment: AugmentConfig) -> list[Problem]:
    """Everything wrong with `augment.policy` and `augment.policy_kwargs` that shows without data.

    Ends in a trial on a few images, drawn from keys of its own: what the policy raises becomes a problem, and so does
    a result that is not a uint8 image of the same size.
    """
    name = augment.policy
    if name is None or (":" not in name and augment.policy_kwargs):
        taker = "no policy" if name is None else f"timm's {name!r}, whose settings are in its name,"
        return [
            Problem(f"augment.policy_kwargs.{kwarg}", f"is for torchvision's or an own policy; {taker} takes none")
            for kwarg in augment.policy_kwargs
        ]
    if name.startswith(TORCHVISION):
        problems = _check_torchvision(augment)
    elif is_factory_name(name):
        problems = _check_own(augment)
    else:
        problems = _check_timm(name)
    return problems or _trial(augment)


def _check_torchvision(augment: AugmentConfig) -> list[Problem]:
    assert augment.policy is not None
    factory = FROM_TORCHVISION.get(augment.policy.removeprefix(TORCHVISION))
    if factory is None:
        return [_unknown(augment.policy)]
    problems = _check_kwargs(factory, augment)
    choices = {"interpolation": ["nearest", "bilinear", "bicubic"], "policy": [p.value for p in AutoAugmentPolicy]}
    if factory is v2.AugMix:
        choices["interpolation"].remove("bicubic")  # it works on tensors inside, and those know none
        if augment.interpolation == "bicubic" and "interpolation" not in augment.policy_kwargs:
            remedy = "say augment.policy_kwargs.interpolation: bilinear"
            problems.append(
                Problem("augment.policy", f"{augment.policy!r} can't resample bicubic as the crop; {remedy}")
            )
    for kwarg, allowed in choices.items():
        value = augment.policy_kwargs.get(kwarg, allowed[0])
        if value not in allowed:
            problems.append(Problem(f"augment.policy_kwargs.{kwarg}", f"{value!r} is not one of {', '.join(allowed)}"))
    return problems + list(_wrong_torchvision_numbers(factory, augment.policy_kwargs))


def _wrong_torchvision_numbers(factory: Callable[..., Any], kwargs: dict[str, Any]) -> Iterator[Problem]:
    """torchvision looks at few of them: a magnitude of -3 is the third from above, and no operations are no policy."""
    taken = signature(factory).parameters
    limits = {kwarg: allowed for kwarg, allowed in _TORCHVISION_LIMITS.items() if kwarg in taken}
    if "magnitude" in taken:
        bins = kwargs.get("num_magnitude_bins", taken["num_magnitude_bins"].default)
        known = _is_number(bins, whole=True) and bins in limits["num_magnitude_bins"]
        limits["magnitude"] = Range(0, bins - 1) if known else Range()
    for kwarg, allowed in limits.items():
        if kwarg not in kwargs or (kwarg == "fill" and kwargs["fill"] is None):
            continue
        value = kwargs[kwarg]
        whole = kwarg not in ("alpha", "fill")
        numbers = value if kwarg == "fill" and isinstance(value, list) and len(value) == 3 else [value]
        if not all(_is_number(number, whole) and number in allowed for number in numbers):
            kind = "a whole number" if whole else "three numbers or one" if kwarg == "fill" else "a number"
            yield Problem(f"augment.policy_kwargs.{kwarg}", f"{value!r} is out of range: {kind}, {allowed}")


def _is_number(value: Any, whole: bool) -> bool:
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool)


def _check_own(augment: AugmentConfig) -> list[Problem]:
    assert augment.policy is not None
    try:
        return _check_kwargs(import_factory(augment.policy), augment)
    except LookupError as error:
        return [Problem("augment.policy", str(error))]


def _check_kwargs(factory: Callable[..., Any], augment: AugmentConfig) -> list[Problem]:
    found = kwargs_problems("augment.policy", factory, augment.policy_kwargs)
    found += missing_kwargs_problems("augment.policy", factory, augment.policy_kwargs)
    return [replace(problem, key=problem.key.replace(".kwargs", "_kwargs", 1)) for problem in found]


def _check_timm(name: str) -> list[Problem]:
    family, *parts = name.split("-")
    if family not in FROM_TIMM:
        return [_unknown(name)]
    given = [_setting_of(part, family) for part in parts]
    allowed = ", ".join(_SETTINGS[setting][1] for setting in FROM_TIMM[family])
    problems = [
        Problem("augment.policy", f"{name!r}: {part!r} is no setting of {family!r} (allowed: {allowed})")
        for part, setting in zip(parts, given, strict=True)
        if setting is None
    ]
    twice = sorted({setting for setting in given if setting is not None and given.count(setting) > 1})
    problems += [Problem("augment.policy", f"{name!r}: {setting!r} is given twice; keep one") for setting in twice]
    return problems or list(_wrong_numbers(name, dict(zip(map(str, given), parts, strict=True))))


def _wrong_numbers(name: str, parts: dict[str, str]) -> Iterator[Problem]:
    """parts: by setting, such as `mstd0.5` by `mstd`."""
    for setting, allowed in _LIMITS.items():
        if setting in parts and (number := float(parts[setting].removeprefix(setting))) not in allowed:
            text = f"{name!r}: {parts[setting]!r} is out of range: {setting} {allowed.limits_for(number)}"
            yield Problem("augment.policy", text)
    highest = float(parts.get("mmax", f"mmax{_TIMM_HIGHEST}").removeprefix("mmax"))
    if "m" in parts and float(parts["m"].removeprefix("m")) > highest:
        remedy = f"say m{highest:g}" + (
            "" if "mmax" in parts or name.startswith("augmix") else ", or raise that by mmax"
        )
        text = f"{parts['m']!r} is beyond timm's scale, which cuts it to {highest:g}; {remedy}"
        yield Problem("augment.policy", f"{name!r}: {text}")


def _setting_of(part: str, family: str) -> str | None:
    """Which setting `part` is, such as `mstd` for `mstd0.5`; None where it is none of the family's."""
    return next((name for name in FROM_TIMM[family] if re.fullmatch(f"{name}({_SETTINGS[name][0]})", part)), None)


def _unknown(name: str) -> Problem:
    candidates: Iterable[str] = [*FROM_TIMM, *(TORCHVISION + known for known in FROM_TORCHVISION)]
    asked = name if name.startswith(TORCHVISION) else name.partition("-")[0]
    allowed = f"(timm: {', '.join(FROM_TIMM)}; {', '.join(TORCHVISION + known for known in FROM_TORCHVISION)}; or "
    return Problem(
        "augment.policy", f"unknown policy {name!r}{did_you_mean(asked, candidates)} {allowed}my_module:my_factory)"
    )


def _trial(augment: AugmentConfig) -> list[Problem]:
    side = min(augment.size_px, _TRIAL_PX)
    image = torch.from_numpy(np.arange(3 * side * side, dtype=np.uint32).astype(np.uint8).reshape(3, side, side))
    try:
        with generators_left_alone():
            policy = build_policy(augment, side)
            for number in range(_TRIALS):
                seed_generators(hash_key("policy trial", number))
                result: Any = policy(image.clone()) if callable(policy) else policy
                if not isinstance(result, Tensor) or result.dtype != torch.uint8 or result.shape != image.shape:
                    break
            else:
                return []
    except Exception as error:
        text = " ".join(str(error).split()) or "no reason given"
        return [
            Problem("augment.policy", f"{augment.policy!r} fails on an image: {type(error).__name__}: {text[:200]}")
        ]
    kind = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    remedy = f"let it return a function from uint8 images to such of the same size, {tuple(image.shape)} here"
    return [Problem("augment.policy", f"{augment.policy!r} gives {kind}; {remedy}")]
