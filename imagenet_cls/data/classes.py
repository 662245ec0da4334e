"""Which classes a dataset or the outputs of a model have, and in which order.

A target is an index in such an order. The classes of a dataset are listed in a text file or in
`data.classes`, or follow from its labels, its folders or its attributes. Published weights have the
classes of ImageNet.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from imagenet_cls.config.schema import Config, DataConfig
from imagenet_cls.errors import DataError
from imagenet_cls.files import read_text
from imagenet_cls.text import format_value, join_names

# The keys that hold out images of a dataset without validation images.
HOLD_OUT_ADVICE = "data.val=null data.val_fraction=0.1"
IMAGENET_CLASSES = 1000
_NUMBER = re.compile(r"-?[0-9]+")
# As Python, numpy and pandas write them. Other ids, such as `0_1` and `00e1`, are names.
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]*)?(e[+-][0-9]+)?|nan|-?inf", re.IGNORECASE)
_SEPARATOR = re.compile(r"\s*[;,|/]\s*|\s+")  # of several labels


def chosen_classes(config: DataConfig) -> tuple[str, ...] | None:
    """The classes that `data.classes` lists or that its file has; None: all. Raises DataError."""
    if config.classes is None:
        return None
    if isinstance(config.classes, list):
        return tuple(config.classes)
    return tuple(read_classes(Path(config.classes).expanduser(), "data.classes: "))


def read_classes(file: Path, key: str = "") -> list[str]:
    """The lines of a text file, one class each. Raises DataError without a class, or if one is
    repeated.

    key: what the remedy begins with, such as the key of the config that names the file.
    """
    remedy = f"{key}Give a text file with one class a line, each once."
    names = [line.strip() for line in read_text(file, remedy).splitlines() if line.strip()]
    if not names:
        raise DataError(f"{file}: lists no class.", remedy)
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise DataError(f"{file}: {join_names(repeated)} is listed more than once.", remedy)
    return names


def may_lack_classes(config: Config) -> bool:
    """Whether the validation part may lack classes of the training part. With several labels, mean
    average precision and macro F1 leave these out.
    """
    return config.eval.classes == "present" or config.data.labels == "multi"


# ---- labels of lists and shards


def resolve_labels(
    labels: Collection[str],
    training_classes: Sequence[str] | None,
    path: Path,
    class_file: Path,
    numbers_are_indices: bool = False,
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The target of each label that is known, and the names of the classes.

    The classes are the lines of `class_file`, if there is one, else the training classes, else
    they follow from the labels (`match_labels`). The lines of a `class_file` are matched to the
    training classes by name.

    path: the path of the part, for messages. numbers_are_indices: numbers are indices of the lines
    of `class_file`, even if they are names, too. Raises DataError.
    """
    if not class_file.is_file():
        return match_labels(labels, training_classes, path)
    own_classes = read_classes(class_file)
    targets, names = match_labels(labels, own_classes, path, numbers_are_indices)
    if training_classes is None:
        return targets, names
    used = sorted({names[target] for target in targets.values()})
    indices = match_classes(used, training_classes, class_file, allow_missing=True)
    new = dict(zip(used, indices, strict=True))
    by_name = {label: new[names[target]] for label, target in targets.items()}
    return by_name, tuple(training_classes)


def match_labels(
    labels: Collection[str],
    classes: Sequence[str] | None,
    path: Path | str,
    numbers_are_indices: bool = False,
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The target of each label that is known, and the names of the classes.

    Labels are names of `classes` if all of them are. Otherwise, if all are numbers, they are
    indices of `classes`. Otherwise they are names, and unknown ones have no target.

    Without `classes`, labels that are all numbers name the classes 0 to K - 1; other labels name
    their classes, sorted.

    path: the path of the part, for messages. numbers_are_indices: numbers are indices even if they
    are names, too. Raises DataError for numbers that leave out a class, and for numbers that may be
    names or indices.
    """
    if classes is None or not {*labels} <= {*classes}:
        check_numbers(labels, path)
    if classes is None:
        return _classes_named_by(labels, path)
    class_to_idx = {name: i for i, name in enumerate(classes)}
    are_numbers = all(_NUMBER.fullmatch(label) for label in labels)
    are_names = all(label in class_to_idx for label in labels)
    if not are_numbers or (are_names and not numbers_are_indices):
        targets = {label: class_to_idx[label] for label in labels if label in class_to_idx}
        return targets, tuple(classes)
    by_number = [name for name in classes if _FLOAT.fullmatch(name)]
    if by_number and not numbers_are_indices:
        raise DataError(
            f"{path}: the label {format_value(min(labels))} may be the name of a class, such as "
            f"{format_value(by_number[0])}, or the index of a class.",
            "Write all labels as the classes are named, or name no class by a number.",
        )
    targets = {label: int(label) for label in labels if 0 <= int(label) < len(classes)}
    return targets, tuple(classes)


def check_numbers(labels: Collection[str], path: Path | str) -> None:
    """Raise DataError if all labels are numbers, and one is not written as a whole number (`3.0`,
    as pandas writes the integers of a column with a missing value, `1.5`, `nan`), or two are equal
    (`01` and `1`).
    """
    if not all(map(_FLOAT.fullmatch, labels)):
        return
    others = sorted(label for label in labels if not _NUMBER.fullmatch(label))
    if others or len(set(map(int, labels))) < len(labels):
        raise DataError(
            f"{path}: all labels are numbers, and some, such as "
            f"{format_value([*others, *labels][0])}, are not whole ones, or one is there in two "
            "forms, such as 01 and 1.",
            "Write whole numbers, or list all classes, one per line, in a classes.txt in the "
            "folder of the list or of the archives.",
        )


def _classes_named_by(
    labels: Collection[str], path: Path | str
) -> tuple[dict[str, int], tuple[str, ...]]:
    """`match_labels` of labels that name the classes themselves."""
    if not all(map(_NUMBER.fullmatch, labels)):
        check_names(labels, path)
        names = sorted(labels)
        return {name: i for i, name in enumerate(names)}, tuple(names)
    targets = {label: int(label) for label in labels}
    numbers = sorted(targets.values())
    if numbers != list(range(len(numbers))):
        raise DataError(
            f"{path}: the {len(labels)} labels are numbers, but not 0 to {len(labels) - 1} "
            f"(one is {format_value(max(labels, key=len))}), so which outputs they are is not "
            "stated.",
            "List the classes, one per line and in the order of the outputs, in a classes.txt in "
            "the folder of the list or of the archives.",
        )
    return targets, tuple(map(str, numbers))


def check_names(labels: Collection[str], path: Path | str) -> None:
    """Raise DataError for labels that are no names of classes: a missing one, or several in one."""
    known = set(labels)
    for label in sorted(known):
        parts = set(_SEPARATOR.split(label))
        if label.strip().lower() in ("", "nan"):
            problem = "is a missing one"
        elif label[0] in "[({" or {*"|;"} & {*label} or (len(parts) > 1 and parts <= known):
            problem = "may be several"
        else:
            continue
        raise DataError(
            f"{path}: the label {format_value(label)} {problem}.",
            "Correct the labels (several of an image: cat;dog, with data.labels=multi), or list "
            "all classes, one per line, in a classes.txt beside (hf: make it a ClassLabel).",
        )


# ---- names of classes


def match_classes(
    found: Sequence[str],
    classes: Sequence[str],
    path: Path | str,
    *,
    allow_missing: bool = False,
    allow_extra: bool = False,
) -> list[int]:
    """The index of each class of a part in `classes`, by name; -1 for an extra one.

    If `found` is the numbers 0 to K - 1, and none of the K `classes` is a number, the numbers are
    indices of `classes`. The folders of ImageNet-V2 are named so.

    path: the path of the part, for messages. allow_missing: `found` need not have all classes.
    allow_extra: it may have others, too. Raises DataError.
    """
    has_numbers = any(name.isdecimal() for name in classes)
    if not has_numbers and set(found) == set(map(str, range(len(classes)))):
        return list(map(int, found))
    class_to_idx = {name: i for i, name in enumerate(classes)}
    extra = [name for name in found if name not in class_to_idx]
    if extra and not allow_extra:
        raise DataError(
            f"{path}: {len(extra)} of {len(found)} classes are not among the {len(classes)} "
            f"training classes: {join_names(extra)}.",
            "Name the classes as in training, in one form of Unicode, or use other images.",
        )
    missing = sorted(set(classes).difference(found))
    if missing and (not allow_missing or len(missing) == len(classes)):
        raise DataError(
            f"{path}: {len(missing)} of {len(classes)} classes (of the training part, or of "
            f"data.classes) are not here: {join_names(missing)}. It has {join_names(found)}.",
            "Add them, correct data.classes, or evaluate those that are here: eval.classes=present",
        )
    return [class_to_idx.get(name, -1) for name in found]


def class_difference(known: Sequence[str] | None, classes: Sequence[str]) -> str:
    """How the classes of weights differ from those of the data: their number or the first other
    one; "" if they don't, or if the weights don't name theirs.
    """
    if known is None:
        return ""
    if len(known) != len(classes):
        return f"there were {len(known)} classes, and {len(classes)} are here"
    for index, (old, new) in enumerate(zip(known, classes, strict=True)):
        if old != new:
            return f"class {index} was {old!a} there and is {new!a} here"
    return ""


# ---- outputs of weights that do not name their classes


def classes_of_outputs(
    config: Config, data_classes: tuple[str, ...], has_training: bool
) -> tuple[str, ...]:
    """The classes of weights that don't name them, in the order of their outputs.

    The number of outputs is `model.num_classes` if set; 1000 with `eval.classes=present` and no
    training part; else the number of `data_classes`. The classes of ImageNet are recognized by
    their names.

    data_classes: the classes of the images. has_training: whether there is a training part. Raises
    DataError if neither these names nor `data.classes` tell which outputs are the classes.
    """
    num_classes = config.model.num_classes
    is_chosen = config.data.classes is not None
    is_subset = config.eval.classes == "present" and not has_training
    count = num_classes or (IMAGENET_CLASSES if is_subset else len(data_classes))
    if is_chosen and len(data_classes) == count:
        return data_classes
    names = imagenet_outputs(data_classes, count)
    if not names and not is_chosen and len(data_classes) < (num_classes or 0):
        raise DataError(
            f"model.num_classes={count}: it is unknown which of these outputs are the "
            f"{len(data_classes)} classes of the images ({join_names(data_classes)}).",
            "List the classes in the order of the outputs, one a line: data.classes=FILE; "
            "or name the folders by WordNet ids.",
        )
    return names or data_classes


def natural_key(name: str) -> list[Any]:
    """A key that sorts as timm sorts class folders: numbers by value, upper case as lower case."""
    parts: list[Any] = re.split(r"(\d+)", name.lower())
    parts[1::2] = map(int, parts[1::2])
    return parts


def imagenet_order(classes: Sequence[str]) -> list[int]:
    """The output of each class in weights published for ImageNet-1k, followed by the outputs of
    the other classes.

    The outputs are in the order of the WordNet ids. Classes of folders that are named otherwise
    (`0`, `1`, `10`, ... or `tench`) are in the order of these names. The classes are named by
    WordNet ids, torchvision's categories or the first synonym of timm's descriptions; 1,000 classes
    also by the numbers 0 to 999. Raises DataError for other names.
    """
    return _match_imagenet(classes)[0]


def imagenet_outputs(classes: Sequence[str], count: int) -> tuple[str, ...]:
    """The names of `count` outputs, in their order, if `classes` are ImageNet's; else empty.

    The classes are named by WordNet ids, or all by the numbers from 0. Those of ImageNet-1k may
    also be named as for `imagenet_order`, and keep their names.
    """
    wordnet_ids = imagenet_ids(count)
    if set(classes) <= set(wordnet_ids) or set(classes) == set(map(str, range(count))):
        return wordnet_ids
    if count != IMAGENET_CLASSES:
        return ()
    try:
        order, known = _match_imagenet(classes)
    except DataError:
        return ()
    names = list(known)
    for name, output in zip(classes, order, strict=False):
        names[output] = name
    return tuple(names)


def imagenet_ids(count: int) -> tuple[str, ...]:
    """The WordNet ids of the version of ImageNet with `count` classes, in the order of the outputs
    of published weights; empty if there is none.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset  # imports torch

    subset = infer_imagenet_subset({"num_classes": count})
    return tuple(ImageNetInfo(subset).label_names()) if subset else ()


def readable_name(name: str) -> str:
    """`tiger cat` for a class that is named by its WordNet id, else ""."""
    if not re.fullmatch(r"n\d{8}", name):
        return ""
    return _wordnet_names().get(name, "")


def with_readable_name(name: str) -> str:
    """`tiger cat (n02123159)` for a WordNet id, else the name as it is."""
    readable = readable_name(name)
    return f"{readable} ({name})" if readable else name


@cache
def _wordnet_names() -> dict[str, str]:
    from timm.data import ImageNetInfo  # imports torch

    info = ImageNetInfo("imagenet-22k")
    names = {*imagenet_ids(IMAGENET_CLASSES), *info.label_names()}
    return {name: info.label_name_to_description(name).partition(",")[0] for name in names}


def _match_imagenet(classes: Sequence[str]) -> tuple[list[int], list[str]]:
    """`imagenet_order`, and the names of all classes by the kind of name that `classes` have."""
    names = [name.replace("_", " ").partition(",")[0] for name in classes]
    names = [str(int(name)) if name.isdecimal() else name for name in names]
    # The Hub's ILSVRC/imagenet-1k calls the machine so, since names of a ClassLabel are unique.
    names = ["crane" if name == "crane2" else name for name in names]
    candidates = _imagenet_names()
    if len(classes) < IMAGENET_CLASSES:
        candidates = candidates[1:]  # with fewer than 1,000 classes, numbers are not accepted
    for known in candidates:
        if names == known:  # also with a name that two classes share (there are two cranes)
            return list(range(IMAGENET_CLASSES)), known
        outputs = {name: output for output, name in enumerate(known) if known.count(name) == 1}
        if len(set(names)) == len(names) and outputs.keys() >= set(names):
            order = [outputs[name] for name in names]
            return order + sorted(set(range(IMAGENET_CLASSES)).difference(order)), known
    closest = max(candidates, key=lambda known: len(set(names).intersection(known)))
    unknown = next((name for name in names if name not in closest), "a name that two classes share")
    raise DataError(
        f"The published weights have the classes of ImageNet-1k, and the dataset's {unknown!r} is "
        "not one of them.",
        "Name the classes by WordNet ids (n01440764), by torchvision's categories, or all by the "
        "numbers 0 to 999.",
    )


@cache
def _imagenet_names() -> tuple[list[str], ...]:
    """The classes in the order of the outputs, by each kind of name; the numbers come first."""
    from timm.data import ImageNetInfo  # these import torch
    from torchvision.models import ResNet18_Weights

    info = ImageNetInfo("imagenet-1k")
    first_synonyms = [description.partition(",")[0] for description in info.label_descriptions()]
    numbers = [str(number) for number in range(IMAGENET_CLASSES)]
    return numbers, info.label_names(), ResNet18_Weights.DEFAULT.meta["categories"], first_synonyms
