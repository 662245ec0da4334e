"""The datasets of torchvision: `torchvision:NAME`."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torchvision.datasets

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.classes import HOLD_OUT_ADVICE
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.map_style import ArrayImages, image_set_of
from imagenet_cls.errors import DataError, Problem
from imagenet_cls.lookup import did_you_mean, keyword_names, kwargs_problems
from imagenet_cls.text import first_line

PREFIX = "torchvision:"
# Those with names or numbers of classes: not Caltech101, Caltech256, FER2013, GTSRB, INaturalist
# and PCAM.
CLASSIFICATION_SETS = (
    "CIFAR10",
    "CIFAR100",
    "CLEVRClassification",
    "Country211",
    "DTD",
    "EMNIST",
    "EuroSAT",
    "FGVCAircraft",
    "FakeData",
    "FashionMNIST",
    "Flowers102",
    "Food101",
    "ImageNet",
    "Imagenette",
    "KMNIST",
    "MNIST",
    "OxfordIIITPet",
    "Places365",
    "QMNIST",
    "RenderedSST2",
    "SEMEION",
    "STL10",
    "SUN397",
    "SVHN",
    "StanfordCars",
    "USPS",
)
# Methods that make a Pillow image of `self.data[i]`: of CIFAR-10 and -100, and of MNIST,
# Fashion-MNIST, KMNIST and EMNIST.
READ_FROM_ARRAY = {
    torchvision.datasets.CIFAR10.__getitem__,
    torchvision.datasets.MNIST.__getitem__,
}
_RESERVED = ("root", "train", "transform", "target_transform", "transforms", "download")


def open_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageSet:
    """A part; missing files are downloaded. classes: not used. Raises as `_open`."""
    name = config.name.removeprefix(PREFIX)
    dataset = _open(name, Path(config.root).expanduser(), part, config.kwargs)
    if type(dataset).__getitem__ not in READ_FROM_ARRAY:
        return image_set_of(dataset, config, part)
    images = image_set_of(dataset, config, part, ArrayImages)
    images.required_targets("data.name")
    return images


def problems(config: DataConfig) -> list[Problem]:
    """All problems of the name and the arguments. Reads no data."""
    name = config.name.removeprefix(PREFIX)
    if name not in CLASSIFICATION_SETS or not hasattr(torchvision.datasets, name):
        hint = did_you_mean(name, CLASSIFICATION_SETS)
        return [Problem("data.name", f"torchvision has no classification dataset {name!r}{hint}")]
    factory = getattr(torchvision.datasets, name)
    accepted = accepted_names(factory)
    reserved = [*_RESERVED]
    if "train" not in accepted:  # EMNIST has both, and its `split` is something else
        reserved.append("split")
    found = kwargs_problems("data.kwargs", factory, config.kwargs, (), reserved, accepted)
    if config.val is not None and not {"train", "split"} & set(accepted):
        text = f"{name} has one part only: use {HOLD_OUT_ADVICE}"
        found.append(Problem("data.val", text))
    return found


def accepted_names(factory: Any) -> list[str]:
    """The names that a dataset of torchvision takes as keyword arguments."""
    names, takes_any = keyword_names(factory)
    if takes_any:  # EMNIST, QMNIST and ImageNet pass further arguments to their base class
        names += keyword_names(factory.__base__)[0]
    return names


def _open(name: str, root: Path, part: str, kwargs: Mapping[str, Any]) -> Any:
    """A part of the dataset; missing files are downloaded. Raises DataError if that fails, and for
    an unknown part.

    part: for sets with the flag `train`, `train` is `train=True`, and `val` and `test` are
    `train=False`; for sets with a `split` it is that, and `val` also means `valid` or `test`.
    """
    factory = getattr(torchvision.datasets, name)
    accepted = accepted_names(factory)
    arguments = dict(kwargs)
    if "root" in accepted:
        arguments["root"] = str(root)
    choices: list[dict[str, Any]] = [{}]
    reason = "the parts are train, val and test"
    if "train" in accepted:
        choices = [{"train": part == "train"}] if part in ("train", "val", "test") else []
    elif "split" in accepted:
        splits = ("val", "valid", "test") if part == "val" else (part,)
        choices = [{"split": split} for split in splits]
    for choice in choices:
        try:
            return _with_files(factory, arguments | choice, root)
        except ValueError as error:  # such as an unknown split
            reason = first_line(error)
    raise DataError(
        f"torchvision:{name}, part {part!r}: {reason}",
        "Correct data.train, data.val or data.kwargs.",
    )


def _with_files(factory: Any, arguments: dict[str, Any], root: Path) -> Any:
    """The dataset; its files are downloaded where they are missing."""
    try:
        return factory(**arguments)
    except (RuntimeError, FileNotFoundError) as error:
        reason = first_line(error)
    try:
        if "download" in accepted_names(factory):
            with contextlib.redirect_stdout(sys.stderr):
                return factory(**arguments, download=True)
    except (RuntimeError, OSError) as error:
        reason = f"its files are missing, and the download failed: {first_line(error).rstrip(':')}"
    raise DataError(
        f"torchvision:{factory.__name__}: {reason}",
        f"Put its files, unpacked, under {root}, as torchvision documents them.",
    )
