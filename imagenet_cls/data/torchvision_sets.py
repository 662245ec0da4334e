"""torchvision's classification data sets, by name: `torchvision:CIFAR10`."""

import contextlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torchvision.datasets

from imagenet_cls.errors import DataError, Problem, first_line
from imagenet_cls.lookup import did_you_mean, keyword_names, kwargs_problems

# fmt: off
CLASSIFICATION_SETS = (
    "CIFAR10", "CIFAR100", "CLEVRClassification", "Caltech101", "Caltech256", "Country211", "DTD", "EMNIST", "EuroSAT",
    "FER2013", "FGVCAircraft", "FakeData", "FashionMNIST", "Flowers102", "Food101", "GTSRB", "INaturalist", "ImageNet",
    "Imagenette", "KMNIST", "MNIST", "OxfordIIITPet", "PCAM", "Places365", "QMNIST", "RenderedSST2", "SEMEION", "STL10",
    "SUN397", "SVHN", "StanfordCars", "USPS",
)
# fmt: on
# Names of a part, tried in order.
SYNONYMS = {"val": ("val", "valid", "test")}
RESERVED = ("root", "train", "transform", "target_transform", "transforms", "download")


def _has_train_flag(factory: Any) -> bool:
    """Whether the part is chosen by `train=True/False`. EMNIST's `split` is something else."""
    return factory.__name__ == "EMNIST" or "train" in keyword_names(factory)[0]


def torchvision_problems(name: str, kwargs: Mapping[str, Any], val: str | None) -> list[Problem]:
    """Problems of `torchvision:NAME` (here: NAME) and its arguments. Reads no data."""
    if name not in CLASSIFICATION_SETS or not hasattr(torchvision.datasets, name):
        hint = did_you_mean(name, CLASSIFICATION_SETS)
        return [Problem("data.name", f"torchvision has no classification data set {name!r}{hint}")]
    factory = getattr(torchvision.datasets, name)
    reserved = RESERVED if _has_train_flag(factory) else (*RESERVED, "split")
    # EMNIST, QMNIST and ImageNet pass further arguments to their base class.
    names, takes_any = keyword_names(factory)
    more_names = [*names, *keyword_names(factory.__mro__[1])[0]] if takes_any else []
    problems = kwargs_problems("data", factory, kwargs, reserved, more_names)
    if val is not None and not _has_train_flag(factory) and "split" not in names:
        problems.append(Problem("data.val", f"{name} has one part only: use data.val=null data.val_fraction=0.1"))
    return problems


def open_torchvision(name: str, root: Path, part: str, kwargs: Mapping[str, Any]) -> Any:
    """A part of the data set, as a map-style dataset; missing files are downloaded.

    part: `train` is `train=True` for sets with that flag, anything else `train=False`; for sets with a `split` it is
    that, and `val` also means `valid` or `test`. Raises DataError for an unknown part, and for missing files that can't
    be downloaded.
    """
    factory = getattr(torchvision.datasets, name)
    taken, _ = keyword_names(factory)
    arguments = dict(kwargs)
    if "root" in taken:
        arguments["root"] = str(root)
    if _has_train_flag(factory):
        return _with_files(factory, {**arguments, "train": part == "train"}, root)
    if "split" not in taken:
        return _with_files(factory, arguments, root)
    for candidate in SYNONYMS.get(part, (part,)):
        try:
            return _with_files(factory, {**arguments, "split": candidate}, root)
        except ValueError as error:  # torchvision's verify_str_arg
            if "for argument split" not in str(error):
                raise
            reason = str(error)
    raise DataError(
        f"torchvision:{name} has no part {part!r}: {reason}\nset data.train and data.val to parts that it has"
    )


def _with_files(factory: Any, arguments: dict[str, Any], root: Path) -> Any:
    """The data set; its files are downloaded where they are missing."""
    try:
        return factory(**arguments)
    except (RuntimeError, FileNotFoundError) as error:
        reason = first_line(error)
    try:
        if "download" in inspect.signature(factory).parameters:
            with contextlib.redirect_stdout(sys.stderr):
                return factory(**arguments, download=True)
    except (RuntimeError, OSError) as error:
        reason = f"its files are missing, and the download failed: {first_line(error)}"
    raise DataError(
        f"torchvision:{factory.__name__}: {reason}\nput its files under {root}, as torchvision documents them"
    )
