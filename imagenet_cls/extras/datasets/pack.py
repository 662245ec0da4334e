"""`tools/pack.py`: pack a dataset into WebDataset shards, tars with KEY.jpg and then KEY.cls.

`data.name=folder` reads them.
"""

import argparse
import contextlib
import glob
import io
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.classes import match_classes, match_labels, read_classes
from imagenet_cls.data.index import has_image_suffix
from imagenet_cls.data.targets import split_labels
from imagenet_cls.errors import DataError, UsageError, explain_content_errors
from imagenet_cls.extras.datasets.arguments import add_data_options, load_config_if_given, track
from imagenet_cls.files import explain_write_errors, new_file, take_lock, write_file
from imagenet_cls.text import first_line, format_value, join_names, printable

# Of a part, the files with the first prefix that any has.
PARQUET_PARTS = {"train": ("train-",), "val": ("validation-", "valid-", "val-", "test-")}
# In shards. WebDataset's and timm's readers look for `jpg`.
SUFFIXES = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "mpo": "jpg", "jpeg2000": "jp2"}
SHARD_FORMAT = 2  # 1: images have the suffixes of their files
PLAN_FILE = "pack.json"  # what the shards beside it were made of, and the options

# name of an image below its class, the file, classes; a description of the image, for messages
Sample = tuple[str, bytes, tuple[int, ...], str]
RowGroup = tuple[Path, int, int]  # file, number, rows


@dataclass(frozen=True)
class Part:
    """A part of a dataset.

    fingerprint: a text that differs for other data. count: the number of images. shards: the
    numbers of the images of each shard, or of the row groups of Parquet files. read: returns the
    samples of such a number. multilabel: whether an image may have several, or none.
    """

    classes: Sequence[str]
    fingerprint: str
    count: int
    shards: Sequence[range]
    read: Callable[[int], Sequence[Sample]]
    multilabel: bool = False


def pack_command(argv: Sequence[str]) -> None:
    """Pack a dataset. Raises DataError for bad data, UsageError for shards of other data."""
    parser = cli.build_parser(
        "pack",
        "Pack a dataset into WebDataset shards OUT/train/train-00000.tar, ... and OUT/val/..., for "
        "data.root=OUT. Files are copied as they are, unless --max-px or --reencode encodes them. "
        "The same command continues an interrupted one.",
        "SOURCE OUT [key=value ...] [--max-px N] [--quality Q | --reencode Q] "
        "[--images-per-shard N] [--multilabel] [--threads N]",
    )
    parser.add_argument(
        "source",
        type=cli.path,
        metavar="SOURCE",
        help="a folder or archive with train and val; a config; or a folder with the "
        "Parquet files of a dataset of Hugging Face: train-*.parquet, and validation-*.parquet or "
        "test-*.parquet, perhaps in data/",
    )
    parser.add_argument("out", type=cli.path, metavar="OUT")
    add_data_options(parser)
    parser.add_argument(
        "--max-px",
        type=cli.positive,
        metavar="N",
        help="shrink images whose longer side exceeds N",
    )
    quality = parser.add_mutually_exclusive_group()
    quality.add_argument(
        "--quality",
        type=cli.number(1, 100),
        default=90,
        metavar="Q",
        help="of shrunk images (default: 90)",
    )
    quality.add_argument(
        "--reencode",
        type=cli.number(1, 100),
        metavar="Q",
        help="encode every JPEG with quality Q and 4:2:0, which decode faster; lossy",
    )
    parser.add_argument(
        "--images-per-shard", type=cli.positive, default=1000, metavar="N", help="default: 1000"
    )
    parser.add_argument(
        "--multilabel",
        action="store_true",
        help="as data.labels=multi; labels of Parquet files are text such as cat;outdoor (lists of "
        "labels need no option)",
    )
    arguments = parser.parse_intermixed_args(argv)
    out = arguments.out
    if out.is_file():
        raise UsageError(f"{out} is a file.", "Give a folder as OUT.")
    parts = open_parts(
        str(arguments.source),
        arguments.overrides,
        arguments.images_per_shard,
        arguments.multilabel,
    )
    for part in parts.values():
        check_class_names(part.classes, str(arguments.source))
    if arguments.reencode is not None:
        print(f"lossy: every JPEG is encoded again with quality {arguments.reencode} and 4:2:0")
    with explain_write_errors(out, "Repair the cause; the same command then continues."):
        out.mkdir(parents=True, exist_ok=True)
        with take_lock(out, "Wait for that process, or stop it; then the same command continues."):
            for name, part in parts.items():
                write_part(name, part, arguments)


def check_class_names(classes: Sequence[str], source: str) -> None:
    """Raise DataError for a name that `read_classes` would not read back from the classes.txt of
    the shards.
    """
    for name, count in Counter(classes).items():
        if count > 1 or [line.strip() for line in name.splitlines()] != [name]:
            raise DataError(
                f"{source}: the class {format_value(name)} is there twice, is empty, or has white "
                "space at an end or a line break.",
                "Rename it: shards list their classes in classes.txt.",
            )


def open_parts(
    source: str, overrides: Sequence[str], per_shard: int, multilabel: bool = False
) -> dict[str, Part]:
    """The parts of the dataset that SOURCE names. Raises DataError and UsageError."""
    config = load_config_if_given(source, overrides)
    if config is not None:
        return indexed_parts(config.data, per_shard, multilabel)
    root = Path(source).expanduser()
    files = [
        root / name
        for pattern in ("*.parquet", "data/*.parquet")
        for name in sorted(glob.glob(pattern, root_dir=root))  # noqa: PTH207 (raises no error)
    ]
    parts: dict[str, Part] = {}
    for name, prefixes in PARQUET_PARTS.items():
        chosen = with_first_prefix(files, prefixes)
        if chosen:
            classes = parts["train"].classes if parts else None
            parts[name] = parquet_part(chosen, classes, per_shard, multilabel)
            print(printable(f"{name}: {join_names([path.name for path in chosen])}"))
            files = [path for path in files if path not in chosen]
    if not parts:
        return indexed_parts(DataConfig(root=str(root)), per_shard, multilabel)
    if files:
        print(printable(f"not packed: {join_names([path.name for path in files])}"))
    return parts


def with_first_prefix(files: Sequence[Path], prefixes: Sequence[str]) -> list[Path]:
    """The files whose names start with the first prefix that any of them has."""
    for prefix in prefixes:
        found = [path for path in files if path.name.startswith(prefix)]
        if found:
            return found
    return []


def indexed_parts(data: DataConfig, per_shard: int, multilabel: bool) -> dict[str, Part]:
    """The parts of a dataset that `open_datasets` indexes."""
    from imagenet_cls.data.datasets import open_datasets  # imports torch, which --help should not
    from imagenet_cls.data.image_set import FileImages, ImageSet

    multilabel = multilabel or data.labels == "multi"
    opened = open_datasets(replace(data, labels="multi") if multilabel else data)
    parts = {}

    def read_image(chosen: ImageSet, i: int) -> list[Sample]:
        number = int(chosen.numbers[i])
        content = chosen.files.decoded(number, bytes)
        assert chosen.targets is not None
        target = chosen.targets[i]
        own = np.flatnonzero(target).tolist() if target.ndim else [int(target)]
        return [(chosen.name(i), content, tuple(own), chosen.files.describe(number))]

    for name, chosen in opened.parts.items():
        if not isinstance(chosen.images, FileImages):
            raise UsageError(
                f"data.name {data.name!r} is not made of image files.",
                "Give a folder, an archive or a list.",
            )
        starts = range(0, len(chosen), per_shard)
        shards = [range(start, min(start + per_shard, len(chosen))) for start in starts]
        fingerprint = f"{chosen.digest} {chosen.size_fingerprint()}"
        read = partial(read_image, chosen)
        parts[name] = Part(chosen.classes, fingerprint, len(chosen), shards, read, multilabel)
    return parts


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A ParquetFile. Raises DataError if it can't be read."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            "Parquet files need pyarrow.", "Install it: pip install pyarrow."
        ) from None
    explain = explain_content_errors(DataError, path, "broken or cut short", "Download it again.")
    with explain, parquet.ParquetFile(path) as file:
        yield file


def parquet_part(
    files: Sequence[Path],
    classes: Sequence[str] | None,
    per_shard: int,
    multilabel: bool = False,
) -> Part:
    """The rows of Parquet files with the columns `image` (`bytes`, `path`) and `label`, of one
    label, of a list of labels, or with `multilabel` of text with `;` between labels.

    A shard has whole row groups. classes: the training classes; None: the names that the files
    store, else the lines of a classes.txt beside the files, else the labels. Integers are indices
    of the stored names, else in the classes; for strings see `match_labels`.
    """
    folder = files[0].parent
    groups: list[RowGroup] = []
    names: list[str] | None = None
    labels: set[int | str] = set()
    for path in files:
        with open_parquet(path) as file:
            if file.metadata.num_rows == 0:
                continue
            schema = file.schema_arrow
            if not {"image", "label"} <= set(schema.names):
                raise DataError(
                    f"{path}: its columns are {printable(', '.join(schema.names))}; `image` and "
                    "`label` are needed.",
                    "Rename the columns, or give a dataset for image classification.",
                )
            stored = _class_names(schema)
            if groups and stored != names:
                raise DataError(
                    f"{path}: its names of classes differ from {groups[0][0].name}.",
                    "Give files of one dataset.",
                )
            names = stored
            is_list = schema.field("label").type.num_fields == 1
            multilabel |= is_list
            if names is None:
                column = file.read(columns=["label"])["label"].drop_null()
                for label in column.to_pylist() if is_list else column.unique().to_pylist():
                    labels.update(_labels_of(label, multilabel))
            groups += [
                (path, i, file.metadata.row_group(i).num_rows) for i in range(file.num_row_groups)
            ]
    if not groups:
        listed = join_names([path.name for path in files])
        raise DataError(f"{folder}: no rows in {listed}.", "Give other files.")
    targets: dict[int | str, int]
    if names is not None:
        classes = names if classes is None else classes
        targets = dict(enumerate(match_classes(names, classes, files[0])))
    else:
        targets, classes = _targets_of_labels(labels, classes, folder)
    starts = []
    num_rows = per_shard  # of the last shard
    for number, (_, _, rows) in enumerate(groups):
        if num_rows >= per_shard:
            starts.append(number)
            num_rows = 0
        num_rows += rows
    shards = [range(start, end) for start, end in pairwise([*starts, len(groups)])]

    def read_group(number: int) -> list[Sample]:
        path, group, _ = groups[number]
        with open_parquet(path) as file:
            rows = file.read_row_group(group, columns=["image", "label"]).to_pylist()
        samples = []
        for i, row in enumerate(rows):
            description = f"{path}: row {i} of row group {group}"
            name, content, own = _parquet_row(row, targets, multilabel, description)
            samples.append((name or f"{path.stem}-{group}-{i}", content, own, description))
        return samples

    fingerprint = str([[path.name, path.stat().st_size] for path in files])
    count = sum(rows for _, _, rows in groups)
    return Part(classes, fingerprint, count, shards, read_group, multilabel)


def _labels_of(label: Any, multilabel: bool) -> Sequence[Any]:
    """The labels in a cell."""
    if multilabel and isinstance(label, str):
        return split_labels(label)
    return label if isinstance(label, list) else [label]


def _targets_of_labels(
    labels: Collection[int | str], classes: Sequence[str] | None, folder: Path
) -> tuple[dict[int | str, int], Sequence[str]]:
    """The target of each known label of files in `folder` that store no names, and the classes."""
    if classes is None and (folder / "classes.txt").is_file():
        classes = read_classes(folder / "classes.txt")
    are_integers = all(isinstance(label, int) for label in labels)
    target_of, classes = match_labels(set(map(str, labels)), classes, folder, are_integers)
    return {label: target_of[str(label)] for label in labels if str(label) in target_of}, classes


def _class_names(schema: Any) -> list[str] | None:
    """The names of the classes that Hugging Face's `datasets` stores in an Arrow schema, or
    None.
    """
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    label = stored.get("info", {}).get("features", {}).get("label", {})
    if isinstance(label, list):  # of one feature, as earlier versions store it
        (label,) = label
    names = label.get("feature", label).get("names")
    return None if names is None else list(map(str, names))


def _parquet_row(
    row: dict[str, Any],
    targets: Mapping[int | str, int],
    multilabel: bool,
    description: str,
) -> tuple[str, bytes, tuple[int, ...]]:
    """Name (perhaps empty), file and classes. targets: the target of each label."""
    image = row["image"]
    labels = _labels_of(row["label"], multilabel)
    if not isinstance(image, dict) or not image.get("bytes"):
        raise DataError(
            f"{description}: no image: column `image` has no `bytes`.",
            "Give a column of structs with `bytes`, the files, not only their paths.",
        )
    for label in labels:
        if label not in targets:
            problem = "no label"
            if label is not None:
                problem = f"label {format_value(label)} is not one of the classes"
            raise DataError(
                f"{description}: {problem}.",
                "Pack labeled parts only: move the files of others elsewhere.",
            )
    if len(set(labels)) < len(labels):
        raise DataError(
            f"{description}: a label is there twice.",
            "List names or numbers of classes, not a 0 or 1 for each class.",
        )
    return image.get("path") or "", image["bytes"], tuple(targets[label] for label in labels)


def write_part(name: str, part: Part, arguments: argparse.Namespace) -> None:
    """Write the shards of a part to a hidden folder, read them back, and give the folder its name.

    arguments: of the command.
    Raises DataError, OSError, and UsageError for a folder with other data or options.
    """
    out = arguments.out
    folder = out / name
    partial_folder = out / f".{name}.partial"
    max_px = arguments.max_px
    reencode = arguments.reencode is not None
    quality = arguments.reencode if reencode else arguments.quality
    made_of = [part.fingerprint, list(part.classes), max_px, quality, arguments.images_per_shard]
    made_of += [SHARD_FORMAT, *(["reencode"] if reencode else [])]
    plan = json.dumps(made_of)
    for path in (folder, partial_folder):
        plan_file = path / PLAN_FILE
        if path.exists() and not (plan_file.exists() and plan_file.read_text() == plan):
            raise UsageError(
                f"{path} exists, and was not packed from the same data with the same options by "
                "this version.",
                "Give another OUT, or remove what was packed there.",
            )
    if not folder.exists():
        partial_folder.mkdir(exist_ok=True)
        write_file(partial_folder / PLAN_FILE, plan)
        labels = "".join(f"{label}\n" for label in part.classes)
        write_file(partial_folder / "classes.txt", labels.encode("utf-8", "surrogateescape"))
        paths = [partial_folder / f"{name}-{number:05d}.tar" for number in range(len(part.shards))]
        options = {"max_px": max_px, "quality": quality, "reencode": reencode}
        pack = partial(pack_sample, classes=part.classes, **options)
        shards = list(zip(paths, part.shards, strict=True))
        with ThreadPoolExecutor(arguments.threads) as pool:
            for path, shard in track(shards, f"packing {name}"):
                if not path.exists():
                    samples = chain.from_iterable(pool.map(part.read, shard))
                    with new_file(path) as file:
                        write_shard(file, pool.map(pack, samples))
        from imagenet_cls.data.datasets import open_datasets  # imports torch

        data = DataConfig(
            root=str(out),
            train=partial_folder.name,
            labels="multi" if part.multilabel else "single",
        )
        written = open_datasets(data, ("train",)).train
        if len(written) != part.count or written.classes != tuple(part.classes):
            raise DataError(
                f"{partial_folder}: {len(written)} images instead of {part.count}.",
                "Remove it, and pack again.",
            )
        partial_folder.rename(folder)
    print(
        f"{folder}: {part.count:,} images of {len(part.classes):,} classes; "
        f"shards: {len(part.shards)}"
    )


def write_shard(file: IO[bytes], files: Iterator[Sample]) -> None:
    """Write images, each followed by its label, with equal bytes for equal images. Raises DataError
    for equal keys.
    """
    keys: set[str] = set()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data, classes, description in files:
            label = ";".join(map(str, classes))
            key = name.rpartition(".")[0]
            if key in keys:
                raise DataError(
                    f"{printable(description)}: another image has this key in a shard.",
                    "Rename one of them.",
                )
            keys.add(key)
            for member_name, content in ((name, data), (f"{key}.cls", label.encode())):
                member = tarfile.TarInfo(member_name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def pack_sample(
    sample: Sample, classes: Sequence[str], max_px: int | None, quality: int, reencode: bool
) -> Sample:
    """The sample as a shard has it: CLASS/NAME.SUFFIX, with no dot but the last. An image whose
    longer side exceeds `max_px`, and with `reencode` every JPEG, is encoded by `encode_jpeg`.

    The suffix is in lower case, and `jpg` for JPEG files. Raises DataError where an image that has
    to be encoded, or whose format its name does not tell, can't be read.
    """
    name, data, own, description = sample
    # normpath keeps two slashes at the start, as POSIX says.
    folder, _, base = os.path.normpath(f"/{name}").lstrip("/").rpartition("/")
    stem = base
    suffix = ""
    if has_image_suffix(base):
        stem, _, suffix = base.rpartition(".")
    if max_px is not None or reencode or not suffix:
        from imagenet_cls.data.decode import open_image  # imports torch

        try:
            with open_image(data) as image:
                suffix = suffix or str(image.format)
                is_large = max_px is not None and max(image.size) > max_px
                # an MPO file is a JPEG with further images
                if is_large or (reencode and image.format in ("JPEG", "MPO")):
                    data = encode_jpeg(data, max_px, quality, is_gray=image.mode == "L")
                    suffix = "jpg"
        except Exception as error:  # damaged files make decoders raise anything
            reason = f"{printable(description)}: {first_line(error)}."
            raise DataError(reason, "Replace the file.") from None
    suffix = SUFFIXES.get(suffix.lower(), suffix.lower())
    if not has_image_suffix(f"x.{suffix}"):
        raise DataError(
            f"{printable(description)}: a {suffix} file, which training does not read.",
            "Replace the file.",
        )
    folder = folder or (classes[own[0]] if own else "unlabeled").replace("/", "_")
    folder = re.sub(r"(^|/)\.", r"\1_", folder)  # hidden files are not read
    return f"{folder}/{stem.replace('.', '_')}.{suffix}", data, own, description


def encode_jpeg(data: bytes, max_px: int | None, quality: int, *, is_gray: bool) -> bytes:
    """A JPEG with 4:2:0 of the pixels that training would decode, which keeps the EXIF orientation.

    max_px: the limit of the longer side. is_gray: whether to store gray only.
    """
    from imagenet_cls.data.decode import decode_rgb, exif_orientation  # imports torch

    image = Image.fromarray(decode_rgb(data).permute(1, 2, 0).numpy())
    if max_px is not None:
        image.thumbnail((max_px, max_px), Image.Resampling.LANCZOS)
    if is_gray:
        image = image.convert("L")
    exif = Image.Exif()
    orientation = exif_orientation(data)
    if orientation != 1:
        exif[ExifTags.Base.Orientation] = orientation
    file = io.BytesIO()
    image.save(
        file, "JPEG", quality=quality, subsampling="4:2:0", exif=exif.tobytes() if exif else b""
    )
    return file.getvalue()
