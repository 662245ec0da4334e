"""Datasets of the Hugging Face Hub, and folders in its formats, read by the library `datasets`."""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.classes import check_names, whole_numbers
from imagenet_cls.data.image_set import EncodedImages, ImageSet, all_images
from imagenet_cls.data.targets import multi_hot, split_labels, target_bytes
from imagenet_cls.errors import (
    DataError,
    Problem,
    ResourceError,
    UsageError,
    UserError,
    explain_content_errors,
)
from imagenet_cls.files import read_regular
from imagenet_cls.lookup import kwargs_problems
from imagenet_cls.text import first_line, format_value, join_names, shorten

HUB = "hf:"
_MAX_CLASSES = 1_000_000  # a column of larger numbers holds ids, not classes


@dataclass(eq=False)
class HubImages(EncodedImages):
    """The rows of a part. The images stay in memory-mapped Arrow files.

    dataset_name: of the dataset and its part. contents, paths: of each image, the bytes and the
    path, either of which may be null; `pyarrow.ChunkedArray`s with the same chunks. parts: the
    names of all parts of the dataset. arguments: of the call of `open_hub`.
    """

    dataset_name: str
    contents: Any
    paths: Any
    targets: np.ndarray
    classes: tuple[str, ...]
    parts: tuple[str, ...]
    decode: str
    exif: str
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        # For workers that are not forked. A copy of the arrays would hold all images.
        return open_hub, self.arguments

    def __post_init__(self) -> None:
        super().__post_init__()
        # A look-up in a ChunkedArray walks through its chunks, thousands in ImageNet.
        self._chunks = list(zip(self.contents.chunks, self.paths.chunks, strict=True))
        lengths = [len(chunk) for chunk, _ in self._chunks]
        self._starts = [0, *np.cumsum(lengths).tolist()]

    def _row(self, i: int) -> tuple[Any, Any]:
        """The content and the path of image `i`, as scalars of pyarrow."""
        number = bisect_right(self._starts, i) - 1
        contents, paths = self._chunks[number]
        row = i - self._starts[number]
        return contents[row], paths[row]

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, number: int) -> bytes:
        content, path = self._row(number)
        if content.is_valid:
            return content.as_py()
        if not path.is_valid:
            raise DataError("neither bytes nor a path", "Correct the row.")
        return read_regular(path.as_py())

    def describe(self, number: int) -> str:
        path = self._row(number)[1].as_py()
        return self.name(number) if path is None else f"{self.name(number)} ({path})"

    def remedy(self, number: int) -> str:
        return "Correct this row, or save the dataset without it: Dataset.select, save_to_disk."

    def name(self, number: int) -> str:
        return f"{self.dataset_name}[{number}]"

    def file_name(self, number: int) -> str:
        return f"{number:08d}{Path(self._row(number)[1].as_py() or '').suffix}"

    def ids(self) -> Sequence[Hashable]:
        """The name of a row; path, size and a checksum of the content where several rows have
        that path and size. Files of several folders may be stored with the same name.
        """
        keys = list(zip(self.paths.to_pylist(), self._sizes().tolist(), strict=True))
        counts = Counter(keys)
        return [
            (key, crc32(self._row(row)[0].as_py() or b""))
            if key[0] and counts[key] > 1
            else self.name(row)
            for row, key in enumerate(keys)
        ]

    def _sizes(self) -> np.ndarray:
        """The size of each image that is stored as bytes, else -1: int64 (N,)."""
        from pyarrow import compute

        return compute.fill_null(compute.binary_length(self.contents), -1).to_numpy().astype("<i8")

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        """Over the size and the path of each image, targets and classes.

        Not over the fingerprint of `datasets`, which depends on where and when local files were
        written.
        """
        digest = sha256(self._sizes().tobytes() + target_bytes(self.targets))
        for texts in (self.paths.to_pylist(), self.classes):
            digest.update("\0".join(text or "" for text in texts).encode("utf-8", "replace"))
        return digest.hexdigest()


def open_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageSet:
    """A part. classes: not used. Raises as `open_hub`."""
    given = (config.name, part, config.labels, config.decode, config.exif)
    images = open_hub(*given, **config.kwargs)
    opened = all_images(images, images.targets, images.classes)
    used = {config.train, "validation" if config.val == "val" else config.val, config.val}
    others = [name for name in images.parts if name not in used]
    if part != config.train or not others:
        return opened
    return replace(opened, note=f"parts of the dataset that are not used: {join_names(others)}")


def problems(config: DataConfig) -> list[Problem]:
    """All problems of the arguments."""
    passed = ("name", "part", "labels", "decode", "exif")
    return kwargs_problems("data.kwargs", open_hub, config.kwargs, passed)


def open_hub(
    name: str,
    part: str,
    labels: str,
    decode: str,
    exif: str,
    image: str | None = None,
    label: str | None = None,
    subset: str | None = None,
    revision: str | None = None,
) -> HubImages:
    """A part of `hf:USER/NAME` or `hf:FOLDER`; what is missing is downloaded.

    image, label: columns; None: the only one of type Image or ClassLabel. subset: `name` of
    `datasets.load_dataset`. Raises DataError, ResourceError without a network or space, and
    UsageError without the library, and for arguments that are no text.
    """
    arguments = (name, part, labels, decode, exif, image, label, subset, revision)
    if "/" not in name:
        raise UsageError(
            f"data.name: {name!r} is neither {HUB}USER/NAME nor a folder, such as {HUB}./photos.",
            "Correct it.",
        )
    for value in arguments:
        if value is not None and not isinstance(value, str):
            raise UsageError(
                f"data.kwargs: {format_value(value)} is not text.", "Write it in quotes."
            )
    place = f"{name}/{part}"
    dataset, parts = _load_dataset(name, part, subset, revision)
    from datasets import ClassLabel, Image
    from pyarrow import compute

    image = _find_column(dataset.features, Image, "image", image, place)
    label = _find_column(dataset.features, ClassLabel, "label", label, place)
    remedy = "Name a column of images: data.kwargs.image=COLUMN"
    with explain_content_errors(DataError, place, f"the column {image!r} has no images", remedy):
        table = dataset.cast_column(image, Image(decode=False)).with_format("arrow")[:]
        contents, paths = (compute.struct_field(table[image], key) for key in ("bytes", "path"))
    read = _label_targets if labels == "multi" else _targets
    targets, classes = read(table[label], dataset.features[label], f"{place}, column {label!r}")
    return HubImages(place, contents, paths, targets, classes, parts, decode, exif, arguments)


def _load_dataset(
    name: str, part: str, subset: str | None, revision: str | None
) -> tuple[Any, tuple[str, ...]]:
    """The `datasets.Dataset` of a part, and the names of all parts. `val` also means `validation`.
    Raises as `open_hub`.
    """
    try:
        from datasets import (
            DatasetDict,
            disable_progress_bars,
            load_dataset_builder,
            load_from_disk,
        )
        from datasets.packaged_modules.cache.cache import Cache
    except ImportError as error:  # also where a folder of this name hides it
        raise UsageError(
            f"{name} needs the library datasets: {first_line(error)}.",
            "Install it: pip install datasets",
        ) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    location = name.removeprefix(HUB)
    folder = Path(location).expanduser()
    parts: Mapping[str, Any]
    try:
        if folder.is_dir():
            location = str(folder)
            if revision is not None:
                raise DataError(f"{name}: a folder has no revisions.", "Leave out revision.")
        elif location.startswith(("/", "~", ".")):
            raise DataError(f"{name}: no such folder.", "Correct data.name.")
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            saved = load_from_disk(location)
            parts = saved if isinstance(saved, DatasetDict) else {str(saved.split or part): saved}
            return parts[_find_part(name, part, parts)], tuple(parts)
        builder = load_dataset_builder(location, subset, revision=revision)
        # Without a network, `datasets` takes the newest revision in its cache.
        if isinstance(builder, Cache) and revision not in (None, builder.hash):
            raise ResourceError(
                f"{name}: the Hub can't be reached, and the newest revision in the cache is "
                f"{builder.hash}.",
                f"Start with a network, or with data.kwargs.revision={builder.hash}",
            )
        builder.download_and_prepare()
        parts = builder.info.splits
        return builder.as_dataset(_find_part(name, part, parts)), tuple(parts)
    except UserError:
        raise
    except Exception as error:  # of pyarrow, httpx, huggingface_hub and others
        raise _explained(name, folder, error) from error


def _explained(name: str, folder: Path, error: BaseException) -> UserError:
    """The error about a dataset that `datasets` can't open."""
    # The last error of a chain may only say that there was one.
    while not isinstance(error, OSError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = shorten(" ".join(str(error).split()), 300) or type(error).__name__
    is_missing = isinstance(error, FileNotFoundError | PermissionError)
    # pyarrow raises an OSError without a number for a file that is cut short.
    is_broken = folder.is_dir() and getattr(error, "errno", None) is None
    if isinstance(error, OSError) and not is_missing and not is_broken:
        return ResourceError(
            f"{name}: {reason}",
            "Repair the network, make room in HF_HOME, or save the dataset on another machine "
            f"(save_to_disk) and use data.name={HUB}FOLDER.",
        )
    return DataError(
        f"{name}: {reason}",
        "Correct data.name or data.kwargs, or write the folder again. For a gated or private "
        "dataset, get access on its page, then: hf auth login",
    )


def _find_part(name: str, part: str, parts: Mapping[str, Any]) -> str:
    if part == "val" and "val" not in parts:
        part = "validation"
    if part not in parts:
        raise DataError(
            f"{name}: no part {part!r}; it has {', '.join(parts)}.",
            "Correct data.train or data.val.",
        )
    return part


def _find_column(
    features: Mapping[str, Any], kind: type, key: str, column: str | None, place: str
) -> str:
    """`column`, or the only column of this type. Raises DataError."""
    if column is not None and column in features:
        return column
    found = [
        name
        for name, feature in features.items()
        if isinstance(getattr(feature, "feature", feature), kind)  # also of a list
    ]
    if column is None and len(found) == 1:
        return found[0]
    problem = f"{len(found)} columns of the type {kind.__name__}"
    if column is not None:
        problem = f"no column {column!r}"
    columns = (f"{name} ({type(feature).__name__})" for name, feature in features.items())
    raise DataError(
        f"{place}: {problem}; it has {shorten(', '.join(columns), 300)}.",
        f"Name one: data.kwargs.{key}=COLUMN",
    )


def _label_targets(values: Any, feature: Any, place: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """The targets in a column of lists of labels, or of text with `;` between labels: uint8
    (N, classes), and the classes. Raises DataError as `_targets`.
    """
    import pyarrow

    if pyarrow.types.is_integer(values.type):
        raise DataError(
            f"{place}: each row has one label, and data.labels is multi.",
            "Name a column of lists or of text, or set data.labels=single.",
        )
    rows = [split_labels(row) if isinstance(row, str) else row or () for row in values.to_pylist()]
    flat = pyarrow.chunked_array([list(chain.from_iterable(rows))])
    targets, classes = _targets(flat, getattr(feature, "feature", feature), place)
    ends = np.cumsum([len(row) for row in rows])
    classes_of = np.split(targets, ends[:-1])
    is_repeated = any(len(set(own)) < len(own) for own in map(tuple, classes_of))
    are_flags = all(np.array_equal(np.sort(own), [0, 1]) for own in classes_of)
    if classes == ("0", "1") and (is_repeated or are_flags):
        raise DataError(
            f"{place}: rows may have a 0 or 1 for each class.",
            "List the names or numbers of the classes that an image has.",
        )
    return multi_hot(classes_of, len(classes)), classes


def _targets(values: Any, feature: Any, place: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """The targets in a column, int64 (N,), and the classes: the names of a ClassLabel, else the
    values of integers and of text. Raises DataError.
    """
    import pyarrow.compute
    from datasets import ClassLabel

    classes: list[str]
    remedy = "Name a column of ClassLabel, small integers or text: data.kwargs.label=COLUMN"
    if pyarrow.types.is_floating(values.type):
        with explain_content_errors(DataError, place, "no whole numbers", remedy):
            values = values.cast("int64")
    is_integer = pyarrow.types.is_integer(values.type)
    highest = (pyarrow.compute.max(values).as_py() or 0) if is_integer else 0
    if isinstance(feature, ClassLabel):
        classes = feature.names
    elif is_integer and highest < _MAX_CLASSES:
        classes = [str(number) for number in range(highest + 1)]
    elif pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type):
        labels = values.unique().drop_null()
        name_of = whole_numbers(labels.to_pylist(), place)
        check_names(name_of, place)
        are_numbers = all(map(str.isdecimal, name_of.values()))
        classes = sorted(set(name_of.values()), key=int if are_numbers else None)
        class_to_idx = {name: i for i, name in enumerate(classes)}
        indices = [class_to_idx[name] for name in name_of.values()]
        rows = pyarrow.compute.index_in(values, labels)
        values = pyarrow.array(indices, "int64").take(rows)
    else:
        raise DataError(
            f"{place}: no classes ({values.type}{f' up to {highest}' if highest else ''}).",
            remedy,
        )
    targets = values.cast("int64").fill_null(-1).to_numpy()
    unlabeled = np.flatnonzero((targets < 0) | (targets >= len(classes)))
    if len(unlabeled):
        raise DataError(
            f"{place}: {len(unlabeled)} of {len(targets)} rows have no label, such as row "
            f"{unlabeled[0]}.",
            "Name another part or column, or save the dataset without them: Dataset.filter, "
            "save_to_disk.",
        )
    return targets, tuple(classes)
