"""Datasets of the Hugging Face Hub, and folders in its formats, read by the library `datasets`."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.classes import check_names
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
from imagenet_cls.text import first_line, join_names, shorten

HUB = "hf:"


@dataclass(eq=False)
class HubImages(EncodedImages):
    """The rows of a part. The images stay in memory-mapped Arrow files.

    dataset_name: of the dataset and its part. rows: a `datasets.Dataset` in the format `arrow` with
    one column, whose rows have the bytes and the path of an image, either of which may be null.
    content_digest: see `digest_of`. parts: the names of all parts of the dataset.
    """

    dataset_name: str
    rows: Any
    targets: np.ndarray
    classes: tuple[str, ...]
    content_digest: str
    parts: tuple[str, ...]
    decode: str
    exif: str

    def __len__(self) -> int:
        return len(self.targets)

    def _row(self, number: int) -> Mapping[str, Any]:
        return self.rows[number].column(0)[0].as_py() or {"bytes": None, "path": None}

    def read(self, number: int) -> bytes:
        row = self._row(number)
        if row["bytes"] is not None:
            return row["bytes"]
        if row["path"] is None:
            raise DataError("neither bytes nor a path", "Correct the row.")
        return read_regular(row["path"])

    def describe(self, number: int) -> str:
        path = self._row(number)["path"]
        return self.name(number) if path is None else f"{self.name(number)} ({path})"

    def remedy(self, number: int) -> str:
        return "Correct this row, or save the dataset without it: Dataset.select, save_to_disk."

    def name(self, number: int) -> str:
        return f"{self.dataset_name}[{number}]"

    def file_name(self, number: int) -> str:
        return f"{number:08d}{Path(self._row(number)['path'] or '').suffix}"

    def digest(self) -> str:
        return self.content_digest


def open_part(config: DataConfig, part: str, classes: Sequence[str] | None = None) -> ImageSet:
    """A part. classes: not used. Raises as `open_hub`."""
    given = (config.name, part, config.labels, config.decode, config.exif)
    images = open_hub(*given, **config.kwargs)
    opened = all_images(images, images.targets)
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
    UsageError without the library.
    """
    parts = _load_parts(name, subset, revision)
    if part == "val" and "val" not in parts:
        part = "validation"
    if part not in parts:
        raise DataError(
            f"{name}: no part {part!r}; it has {', '.join(parts)}.",
            "Correct data.train or data.val.",
        )
    from datasets import ClassLabel, Image

    dataset = parts[part]
    place = f"{name}/{part}"
    image = _find_column(dataset.features, Image, "image", image, place)
    label = _find_column(dataset.features, ClassLabel, "label", label, place)
    remedy = "Name a column of images: data.kwargs.image=COLUMN"
    with explain_content_errors(DataError, place, f"the column {image!r} has no images", remedy):
        stored = dataset.cast_column(image, Image(decode=False)).with_format("arrow")
    targets, classes = _targets(
        stored[:][label], dataset.features[label], labels == "multi", f"{place}, column {label!r}"
    )
    rows = stored.select_columns([image])
    digest = digest_of(rows[:].column(0), targets, classes)
    return HubImages(place, rows, targets, classes, digest, tuple(parts), decode, exif)


def digest_of(images: Any, targets: np.ndarray, classes: Sequence[str]) -> str:
    """A digest of the size and the path of each image, targets and classes.

    Not of the fingerprint of `datasets`, which depends on where and when local files were written.
    """
    from pyarrow import compute

    lengths = compute.binary_length(compute.struct_field(images, "bytes"))
    sizes = compute.fill_null(lengths, -1).to_numpy().astype("<i8")
    digest = sha256(sizes.tobytes() + target_bytes(targets))
    for texts in (compute.struct_field(images, "path").to_pylist(), classes):
        digest.update("\0".join(text or "" for text in texts).encode("utf-8", "replace"))
    return digest.hexdigest()


def _load_parts(name: str, subset: str | None, revision: str | None) -> dict[str, Any]:
    """The `datasets.Dataset` of each part. Raises as `open_hub`."""
    try:
        from datasets import disable_progress_bars, load_dataset_builder, load_from_disk
        from datasets.packaged_modules.cache.cache import Cache
    except ImportError as error:  # also where a folder of this name hides it
        raise UsageError(
            f"{name} needs the library datasets: {first_line(error)}.",
            "Install it: pip install datasets",
        ) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    location = os.path.expanduser(name.removeprefix(HUB))  # noqa: PTH111 (keeps ./)
    try:
        if any(Path(location, file).is_file() for file in ("state.json", "dataset_dict.json")):
            saved = load_from_disk(location)
            return saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        builder = load_dataset_builder(location, subset, revision=revision)
        # Without a network, `datasets` takes the newest revision in its cache.
        if isinstance(builder, Cache) and revision not in (None, builder.hash):
            raise ResourceError(
                f"{name}: the Hub can't be reached, and the newest revision in the cache is "
                f"{builder.hash}.",
                f"Start with a network, or with data.kwargs.revision={builder.hash}",
            )
        builder.download_and_prepare()
        return builder.as_dataset()
    except UserError:
        raise
    except Exception as error:  # of pyarrow, httpx, huggingface_hub and others
        first: BaseException = error
        # The last error of a chain may only say that there was one.
        while not isinstance(first, OSError) and isinstance(first.__cause__, Exception):
            first = first.__cause__
        kind: type[UserError] = ResourceError
        if not isinstance(first, OSError) or isinstance(first, FileNotFoundError | PermissionError):
            kind = DataError
        raise kind(
            f"{name}: {shorten(' '.join(str(first).split()), 300) or type(first).__name__}",
            "Correct data.name or data.kwargs; repair the network; make room in HF_HOME; or write "
            "the folder again. For a gated dataset, get access on its page, then: hf auth login",
        ) from error


def _find_column(
    features: Mapping[str, Any], kind: type, key: str, column: str | None, place: str
) -> str:
    """`column`, or the only column of this type. Raises DataError."""
    # also of a list
    found = [name for name in features if isinstance(_element(features[name]), kind)]
    if column is None and len(found) == 1:
        return found[0]
    if column in features:
        return str(column)
    columns = (f"{name} ({type(feature).__name__})" for name, feature in features.items())
    raise DataError(
        f"{place}: {column or 'one'} of these must be the column of the type {kind.__name__}: "
        f"{shorten(', '.join(columns), 300)}.",
        f"Name a column: data.kwargs.{key}=COLUMN",
    )


def _element(feature: Any) -> Any:
    """The feature of the elements of a list; any other feature as it is."""
    return getattr(feature, "feature", feature)


def _targets(
    column: Any, feature: Any, is_multilabel: bool, place: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The targets in a column, and the classes: the names of a ClassLabel, or the sorted texts.

    Targets are int64 (N,), or with several labels, in lists or in text with `;` between them, uint8
    (N, classes). Raises DataError.
    """
    from datasets import ClassLabel

    element = _element(feature)
    has_classes = isinstance(element, ClassLabel)
    is_text = getattr(element, "dtype", None) in ("string", "large_string")
    has_lists = element is not feature
    fits = has_lists == is_multilabel or (is_multilabel and is_text)
    if not fits or not (has_classes or is_text):
        raise DataError(
            f"{place}: {feature} with data.labels={'multi' if is_multilabel else 'single'}.",
            "Name a column of ClassLabel or text, with several labels of lists of these or of text "
            "such as cat;dog. To make one of numbers: Dataset.class_encode_column, save_to_disk.",
        )
    values = column.to_pylist()
    rows: list[tuple[Any, ...]]
    if not is_multilabel:
        rows = [() if value is None else (value,) for value in values]
    elif has_lists:
        rows = [tuple(value or ()) for value in values]
    else:
        rows = [split_labels(value or "") for value in values]
    if has_classes:
        classes = element.names
    else:
        classes = sorted({text for row in rows for text in row if text is not None})
        check_names(classes, place)
        number_of = {text: number for number, text in enumerate(classes)}
        rows = [tuple(number_of.get(text) for text in row) for row in rows]
    known = range(len(classes))
    unlabeled = [
        number
        for number, row in enumerate(rows)
        if not (row or is_multilabel) or any(label not in known for label in row)
    ]
    if unlabeled:
        raise DataError(
            f"{place}: {len(unlabeled)} of {len(rows)} rows have no label, such as row "
            f"{unlabeled[0]}.",
            "Name another part or column, or save the dataset without them: Dataset.filter, "
            "save_to_disk.",
        )
    if is_multilabel:
        return multi_hot(rows, len(classes)), tuple(classes)
    return np.array(rows, np.int64).reshape(-1), tuple(classes)
