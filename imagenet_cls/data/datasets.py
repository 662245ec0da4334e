"""Opens the dataset of the config's `data` section, of any kind."""

import contextlib
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torchvision.datasets

from imagenet_cls.config.schema import COUNT, DataConfig
from imagenet_cls.data.archives import find_archives, index_archives
from imagenet_cls.data.builtin import SyntheticSource, write_digits
from imagenet_cls.data.classes import HOLD_OUT_ADVICE, chosen_classes, classes_of_dataset
from imagenet_cls.data.decode import has_heif
from imagenet_cls.data.index import (
    HEIF_SUFFIXES,
    ImageIndex,
    class_folders,
    index_folder,
)
from imagenet_cls.data.lists import BAD_IMAGES_FILE, exclude_images, index_list
from imagenet_cls.data.sources import (
    ArraySource,
    FolderSource,
    ImageSource,
    MapSource,
    SubsetSource,
    with_classes,
)
from imagenet_cls.data.splits import fraction_rows, split_by_config
from imagenet_cls.entry_points import load_extra
from imagenet_cls.errors import DataError, Problem, UserError
from imagenet_cls.lookup import (
    NameNotFoundError,
    did_you_mean,
    import_factory,
    is_factory_name,
    keyword_names,
    kwargs_problems,
    number_problem,
)
from imagenet_cls.text import command_line, first_line

BUILT_IN = ("folder", "list", "digits", "synthetic")
TORCHVISION = "torchvision:"
HUB = "hf:"
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
# Methods that make a Pillow image of `self.data[i]`: of CIFAR-10 and -100, of MNIST, Fashion-MNIST,
# KMNIST and EMNIST, and of two others.
READ_FROM_ARRAY = {
    torchvision.datasets.CIFAR10.__getitem__,
    torchvision.datasets.MNIST.__getitem__,
    torchvision.datasets.SEMEION.__getitem__,
    torchvision.datasets.USPS.__getitem__,
}
TORCHVISION_RESERVED = ("root", "train", "transform", "target_transform", "transforms", "download")


@dataclass(frozen=True)
class DataSets:
    """An open dataset: its parts by name.

    classes: names, in the order of the targets. note: for the user, about images that are left out.
    """

    parts: Mapping[str, ImageSource]
    classes: tuple[str, ...]
    note: str | None = None

    @property
    def train(self) -> ImageSource:
        return self.parts["train"]

    @property
    def val(self) -> ImageSource:
        return self.parts["val"]


def open_datasets(
    config: DataConfig, parts: Collection[str] = ("train", "val"), *, allow_missing: bool = False
) -> DataSets:
    """Open the parts asked for. Writes the digits, or downloads a torchvision set, where they are
    missing.

    allow_missing: the validation part need not have all classes of the training part. Expects a
    section without `data_problems`. Raises DataError for data that is missing, empty or wrong.
    """
    assert parts and set(parts) <= {"train", "val"}, parts
    chosen = chosen_classes(config)
    notes: list[str] = []
    classes: Sequence[str] | None = None
    sources: dict[str, ImageSource] = {}
    if config.name == "synthetic":
        sources |= _open_synthetic(**config.kwargs)
    elif config.name in BUILT_IN:
        indexes, classes = _index_files(config, parts)
        for part, index in indexes.items():
            if part in parts:
                sources[part], note = files_source(config, index, is_training=part == "train")
                notes += [note] if note else []
    else:
        sources |= _open_map_style(config, parts)
        classes = sources["train"].classes if "train" in sources else None
    if chosen is not None:
        classes = chosen
    opened: dict[str, ImageSource] = {}
    for part in parts:
        source = sources[part]
        if classes is not None:
            source = with_classes(
                source,
                classes,
                describe_part(config, getattr(config, part) or config.train),
                allow_missing=allow_missing and part == "val",
                allow_extra=chosen is not None,
            )
        if len(source) == 0:
            place = describe_part(config, getattr(config, part) or config.train)
            if part == "val" and config.val is None and chosen is None:
                raise DataError(
                    f"{place}: no image is held out.",
                    "Add images, or hold out a larger share (data.val_fraction).",
                )
            keys = f"data.root, data.{part}, data.val_fraction, data.fold"
            if config.group:
                keys += ", data.group"
            raise DataError(f"{place}: part {part!r} holds no image.", f"Correct one of {keys}.")
        opened[part] = source
    names = next(iter(opened.values())).classes
    return DataSets(opened, names, "; ".join(notes) or None)


def describe_part(config: DataConfig, part: str) -> str:
    """The path of a part; the names of dataset and part if it does not consist of files."""
    if config.name in ("folder", "list", "digits"):
        return str(Path(config.root) / part)
    return f"{config.name}, part {part!r}"


def data_problems(config: DataConfig) -> list[Problem]:
    """All problems of names and arguments. Imports what is named, and reads no data."""
    if config.name.startswith(HUB):
        passed = ("name", "part", "decode", "exif")
        open_hub = load_extra("data.name=hf:")
        return kwargs_problems("data.kwargs", open_hub, config.kwargs, passed)
    if config.name.startswith(TORCHVISION):
        return _torchvision_set_problems(
            config.name.removeprefix(TORCHVISION), config.kwargs, config.val
        )
    if is_factory_name(config.name):
        return _factory_problems(config)
    if config.name not in BUILT_IN:
        known = [*BUILT_IN, *(TORCHVISION + name for name in CLASSIFICATION_SETS)]
        hint = did_you_mean(config.name, known) or did_you_mean(TORCHVISION + config.name, known)
        if config.name.startswith("hfds/"):  # these two are timm's names
            hint = f"; did you mean {HUB + config.name.removeprefix('hfds/')!r}?"
        elif config.name.startswith("wds/"):
            hint = "; did you mean 'folder', with the shards as data.train and data.val?"
        allowed = f"{', '.join(BUILT_IN)}, torchvision:NAME, hf:USER/NAME or my_module:my_factory"
        return [Problem("data.name", f"no dataset {config.name!r}{hint} (allowed: {allowed})")]
    problems = []
    if config.name == "synthetic":
        problems += kwargs_problems("data.kwargs", _open_synthetic, config.kwargs)
        for name, value in config.kwargs.items():
            text = number_problem(value, COUNT, whole=True)
            if text is not None:
                problems.append(Problem(f"data.kwargs.{name}", text))
    else:
        for name in config.kwargs:
            problems.append(Problem(f"data.kwargs.{name}", f"{config.name} takes no arguments"))
    if config.name == "digits" and config.val is not None:
        text = "digits have one part only: use data.val=null data.val_fraction=0.2"
        problems.append(Problem("data.val", text))
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


def _factory_problems(config: DataConfig) -> list[Problem]:
    try:
        factory = import_factory(config.name)
    except NameNotFoundError as error:
        return [Problem("data.name", str(error))]
    names, takes_any = keyword_names(factory)
    missing = [f"{name}=" for name in ("root", "part") if name not in names and not takes_any]
    if missing:
        text = (
            f"{config.name!r} is called as factory(root=..., part=...), but takes no "
            f"{' and '.join(missing)}"
        )
        return [Problem("data.name", text)]
    return kwargs_problems("data.kwargs", factory, config.kwargs, passed=("root", "part"))


def files_source(
    config: DataConfig, index: ImageIndex, is_training: bool
) -> tuple[FolderSource, str | None]:
    """The images of a part, and a note about those that `data.exclude` leaves out, or None."""
    root = Path(config.root).expanduser()
    note = None
    left_out = 0
    if config.exclude is not None:
        count = len(index)
        part = "training" if is_training else "validation"
        index, note = exclude_images(index, root, Path(config.exclude).expanduser(), part)
        left_out = count - len(index)
    if is_training and config.fraction < 1:
        index = index.select(fraction_rows(index.names, index.targets, config.fraction))
    check_heif(index)
    # paths of images in archives are known only with the config
    argument = shlex.quote(str(root)) if index.byte_ranges is None else "CONFIG"
    bad_images = (root.parent if root.is_file() else root) / BAD_IMAGES_FILE
    override = f"data.exclude={shlex.quote(str(bad_images))}"
    advice = (
        f"{command_line('verify-data')} {argument}, then {override} (a training that has begun "
        "also needs --resume; in Python: resume=True)"
    )
    return FolderSource(index, advice, config.decode, config.exif, left_out), note


def check_heif(index: ImageIndex) -> None:
    """Raise DataError at the start, not in an epoch, for HEIF images that can't be decoded."""
    if has_heif():
        return
    names = np.char.lower(index.names)
    is_heif = np.zeros(len(index), bool)
    for suffix in HEIF_SUFFIXES:
        is_heif |= np.char.endswith(names, suffix)
    rows = np.flatnonzero(is_heif)
    if len(rows):
        raise DataError(
            f"{index.root}: {len(rows)} HEIF images, which need pillow-heif, such as "
            f"{index.describe(rows[0])}.",
            "Install it (pip install pillow-heif), convert the images, or move them elsewhere.",
        )


def _index_files(
    config: DataConfig, parts: Collection[str]
) -> tuple[dict[str, ImageIndex], Sequence[str] | None]:
    """The index of each part asked for, and the training classes if there is a training part."""
    if config.name == "digits":
        write_digits(Path(config.root).expanduser(), config.train)
    if config.val is None:
        whole = index_part(config, config.train)
        images = whole.image_ids()
        rows, held_out = split_by_config(config, whole.names, whole.targets, images)
        return {"train": whole.select(rows), "val": whole.select(held_out)}, whole.classes
    indexes: dict[str, ImageIndex] = {}
    if "train" in parts:
        indexes["train"] = index_part(config, config.train)
        classes: Sequence[str] | None = indexes["train"].classes
    else:
        classes = training_classes(config)
    if "val" in parts:
        indexes["val"] = index_part(config, config.val, classes)
    return indexes, classes


def index_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageIndex:
    """The index of a part of `folder`, `list` or `digits`. classes: the training classes, for the
    labels of lists and shards; class folders are not matched to them.
    """
    root = Path(config.root).expanduser()
    multilabel = config.labels == "multi"
    if config.name == "list":
        return index_list(root / part, root, classes, multilabel)
    archives = find_archives(root, part)
    if archives:
        index = index_archives(root, part, archives, classes, multilabel)
    else:
        index = index_folder(root / part)
    if multilabel and index.targets.ndim == 1:
        raise DataError(
            f"{root / part}: class folders, which give each image one label, and data.labels is "
            "multi.",
            "List the images with their labels (data.name=list), or set data.labels=single.",
        )
    return index


def training_classes(config: DataConfig) -> Sequence[str] | None:
    """The classes of the training part of `folder` or `list`; None without one."""
    if not has_training_part(config):
        return None
    root = Path(config.root).expanduser()
    if config.name == "folder" and not find_archives(root, config.train):
        return class_folders(root / config.train)  # the images are not listed
    return index_part(config, config.train).classes


def has_training_part(config: DataConfig) -> bool:
    """False if `data.val` is given, and the folder, archive or list of `data.train` is missing."""
    if config.name not in ("folder", "list") or config.val is None:
        return True
    return has_files_of_part(config, config.train)


def has_files_of_part(config: DataConfig, part: str) -> bool:
    """Whether the folder, archive or list of a part is there."""
    root = Path(config.root).expanduser()
    exists = os.path.exists(root / part)  # noqa: PTH110 (pathlib raises for names that no file can have)
    return exists or bool(find_archives(root, part))


def _open_map_style(config: DataConfig, parts: Collection[str]) -> dict[str, ImageSource]:
    """The parts of torchvision's sets, of the Hub's and of factories."""
    sources: dict[str, ImageSource] = {}
    if config.val is None:
        whole = _map_source(config, config.train)
        rows, held_out = split_by_config(config, *_names_and_targets(whole), whole.image_ids())
        sources["train"] = SubsetSource(whole, rows)
        sources["val"] = SubsetSource(whole, held_out)
    else:
        names = {"train": config.train, "val": config.val}
        for part in parts:
            sources[part] = _map_source(config, names[part])
    if "train" in sources and config.fraction < 1:
        train = sources["train"]
        rows = fraction_rows(*_names_and_targets(train), config.fraction)
        sources["train"] = SubsetSource(train, rows)
    return sources


def _names_and_targets(source: ImageSource) -> tuple[list[bytes], np.ndarray]:
    """The indices of the images in the dataset, as names for the split, and their targets: int64
    (N,).

    Where targets are known only by reading all images, they are 0 here, and splits are not by
    class.
    """
    rows = source.rows if isinstance(source, SubsetSource) else range(len(source))
    names = [str(i).encode() for i in rows]
    targets = source.known_targets()
    if targets is None:
        targets = np.zeros(len(source), np.int64)
    return names, targets


def _map_source(config: DataConfig, part: str) -> ImageSource:
    if config.name.startswith(HUB):
        hub: ImageSource = load_extra("data.name=hf:")(
            config.name, part, config.decode, config.exif, **config.kwargs
        )
        return hub
    root = Path(config.root).expanduser()
    name = f"{config.name}/{part}"
    dataset: Any
    kind = MapSource
    if config.name.startswith(TORCHVISION):
        dataset = _open_torchvision(
            config.name.removeprefix(TORCHVISION), root, part, config.kwargs
        )
        if type(dataset).__getitem__ in READ_FROM_ARRAY:
            kind = ArraySource
    else:
        dataset = import_factory(config.name)(root=str(root), part=part, **config.kwargs)
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has_items or isinstance(dataset, str | Mapping):
        raise UserError(
            f"data.name: {config.name!r} returned {type(dataset).__name__}, which is no dataset.",
            "Return a map-style dataset: len(dataset), and dataset[i] -> (image, target).",
        )
    return kind(dataset, name, classes_of_dataset(dataset, name), config.labels)


def accepted_names(factory: Any) -> list[str]:
    """The names that a dataset of torchvision takes as keyword arguments."""
    names, takes_any = keyword_names(factory)
    if takes_any:  # EMNIST, QMNIST and ImageNet pass further arguments to their base class
        names += keyword_names(factory.__base__)[0]
    return names


def _torchvision_set_problems(
    name: str, kwargs: Mapping[str, Any], val: str | None
) -> list[Problem]:
    """Problems of `torchvision:NAME` (here: NAME) and its arguments. Reads no data."""
    if name not in CLASSIFICATION_SETS or not hasattr(torchvision.datasets, name):
        hint = did_you_mean(name, CLASSIFICATION_SETS)
        return [Problem("data.name", f"torchvision has no classification dataset {name!r}{hint}")]
    factory = getattr(torchvision.datasets, name)
    accepted = accepted_names(factory)
    passed = [*TORCHVISION_RESERVED]
    if "train" not in accepted:  # EMNIST has both, and its `split` is something else
        passed.append("split")
    problems = kwargs_problems("data.kwargs", factory, kwargs, passed, more_names=accepted)
    if val is not None and not {"train", "split"} & set(accepted):
        text = f"{name} has one part only: use {HOLD_OUT_ADVICE}"
        problems.append(Problem("data.val", text))
    return problems


def _open_torchvision(name: str, root: Path, part: str, kwargs: Mapping[str, Any]) -> Any:
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
    remedy = f"Put its files under {root}, as torchvision documents them."
    folder = root / factory.__name__ / "raw"  # of MNIST and the sets derived from it
    if any(folder.glob("*-ubyte.gz")):
        remedy = f"Unpack its files: gunzip --keep {shlex.quote(str(folder))}/*.gz"
    raise DataError(f"torchvision:{factory.__name__}: {reason}", remedy)
