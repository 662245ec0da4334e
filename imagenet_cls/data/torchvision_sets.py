"""torchvision's classification data sets, by name: `torchvision:CIFAR10`.

Owns which of them there are, how each is asked for a part, and what to do where its files are missing. Refuses sets
whose targets are not one class. Called by `datasets`.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torchvision.datasets

from imagenet_cls.errors import DataError, Problem
from imagenet_cls.lookup import did_you_mean, keyword_names, kwargs_problems

# fmt: off
CLASSIFICATION_SETS = (
    "CIFAR10", "CIFAR100", "CLEVRClassification", "Caltech101", "Caltech256", "Country211", "DTD", "EMNIST", "EuroSAT",
    "FER2013", "FGVCAircraft", "FakeData", "FashionMNIST", "Flowers102", "Food101", "GTSRB", "INaturalist", "ImageNet",
    "Imagenette", "KMNIST", "MNIST", "OxfordIIITPet", "PCAM", "Places365", "QMNIST", "RenderedSST2", "SEMEION", "STL10",
    "SUN397", "SVHN", "StanfordCars", "USPS",
)
# fmt: on
# Names that a part goes by, tried in order, where the data set knows no part of the asked name.
SYNONYMS = {"val": ("val", "valid", "test")}
RESERVED = ("root", "train", "transform", "target_transform", "transforms", "download")


def has_train_flag(factory: Any) -> bool:
    """Whether the data set is asked with `train=True/False`. EMNIST is, and its `split` is something else."""
    return factory.__name__ == "EMNIST" or "train" in keyword_names(factory)[0]


def has_parts(factory: Any) -> bool:
    """Whether the data set comes with parts of its own."""
    return has_train_flag(factory) or "split" in keyword_names(factory)[0]


def check_torchvision(name: str, kwargs: Mapping[str, Any], val: str | None) -> list[Problem]:
    """Problems of `torchvision:NAME` (here: NAME) and its keyword arguments. Touches no data."""
    if name not in CLASSIFICATION_SETS or not hasattr(torchvision.datasets, name):
        hint = did_you_mean(name, CLASSIFICATION_SETS)
        return [Problem("data.name", f"torchvision has no classification data set {name!r}{hint}")]
    factory = getattr(torchvision.datasets, name)
    reserved = RESERVED if has_train_flag(factory) else (*RESERVED, "split")
    # EMNIST, QMNIST and ImageNet pass further keywords to the class that they derive from.
    names, takes_any = keyword_names(factory)
    more_names = [*names, *keyword_names(factory.__mro__[1])[0]] if takes_any else []
    problems = kwargs_problems("data", factory, kwargs, reserved, more_names)
    if val is not None and not has_parts(factory):
        problems.append(Problem("data.val", f"{name} has one part only: use data.val=null data.val_fraction=0.1"))
    return problems


def open_torchvision(name: str, root: Path, part: str, kwargs: Mapping[str, Any]) -> Any:
    """The part of the data set, a map-style dataset; its files are downloaded once where they are missing.

    part: `train` is `train=True` for sets with that flag, anything else `train=False`; sets with a `split` are asked
    for this name, `val` also as `valid` or `test`. Raises DataError where there is no such part, or where the files
    are missing and cannot be downloaded: it says which files to put where.
    """
    factory = getattr(torchvision.datasets, name)
    taken, _ = keyword_names(factory)
    arguments = dict(kwargs)
    if "root" in taken:
        arguments["root"] = str(root)
    if has_train_flag(factory):
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
    """Construct; where files are missing, download and construct again, one process at a time."""
    try:
        return factory(**arguments)
    except (RuntimeError, FileNotFoundError) as error:
        reason = str(error).splitlines()[0]
    if "download" not in inspect.signature(factory).parameters:
        raise DataError(f"torchvision:{factory.__name__}: {reason}\n{_where_files_go(factory, arguments, root)}")
    try:
        with _one_at_a_time(root), contextlib.redirect_stdout(sys.stderr):
            with contextlib.suppress(RuntimeError, FileNotFoundError):
                return factory(**arguments)  # another process has downloaded it meanwhile
            return factory(**arguments, download=True)
    except (RuntimeError, OSError) as error:
        lines = str(error).splitlines()
        raise DataError(
            f"torchvision:{factory.__name__}: no files, and the download failed: {lines[0] if lines else error!r}\n"
            f"{_where_files_go(factory, arguments, root)}"
        ) from None


def _where_files_go(factory: Any, arguments: Mapping[str, Any], root: Path) -> str:
    """Which files to put where, as far as the class says it."""
    files: list[str] = []
    if isinstance(getattr(factory, "resources", None), list):  # MNIST and its kin: (url, md5)
        files = [f"{factory.__name__}/raw/{url.rpartition('/')[2]}" for url, *_ in factory.resources]
    elif isinstance(getattr(factory, "split_list", None), dict):  # SVHN, USPS: split -> [url, file name, md5]
        key = arguments.get("split", "train" if arguments.get("train") else "test")
        files = [str(factory.split_list.get(key, ["", "its files"])[1])]
    elif isinstance(getattr(factory, "filename", None), str):  # CIFAR, STL10, SEMEION: an archive
        files = [factory.filename]
    if not files:
        return f"put its files under {root} as torchvision documents it for {factory.__name__}"
    return f"without a network, put these files there yourself: {', '.join(str(root / file) for file in files)}"


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Hold a lock on the folder, so that of several ranks only one downloads. No lock where there is no flock."""
    root.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (root / ".download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
