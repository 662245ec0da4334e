"""Opens the dataset of the config's `data` section, of any kind."""

import contextlib
import inspect
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torchvision.datasets

from imagenet_cls.config.schema import COUNT, DataConfig
from imagenet_cls.data.archives import check_level, find_archives, index_archives
from imagenet_cls.data.builtin import SyntheticSource, write_digits
from imagenet_cls.data.classes import chosen_classes
from imagenet_cls.data.decode import has_heif
from imagenet_cls.data.index import HEIF_SUFFIXES, ImageIndex, class_folders, index_folder
from imagenet_cls.data.lists import BAD_IMAGES_FILE, exclude_images, index_list
from imagenet_cls.data.sources import (
    FolderSource,
    ImageSource,
    MapSource,
    SubsetSource,
    known_classes,
    targets_of,
    with_classes,
)
from imagenet_cls.data.splits import fraction_rows, split_by_config
from imagenet_cls.data.turbojpeg import find_turbojpeg
from imagenet_cls.errors import DataError, Problem, UserError, command_line, first_line
from imagenet_cls.lookup import (
    did_you_mean,
    import_factory,
    is_factory_name,
    keyword_names,
    kwargs_problems,
    number_problem,
)

BUILT_IN = ("folder", "list", "digits", "synthetic")
TORCHVISION = "torchvision:"
# fmt: off
CLASSIFICATION_SETS = (
    "CIFAR10", "CIFAR100", "CLEVRClassification", "Caltech101", "Caltech256", "Country211", "DTD", "EMNIST", "EuroSAT",
    "FER2013", "FGVCAircraft", "FakeData", "FashionMNIST", "Flowers102", "Food101", "GTSRB", "INaturalist", "ImageNet",
    "Imagenette", "KMNIST", "MNIST", "OxfordIIITPet", "PCAM", "Places365", "QMNIST", "RenderedSST2", "SEMEION", "STL10",
    "SUN397", "SVHN", "StanfordCars", "USPS",
)
# fmt: on
TORCHVISION_RESERVED = ("root", "train", "transform", "target_transform", "transforms", "download")


@dataclass(frozen=True)
class DataSets:
    """An open dataset. A part that was not asked for is None. classes: names, in the order of the targets.
    note: for the user, about images that are left out.
    """

    train: ImageSource | None
    val: ImageSource | None
    classes: tuple[str, ...]
    note: str | None = None


def open_datasets(
    data: DataConfig, parts: Collection[str] = ("train", "val"), subset: bool = False
) -> DataSets:
    """Open the parts asked for. Writes the digits, or downloads a torchvision set, where they are missing.

    subset: the validation part need not have all classes of the training part. Expects a section without
    `data_problems`. Raises DataError for data that is missing, empty or wrong.
    """
    assert parts and set(parts) <= {"train", "val"}, parts
    note, chosen = None, chosen_classes(data)
    must_match = chosen is None and not subset
    classes: Sequence[str] | None = chosen
    opened: dict[str, ImageSource]
    if data.name == "synthetic":
        opened = _open_synthetic(**data.kwargs)
    elif data.name in BUILT_IN:
        opened, note, in_training = _open_files(data, parts, must_match)
        classes = chosen or in_training
    else:
        opened = _open_map_style(data, parts, must_match)
        classes = chosen or (opened["train"].classes if "train" in opened else None)
    if classes is not None:
        for part, source in opened.items():
            place = f"{data.name}: {getattr(data, part) or data.train}"
            opened[part] = with_classes(
                source, classes, place, subset and part == "val", chosen is not None
            )
    opened = {part: opened[part] for part in ("train", "val") if part in parts}
    for part, source in opened.items():
        if len(source) == 0:
            keys = f"data.root, data.{part}, data.val_fraction, data.fold" + (
                ", data.group" if data.group else ""
            )
            raise DataError(f"{data.name}: part {part!r} holds no image\ncorrect one of {keys}")
    return DataSets(
        opened.get("train"), opened.get("val"), next(iter(opened.values())).classes, note
    )


def data_problems(data: DataConfig) -> list[Problem]:
    """All problems of names and arguments. Imports what is named, and reads no data."""
    if data.name.startswith(TORCHVISION):
        return _torchvision_problems(data.name.removeprefix(TORCHVISION), data.kwargs, data.val)
    if is_factory_name(data.name):
        return _factory_problems(data)
    if data.name not in BUILT_IN:
        known = [*BUILT_IN, *(TORCHVISION + name for name in CLASSIFICATION_SETS)]
        hint = did_you_mean(data.name, known) or did_you_mean(TORCHVISION + data.name, known)
        allowed = f"{', '.join(BUILT_IN)}, torchvision:NAME or my_module:my_factory"
        return [Problem("data.name", f"no dataset {data.name!r}{hint} (allowed: {allowed})")]
    factory: Callable[..., Any] = _open_synthetic if data.name == "synthetic" else lambda: None
    problems = kwargs_problems("data.kwargs", factory, data.kwargs) or [
        Problem(f"data.kwargs.{name}", text)
        for name, value in data.kwargs.items()
        if (text := number_problem(value, COUNT, whole=True))
    ]
    if data.min_decoded_px is not None and (data.decode == "whole" or find_turbojpeg() is None):
        missing = (
            "data.decode=auto"
            if data.decode == "whole"
            else "libjpeg-turbo 3 (pip install turbojpeg)"
        )
        problems.append(Problem("data.min_decoded_px", f"needs {missing}; or set it to null"))
    if data.name == "digits" and data.val is not None:
        problems.append(
            Problem(
                "data.val", "digits have one part only: use data.val=null data.val_fraction=0.2"
            )
        )
    return problems


def _open_synthetic(
    train_images: int = 1_281_167,
    val_images: int = 50_000,
    num_classes: int = 1000,
    size_px: int = 224,
) -> dict[str, ImageSource]:
    counts = {"train": train_images, "val": val_images}
    return {
        part: SyntheticSource(part, count, num_classes, size_px) for part, count in counts.items()
    }


def _factory_problems(data: DataConfig) -> list[Problem]:
    try:
        factory = import_factory(data.name)
    except LookupError as error:
        return [Problem("data.name", str(error))]
    names, takes_any = keyword_names(factory)
    missing = [f"{name}=" for name in ("root", "part") if name not in names and not takes_any]
    if missing:
        text = f"{data.name!r} is called as factory(root=..., part=...), but takes no {' and '.join(missing)}"
        return [Problem("data.name", text)]
    return kwargs_problems("data.kwargs", factory, data.kwargs, passed=("root", "part"))


def _open_files(
    data: DataConfig, parts: Collection[str], must_match: bool
) -> tuple[dict[str, ImageSource], str | None, Sequence[str] | None]:
    """The parts of `folder`, `list` and `digits`; a note about what `data.exclude` leaves out; the training classes.

    must_match: see `_index_files`.
    """
    root = Path(data.root).expanduser()
    indexes, classes = _index_files(data, parts, must_match)
    counts = {part: len(index) for part, index in indexes.items()}
    notes = []
    if data.exclude is not None:
        path = Path(data.exclude).expanduser()
        for part, name in (("train", "training"), ("val", "validation")):
            if part in parts:
                indexes[part], note = exclude_images(indexes[part], root, path, name)
                notes += [note] if note else []
    left_out = {part: counts[part] - len(index) for part, index in indexes.items()}
    if "train" in parts and data.fraction < 1:
        train = indexes["train"]
        indexes["train"] = train.select(fraction_rows(train.names, train.targets, data.fraction))
    for index in indexes.values():
        check_heif(index)
    in_archives = any(index.spans is not None for index in indexes.values())
    listed = "CONFIG" if in_archives else shlex.quote(str(root))
    bad_images = (root.parent if root.is_file() else root) / BAD_IMAGES_FILE
    keep_out = f"data.exclude={shlex.quote(str(bad_images))}"
    exclude = f"{command_line('verify-data')} {listed}, then {keep_out}"
    min_px = {"train": data.min_decoded_px, "val": None}
    sources: dict[str, ImageSource] = {}
    for part, index in indexes.items():
        options = data.decode, min_px[part], data.exif
        sources[part] = FolderSource(index, exclude, *options, left_out[part])
    return sources, "; ".join(notes) or None, classes


def check_heif(index: ImageIndex) -> None:
    """Raise DataError at the start, not in an epoch, for HEIF images that can't be decoded."""
    if has_heif():
        return
    is_heif = np.zeros(len(index), bool)
    for suffix in HEIF_SUFFIXES:
        is_heif |= np.char.endswith(index.names, suffix)
        is_heif |= np.char.endswith(index.names, suffix.upper())
    rows = np.flatnonzero(is_heif)
    if len(rows):
        raise DataError(
            f"{index.root}: {len(rows)} HEIF images, which need pillow-heif, such as "
            f"{index.describe(rows[0])}\n"
            "install it (pip install pillow-heif), convert the images, or move them elsewhere"
        )


def _index_files(
    data: DataConfig, parts: Collection[str], must_match: bool
) -> tuple[dict[str, ImageIndex], Sequence[str] | None]:
    """The index of each part asked for, and the training classes if there is a training part.

    must_match: see `index_part`.
    """
    if data.name == "digits":
        write_digits(Path(data.root).expanduser(), data.train)
    if data.val is None:
        whole = index_part(data, data.train)
        rows, held_out = split_by_config(data, whole.names, whole.targets)
        return {"train": whole.select(rows), "val": whole.select(held_out)}, whole.classes
    indexes: dict[str, ImageIndex] = {}
    if "train" in parts:
        indexes["train"] = index_part(data, data.train)
        classes: Sequence[str] | None = indexes["train"].classes
    else:
        classes = training_classes(data)
    if "val" in parts:
        indexes["val"] = index_part(data, data.val, classes, must_match)
    return indexes, classes


def index_part(
    data: DataConfig,
    part: str,
    classes: Sequence[str] | None = None,
    must_match: bool = True,
) -> ImageIndex:
    """The index of a part of `folder`, `list` or `digits`.

    classes: those of training. must_match: class folders have to be these; otherwise the index has
    those that are there.
    """
    root = Path(data.root).expanduser()
    if data.name == "list":
        return index_list(root / part, root, classes)
    archives = find_archives(root, part)
    if not archives:
        return index_folder(root / part, classes if must_match else None)
    index = index_archives(root, part, archives, classes, must_match)
    if classes is None and must_match:
        check_level(index)
    return index


def training_classes(data: DataConfig) -> Sequence[str] | None:
    """The classes of the training part of `folder` or `list`; None without one."""
    root = Path(data.root).expanduser()
    place = root / data.train
    is_indexed = place.exists() if data.name == "list" else find_archives(root, data.train)
    if is_indexed:
        return index_part(data, data.train).classes
    return class_folders(place) if place.exists() else None  # the images are not listed


def _open_map_style(
    data: DataConfig, parts: Collection[str], must_match: bool
) -> dict[str, ImageSource]:
    """The parts of torchvision's sets and of factories."""
    opened: dict[str, ImageSource]
    if data.val is None:
        whole = _map_source(data, data.train)
        rows, held_out = split_by_config(data, *_numbers_and_targets(whole))
        opened = {"train": SubsetSource(whole, rows), "val": SubsetSource(whole, held_out)}
    else:
        names = {"train": data.train, "val": data.val}
        opened = {part: _map_source(data, names[part]) for part in parts}
    if must_match and len({source.classes for source in opened.values()}) > 1:
        counts = " and ".join(f"{len(opened[part].classes)}" for part in ("train", "val"))
        what = (
            f"{data.name}: parts {data.train!r} and {data.val!r} have different classes ({counts})"
        )
        raise DataError(f"{what}\nuse parts of one dataset with the same `classes`")
    if "train" in opened and data.fraction < 1:
        train = opened["train"]
        opened["train"] = SubsetSource(
            train, fraction_rows(*_numbers_and_targets(train), data.fraction)
        )
    return opened


def _numbers_and_targets(source: ImageSource) -> tuple[list[bytes], np.ndarray]:
    """The numbers of the images in the dataset, which stand for their names, and their targets: int64 (N,).

    Where targets are known only by reading all images, they are 0 here, and splits are not by class.
    """
    targets = targets_of(source)
    rows = source.rows if isinstance(source, SubsetSource) else range(len(source))
    return [str(i).encode() for i in rows], np.zeros(
        len(source), np.int64
    ) if targets is None else targets


def _map_source(data: DataConfig, part: str) -> MapSource:
    root, name = Path(data.root).expanduser(), f"{data.name}/{part}"
    dataset: Any
    if data.name.startswith(TORCHVISION):
        dataset = _open_torchvision(data.name.removeprefix(TORCHVISION), root, part, data.kwargs)
    else:
        dataset = import_factory(data.name)(root=str(root), part=part, **data.kwargs)
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has_items or isinstance(dataset, str | Mapping):
        returned = f"{data.name!r} returned {type(dataset).__name__}, which is no dataset"
        remedy = "Return a map-style dataset: len(dataset), and dataset[i] -> (image, target)."
        raise UserError(f"data.name: {returned}.\n{remedy}")
    return MapSource(dataset, name, known_classes(dataset, name))


def _has_train_flag(factory: Any) -> bool:
    """Whether the part is chosen by `train=True/False`. EMNIST's `split` is something else."""
    return factory.__name__ == "EMNIST" or "train" in keyword_names(factory)[0]


def _torchvision_problems(name: str, kwargs: Mapping[str, Any], val: str | None) -> list[Problem]:
    """Problems of `torchvision:NAME` (here: NAME) and its arguments. Reads no data."""
    if name not in CLASSIFICATION_SETS or not hasattr(torchvision.datasets, name):
        hint = did_you_mean(name, CLASSIFICATION_SETS)
        return [Problem("data.name", f"torchvision has no classification dataset {name!r}{hint}")]
    factory = getattr(torchvision.datasets, name)
    reserved = (
        TORCHVISION_RESERVED if _has_train_flag(factory) else (*TORCHVISION_RESERVED, "split")
    )
    # EMNIST, QMNIST and ImageNet pass further arguments to their base class.
    names, takes_any = keyword_names(factory)
    more_names = [*names, *keyword_names(factory.__mro__[1])[0]] if takes_any else []
    problems = kwargs_problems("data.kwargs", factory, kwargs, reserved, more_names=more_names)
    if val is not None and not _has_train_flag(factory) and "split" not in names:
        problems.append(
            Problem(
                "data.val", f"{name} has one part only: use data.val=null data.val_fraction=0.1"
            )
        )
    return problems


def _open_torchvision(name: str, root: Path, part: str, kwargs: Mapping[str, Any]) -> Any:
    """A part of the dataset; missing files are downloaded. Raises DataError if that fails, and for an unknown part.

    part: `train` is `train=True` for sets with that flag, anything else `train=False`; for sets with a `split` it is
    that, and `val` also means `valid` or `test`.
    """
    factory = getattr(torchvision.datasets, name)
    taken, _ = keyword_names(factory)
    arguments = {**kwargs, "root": str(root)} if "root" in taken else dict(kwargs)
    choices: list[dict[str, Any]] = [{}]
    if _has_train_flag(factory):
        choices = [{"train": part == "train"}]
    elif "split" in taken:
        choices = [
            {"split": name} for name in (("val", "valid", "test") if part == "val" else (part,))
        ]
    for choice in choices:
        try:
            return _with_files(factory, arguments | choice, root)
        except ValueError as error:  # such as an unknown split
            reason = first_line(error)
    raise DataError(
        f"torchvision:{name}, part {part!r}: {reason}\ncorrect data.train, data.val or data.kwargs"
    )


def _with_files(factory: Any, arguments: dict[str, Any], root: Path) -> Any:
    """The dataset; its files are downloaded where they are missing."""
    try:
        return factory(**arguments)
    except (RuntimeError, FileNotFoundError) as error:
        reason = first_line(error)
    try:
        if "download" in inspect.signature(factory).parameters:
            with contextlib.redirect_stdout(sys.stderr):
                return factory(**arguments, download=True)
    except (RuntimeError, OSError) as error:
        reason = f"its files are missing, and the download failed: {first_line(error).rstrip(':')}"
    remedy = f"put its files under {root}, as torchvision documents them"
    raise DataError(f"torchvision:{factory.__name__}: {reason}\n{remedy}")
