"""The classes of a dataset and their order: text files; labels and folders matched to classes."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.errors import DataError, format_value, printable, shorten
from imagenet_cls.files import check_regular

NO_VALIDATION = "data.val=null data.val_fraction=0.1"
# Longer numbers are names of classes.
NUMBER = re.compile(r"-?[0-9]{1,9}")


def chosen_classes(data: DataConfig) -> tuple[str, ...] | None:
    """The classes that `data.classes` lists or that its file has; None: all. Raises DataError."""
    if data.classes is None or isinstance(data.classes, list):
        return None if data.classes is None else tuple(data.classes)
    return tuple(read_classes(Path(data.classes).expanduser(), "data.classes: "))


def read_classes(file: Path, key: str = "") -> list[str]:
    """The lines of a text file, one class each. Raises DataError without a class, or if one is repeated.

    key: of the config, for the error.
    """
    remedy = f"{key}give a text file with one class a line, each once"
    names = [line.strip() for line in read_text(file, remedy).splitlines() if line.strip()]
    if not names:
        raise DataError(f"{file}: lists no class\n{remedy}")
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise DataError(f"{file}: {join_names(repeated)} is listed more than once\n{remedy}")
    return names


def read_text(file: Path, remedy: str, length: int = -1) -> str:
    """The text of a file, or its first `length` characters. Raises DataError with the remedy if it can't be read."""
    try:
        check_regular(file)
        with file.open(encoding="utf-8-sig", errors="surrogateescape") as opened:
            return opened.read(length)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}\n{remedy}") from None


def label_positions(
    labels: set[str], classes: Sequence[str] | None, place: Path | str, by_position: bool = False
) -> tuple[dict[str, int], list[str]]:
    """The class of each known label of a part, and the names of the classes.

    Labels are names of `classes` if all of them are. Otherwise, if all are numbers, they are
    positions in `classes`. Without `classes`, labels that are all numbers name the classes 0 to
    K - 1; other labels name their classes, sorted.

    place: of the part, for messages. by_position: numbers are positions in `classes`, even if they
    are names, too. Raises DataError for numbers that leave out a class, and for numbers of which
    only some are names, or only some have at most 9 digits.
    """
    numbers = {label for label in labels if NUMBER.fullmatch(label)}
    if classes is None:
        others = sorted(labels - numbers)
        if not numbers or not all(other.removeprefix("-").isdecimal() for other in others):
            names = sorted(labels)
            return {name: i for i, name in enumerate(names)}, names
        found = {label: int(label) for label in numbers}
        if len(set(found.values())) < len(found):
            double = next(label for label in sorted(found) if str(int(label)) != label)
            what = f"{format_value(double)} and {format_value(str(int(double)))} are both labels"
            raise DataError(f"{place}: {what}\nwrite each number in one way")
        highest = max(found.values())
        if others or min(found.values()) < 0 or len(set(found.values())) <= highest:
            what = f"labels must be the numbers 0 to {highest}, each at least once"
            what += f", and one is {format_value(others[0])}" if others else ""
            raise DataError(
                f"{place}: {what}\n"
                "count classes from 0, or list all of them, one per line, in a classes.txt "
                "next to this file"
            )
        return found, [str(number) for number in range(highest + 1)]
    position = {name: i for i, name in enumerate(classes)}
    if numbers != labels or (labels <= position.keys() and not by_position):
        return position, list(classes)
    named = sorted(labels & position.keys())
    if named and not by_position:
        number = min(labels - position.keys())
        raise DataError(
            f"{place}: its labels are numbers, and only some of them are names of classes: "
            f"{format_value(named[0])} is one, {format_value(number)} is not\n"
            "use the names of the classes as labels, or their positions where no name is a number"
        )
    numeric = {_number(name): name for name in classes if _number(name) is not None}
    for label in sorted(labels):
        name = numeric.get(_number(label), label)
        if name != label and not by_position:
            raise DataError(
                f"{place}: the label {format_value(label)} may be the class {format_value(name)} or "
                "the position of a class\nwrite labels as the classes are named"
            )
    found = {label: int(label) for label in labels if 0 <= int(label) < len(classes)}
    return found, list(classes)


def _number(text: str) -> float | None:
    """The number that a text stands for; None for another text."""
    try:
        return float(text)
    except ValueError:
        return None


def targets_by_name(
    targets: np.ndarray, names: Sequence[str], classes: Sequence[str], place: Path | str
) -> np.ndarray:
    """Targets, int64 (N,), that are positions in `names`, as positions in `classes`.

    place: the file that lists `names`. Raises DataError for a target whose name is no class.
    """
    position = {name: i for i, name in enumerate(classes)}
    used = [names[i] for i in np.unique(targets)]
    if unknown := [name for name in used if name not in position]:
        what = f"{len(unknown)} of {len(used)} classes are not among the {len(classes)} training classes"
        raise DataError(
            f"{place}: {what}: {join_names(unknown)}\nuse the names of the training classes"
        )
    return np.array([position.get(name, -1) for name in names], np.int64)[targets]


def is_numbered(found: Sequence[str], classes: Sequence[str]) -> bool:
    """Whether the folders of a part are called by the positions of `classes`, all of them, which are not numbers."""
    return set(found) == set(map(str, range(len(classes)))) and not any(
        name.isdecimal() for name in classes
    )


def match_classes(
    found: Sequence[str],
    classes: Sequence[str],
    place: Path | str,
    subset: bool = False,
    ignore_others: bool = False,
) -> list[int]:
    """Position of each class of a part in `classes`, by name; -1 for one that is ignored.

    Folders that are called 0 to K - 1 are the K classes by their position if these are not numbers, as in ImageNet-V2.
    place: of the part, for messages. subset: `found` need not have all classes. ignore_others: it may have others, too.
    Raises DataError.
    """
    position = {name: i for i, name in enumerate(classes)}
    if is_numbered(found, classes):
        return list(map(int, found))
    unknown = [name for name in found if name not in position]
    if unknown and not ignore_others:
        what = f"{len(unknown)} of {len(found)} class folders are not among the {len(classes)} training classes"
        remedy = "use the same folder names for training and validation, or correct data.val"
        for known in classes:
            if unicodedata.normalize("NFC", known) == unicodedata.normalize("NFC", unknown[0]):
                remedy = f"rename {unknown[0]!a}: in training it is {known!a}, another Unicode normalization of this name"
        raise DataError(f"{place}: {what}: {join_names(unknown)}\n{remedy}")
    missing = sorted(set(classes).difference(found))
    if missing and ignore_others and (not subset or len(missing) == len(classes)):
        what = f"{len(missing)} of {len(classes)} classes of data.classes are not here: {join_names(missing)}"
        raise DataError(f"{place}: {what}\nit has {join_names(found)}: correct data.classes")
    if missing and not subset:
        what = f"{len(missing)} of {len(classes)} training classes have no folder here: {join_names(missing)}"
        remedy = "add them; or evaluate those that are here: eval.classes=present; or hold out training images"
        raise DataError(f"{place}: {what}\n{remedy}: {NO_VALIDATION}")
    return [position.get(name, -1) for name in found]


def join_names(names: Sequence[str], count: int = 3) -> str:
    """The first `count` names, each cut to 100 characters, and an ellipsis if there are more."""
    return ", ".join(shorten(printable(name), 100) for name in names[:count]) + (
        ", ..." if len(names) > count else ""
    )
