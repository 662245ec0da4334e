"""Opens the dataset of the config's `data` section, of any kind."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.classes import chosen_classes
from imagenet_cls.data.files import training_classes
from imagenet_cls.data.image_set import FileImages, ImageSet
from imagenet_cls.data.lists import bad_rows
from imagenet_cls.data.splits import fraction_rows, split_by_config
from imagenet_cls.data.torchvision_sets import CLASSIFICATION_SETS, PREFIX
from imagenet_cls.entry_points import DATA_OPENERS, data_opener, load_opener
from imagenet_cls.errors import DataError, Problem
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.text import join_names


@dataclass(frozen=True)
class DataSets:
    """An open dataset: its parts by name.

    classes: names, in the order of the targets. note: for the user, about images that are left out.
    """

    parts: Mapping[str, ImageSet]
    classes: tuple[str, ...]
    note: str | None = None

    @property
    def train(self) -> ImageSet:
        return self.parts["train"]

    @property
    def val(self) -> ImageSet:
        return self.parts["val"]


def open_datasets(
    config: DataConfig, parts: Collection[str] = ("train", "val"), *, allow_missing: bool = False
) -> DataSets:
    """Open the parts asked for. Writes the digits, or downloads a torchvision set, where they are
    missing.

    allow_missing: the validation part need not have all classes of the training part. Expects a
    section without `data_problems`. Raises DataError for data that is missing, empty or wrong.
    """
    found, classes = _open_parts(config, parts)
    notes = []
    opened = {}
    for part in parts:
        place = describe_part(config, getattr(config, part) or config.train)
        may_lack = allow_missing and part == "val"
        images = select_images(config, found[part], part, place, classes, may_lack)
        if images.note is not None and images.note not in notes:
            notes.append(images.note)
        if len(images) == 0:
            raise DataError(
                f"{place}: no image is left.",
                f"Correct data.root, data.{part} or data.group, or hold out a larger share "
                "(data.val_fraction).",
            )
        opened[part] = images
    names = next(iter(opened.values())).classes
    return DataSets(opened, names, "; ".join(notes) or None)


def files_only(data: DataSets) -> DataSets | None:
    """A dataset that lists files, which may be sent to other processes; None for another one."""
    are_files = all(isinstance(part.images, FileImages) for part in data.parts.values())
    return data if are_files else None


def _open_parts(
    config: DataConfig, parts: Collection[str]
) -> tuple[dict[str, ImageSet], Sequence[str] | None]:
    """The parts asked for, both where one is held out of the other, and the training classes if
    they are known.
    """
    opener = load_opener(config.name)
    if config.val is None:
        whole = opener.open_part(config, config.train)
        rows, held_out = split_by_config(config, whole.split_keys(), whole.strata(), whole.ids())
        return {"train": whole.select(rows), "val": whole.select(held_out)}, whole.classes
    found: dict[str, ImageSet] = {}
    classes: Sequence[str] | None = None
    if "train" in parts:
        found["train"] = opener.open_part(config, config.train)
        classes = found["train"].classes
    elif config.name in ("folder", "list"):
        classes = training_classes(config)
    if "val" in parts:
        found["val"] = opener.open_part(config, config.val, classes)
    return found, classes


def select_images(
    config: DataConfig,
    images: ImageSet,
    part: str,
    place: str,
    classes: Sequence[str] | None,
    allow_missing: bool,
) -> ImageSet:
    """A part without the images that `data.exclude` names, of the training part the share
    `data.fraction`, with targets in the order of `data.classes`, else of `classes` if given.

    place: of the part, for messages. allow_missing: it need not have all classes. Raises DataError.
    """
    if config.exclude is not None:  # `config.rules` says that the images are files
        root, path = (Path(name).expanduser() for name in (config.root, config.exclude))
        name = "training" if part == "train" else "validation"
        index = images.files.index.select(images.numbers)
        rows = bad_rows(index.full_paths(), root, path, name)
        if rows:
            names = join_names([images.name(row) for row in rows])
            note = f"{len(rows)} of {len(images)} {name} images left out by data.exclude: {names}"
            kept = images.select(np.delete(np.arange(len(images)), rows))
            images = replace(kept, left_out=len(rows), note=note)
    if part == "train" and config.fraction < 1:
        images = images.select(fraction_rows(images.split_keys(), images.strata(), config.fraction))
    chosen = chosen_classes(config)
    known = chosen or classes
    if known is None:
        return images
    is_chosen = chosen is not None
    return images.with_classes(known, place, allow_missing=allow_missing, allow_extra=is_chosen)


def describe_part(config: DataConfig, part: str) -> str:
    """The path of a part; the names of dataset and part if it does not consist of files."""
    opener = data_opener(config.name)
    if opener is not None and opener.has_paths:
        return str(Path(config.root) / part)
    return f"{config.name}, part {part!r}"


def data_problems(config: DataConfig) -> list[Problem]:
    """All problems of names and arguments. Imports what is named, and reads no data."""
    if data_opener(config.name) is not None:
        problems: list[Problem] = load_opener(config.name).problems(config)
        return problems
    known = [*DATA_OPENERS, *(PREFIX + name for name in CLASSIFICATION_SETS)]
    hint = did_you_mean(config.name, known) or did_you_mean(PREFIX + config.name, known)
    allowed = ", ".join(DATA_OPENERS)
    return [Problem("data.name", f"no dataset {config.name!r}{hint} (allowed: {allowed})")]
