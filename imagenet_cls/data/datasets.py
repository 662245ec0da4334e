"""The config's `data` section, turned into images: one function opens any kind of data set.

Owns the meaning of `data.name`, `root`, `train`, `val`, `val_fraction` and `exclude`. Refuses to guess: a part
that is not there is an error that says what is. Called by `engine` (stage 2 of the check, and the opening) and by the
tools.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.digits import write_digits
from imagenet_cls.data.index import ImageIndex, held_out, index_folder, split
from imagenet_cls.data.layout import class_folders, refuse_missing_part
from imagenet_cls.data.lists import index_list
from imagenet_cls.data.manifest import FILE_NAME, leave_out, refuse_bad
from imagenet_cls.data.sources import FolderSource, ImageSource, MapSource, SubsetSource, known_classes, known_targets
from imagenet_cls.data.synthetic import SyntheticSource
from imagenet_cls.data.torchvision_sets import CLASSIFICATION_SETS, check_torchvision, open_torchvision
from imagenet_cls.errors import DataError, Problem
from imagenet_cls.lookup import did_you_mean, import_factory, is_factory_name, keyword_names, kwargs_problems

BUILT_IN = ("folder", "list", "digits", "synthetic")
TORCHVISION = "torchvision:"
SYNTHETIC_KWARGS = {"train_images": 1_281_167, "val_images": 50_000, "num_classes": 1000, "size_px": 224}


@dataclass(frozen=True)
class DataSets:
    """What was opened. A part that was not asked for is None. classes: of both parts, in the order of the targets.

    note: what a user should know of it, such as that images are left out; None where there is nothing.
    """

    train: ImageSource | None
    val: ImageSource | None
    classes: tuple[str, ...]
    note: str | None = None


def open_datasets(data: DataConfig, parts: Collection[str] = ("train", "val")) -> DataSets:
    """Open the parts asked for, of `train` and `val`. Writes the digits or downloads a torchvision set where they are
    missing.

    Expects a section that `data_problems` finds no problem in. Raises DataError for data that is missing, empty or does
    not fit.
    """
    assert parts and set(parts) <= {"train", "val"}, parts
    note = None
    opened: dict[str, ImageSource | None]
    if data.name == "synthetic":
        opened = _open_synthetic(data)
    elif data.name in BUILT_IN:
        opened, note = _open_files(data, parts)
    else:
        opened = _open_map_style(data, parts)
    train, val = (opened.get(part) if part in parts else None for part in ("train", "val"))
    known = train if train is not None else val
    assert known is not None
    for part, source in (("train", train), ("val", val)):
        if source is not None and len(source) == 0:
            raise DataError(
                f"{data.name}: its part {part!r} holds no image\nset data.root, data.{part} or data.val_fraction"
            )
    return DataSets(train, val, known.classes, note)


def data_problems(data: DataConfig) -> list[Problem]:
    """Problems of names and keyword arguments, all at once. Imports what is named and touches no data."""
    if data.name.startswith(TORCHVISION):
        return check_torchvision(data.name.removeprefix(TORCHVISION), data.kwargs, data.val)
    if is_factory_name(data.name):
        return _check_factory(data)
    if data.name not in BUILT_IN:
        known = [*BUILT_IN, *(TORCHVISION + name for name in CLASSIFICATION_SETS)]
        hint = did_you_mean(data.name, known) or did_you_mean(TORCHVISION + data.name, known)
        allowed = f"{', '.join(BUILT_IN)}, torchvision:NAME or my_module:my_factory"
        return [Problem("data.name", f"no data set {data.name!r}{hint} (allowed: {allowed})")]
    allowed_kwargs = list(SYNTHETIC_KWARGS) if data.name == "synthetic" else []
    problems = []
    for name, value in data.kwargs.items():
        if name not in allowed_kwargs:
            listing = ", ".join(allowed_kwargs) or "no keywords at all"
            hint = did_you_mean(name, allowed_kwargs)
            problems.append(Problem(f"data.kwargs.{name}", f"unknown keyword{hint} (allowed: {listing})"))
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(Problem(f"data.kwargs.{name}", f"{value!r} is not a whole number of at least 1"))
    if data.name == "digits" and data.val is not None:
        problems.append(Problem("data.val", "digits have one part only: use data.val=null data.val_fraction=0.2"))
    return problems


def _check_factory(data: DataConfig) -> list[Problem]:
    try:
        factory = import_factory(data.name)
    except LookupError as error:
        return [Problem("data.name", str(error))]
    names, takes_any = keyword_names(factory)
    missing = [f"{name}=" for name in ("root", "part") if name not in names and not takes_any]
    if missing:
        return [
            Problem(
                "data.name",
                f"{data.name!r} is called as factory(root=..., part=...) but takes no {' and '.join(missing)}",
            )
        ]
    return kwargs_problems("data", factory, data.kwargs, reserved=("root", "part"))


def _fraction(data: DataConfig) -> float:
    if data.val_fraction is None:
        raise DataError(
            "there is nothing to validate on: data.val and data.val_fraction are both null\nset data.val_fraction=0.1"
        )
    return data.val_fraction


def _open_synthetic(data: DataConfig) -> dict[str, ImageSource | None]:
    numbers = {**SYNTHETIC_KWARGS, **data.kwargs}
    return {
        part: SyntheticSource(part, numbers[f"{part}_images"], numbers["num_classes"], numbers["size_px"])
        for part in ("train", "val")
    }


def _open_files(data: DataConfig, parts: Collection[str]) -> tuple[dict[str, ImageSource | None], str | None]:
    """The parts of `folder`, `list` and `digits`, and a note about what `data.exclude` leaves out."""
    root = Path(data.root).expanduser()
    indexes, note, listed = _index_files(data, root, parts), None, root / FILE_NAME
    remedy = f"replace the file, or leave it out: python tools/verify_data.py {root}, then data.exclude={listed}"
    if data.exclude is not None and "train" in indexes:
        manifest = Path(data.exclude).expanduser()
        indexes["train"], note = leave_out(indexes["train"], root, manifest)
        if "val" in indexes:
            refuse_bad(indexes["val"], root, manifest)
        remedy = f"{manifest} does not name it; read the data set anew: python tools/verify_data.py {root}"
    remedies = {"train": remedy, "val": "replace the file: validation leaves no image out"}
    return {part: FolderSource(index, remedies[part]) for part, index in indexes.items()}, note


def _index_files(data: DataConfig, root: Path, parts: Collection[str]) -> dict[str, ImageIndex]:
    """The parts asked for, or both. Only the classes of the training part are read where val alone is asked for."""
    if data.name == "digits":
        write_digits(root, data.train)
    read: Callable[..., ImageIndex]
    if data.name == "list":
        read = lambda part, classes=None: index_list(root / part, root, classes)  # noqa: E731
    else:
        read = lambda part, classes=None: index_folder(root / part, classes)  # noqa: E731
        if "train" in parts or data.val is None:
            refuse_missing_part(root, data.train, "data.train")
        if "val" in parts and data.val is not None:
            refuse_missing_part(root, data.val, "data.val")
    if data.val is None:
        whole = read(data.train)
        if "val" not in parts and data.val_fraction is None:
            return {"train": whole}
        train, val = split(whole, _fraction(data))
        return {"train": train, "val": val}
    if "train" in parts:
        train = read(data.train)
        return {"train": train, "val": read(data.val, train.classes)} if "val" in parts else {"train": train}
    classes = None
    if (root / data.train).exists():
        classes = read(data.train).classes if data.name == "list" else class_folders(root / data.train)
    return {"val": read(data.val, classes)}


def _open_map_style(data: DataConfig, parts: Collection[str]) -> dict[str, ImageSource | None]:
    """The parts of torchvision's sets and of factories."""
    if data.val is None:
        whole = _map_source(data, data.train)
        if "val" not in parts and data.val_fraction is None:
            return {"train": whole}
        targets = known_targets(whole.dataset)
        if targets is None:  # not stratified then: the targets cannot be known without reading all images
            targets = np.zeros(len(whole), np.int64)
        mask = held_out((str(i).encode() for i in range(len(whole))), targets, _fraction(data))
        return {"train": SubsetSource(whole, np.flatnonzero(~mask)), "val": SubsetSource(whole, np.flatnonzero(mask))}
    opened: dict[str, ImageSource | None] = {}
    for part in parts:
        opened[part] = _map_source(data, data.train if part == "train" else data.val)
    train, val = opened.get("train"), opened.get("val")
    if train is not None and val is not None and train.classes != val.classes:
        raise DataError(
            f"{data.name}: its parts {data.train!r} and {data.val!r} have different classes "
            f"({len(train.classes)} and {len(val.classes)})\nuse parts of one data set with the same `classes`"
        )
    return opened


def _map_source(data: DataConfig, part: str) -> MapSource:
    root = Path(data.root).expanduser()
    name = f"{data.name}/{part}"
    dataset: Any
    if data.name.startswith(TORCHVISION):
        dataset = open_torchvision(data.name.removeprefix(TORCHVISION), root, part, data.kwargs)
    else:
        dataset = import_factory(data.name)(root=str(root), part=part, **data.kwargs)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{data.name} returned an object of type {type(dataset).__name__}, without length or index\n"
            "return a map-style dataset: len(dataset), and dataset[i] -> (image, target)"
        )
    return MapSource(dataset, name, known_classes(dataset, name))
