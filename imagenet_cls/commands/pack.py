"""Pack a dataset into WebDataset shards, which `data.name=folder` reads: tars with KEY.jpg and then KEY.cls."""

import contextlib
import io
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.archives import index_archives
from imagenet_cls.data.classes import join_names, label_positions, read_classes
from imagenet_cls.data.index import is_image
from imagenet_cls.errors import (
    DataError,
    UsageError,
    explain_content_errors,
    first_line,
    format_value,
    printable,
    shorten,
)
from imagenet_cls.files import (
    TEMPORARY,
    check_regular,
    explain_write_errors,
    fsync,
    take_lock,
    write_file,
)
from imagenet_cls.parallel.environment import RankInfo, cpu_threads

# Of a part, the files with the first prefix that any has.
PARQUET_PARTS = {"train": ("train-",), "val": ("validation-", "valid-", "val-", "test-")}
# In shards. WebDataset's and timm's readers look for `jpg`.
SUFFIXES = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "mpo": "jpg", "jpeg2000": "jp2"}
SHARD_FORMAT = 2  # 1: images have the suffixes of their files
UNREADABLE = "check its permissions, or use another SOURCE"
PLAN_FILE = "pack.json"  # what the shards beside it were made of, and the options

Sample = tuple[
    str, bytes, int, str
]  # name of an image below its class, the file, target; its place, for messages
RowGroup = tuple[Path, int, int]  # file, number, rows


@dataclass(frozen=True)
class Part:
    """A part of a dataset. source: a text that differs for other data. shards: return the samples of each shard."""

    classes: Sequence[str]
    source: str
    count: int
    shards: Sequence[Callable[[], Iterator[Sample]]]


def pack_command(argv: Sequence[str]) -> None:
    """Pack a dataset. Raises DataError for bad data, UsageError for shards of other data."""
    parser = cli.build_parser(
        "pack",
        "Pack a dataset into WebDataset shards OUT/train/train-00000.tar, ... and OUT/val/..., for data.root=OUT. "
        "Files are copied as they are, unless --max-px shrinks them. The same command continues an interrupted one.",
        "SOURCE OUT [key=value ...] [--max-px N] [--quality Q] [--images-per-shard N] [--threads N]",
    )
    parser.add_argument(
        "source", type=cli.not_empty, metavar="SOURCE",
        help="a folder or archive with train and val; a config; or a folder with the "
        "Parquet files of a dataset of Hugging Face: train-*.parquet, and validation-*.parquet or "
        "test-*.parquet, perhaps in data/",
    )  # fmt: skip
    parser.add_argument("out", type=cli.path, metavar="OUT")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="with a config, such as data.root=/my/images",
    )
    parser.add_argument(
        "--max-px", type=cli.positive, metavar="N", help="shrink images whose longer side exceeds N"
    )
    parser.add_argument(
        "--quality",
        type=cli.positive,
        default=90,
        metavar="Q",
        help="of shrunk images (default: 90)",
    )
    parser.add_argument(
        "--images-per-shard", type=cli.positive, default=1000, metavar="N", help="default: 1000"
    )
    parser.add_argument(
        "--threads",
        type=cli.positive,
        metavar="N",
        help="default: one for each CPU that it may use",
    )
    arguments = parser.parse_intermixed_args(argv)
    out, options = arguments.out, (arguments.max_px, arguments.quality, arguments.images_per_shard)
    parts = open_parts(arguments.source, arguments.overrides, arguments.images_per_shard)
    for part in parts.values():
        check_class_names(part.classes, arguments.source)
    with explain_write_errors(out, "correct that; the same command then continues"):
        out.mkdir(parents=True, exist_ok=True)
        with take_lock(out, "Wait for that process, or stop it; then the same command continues."):
            for name, part in parts.items():
                write_part(out, name, part, *options, arguments.threads or cpu_threads(RankInfo()))


def check_class_names(classes: Sequence[str], source: str) -> None:
    """Raise DataError for a name that `read_classes` would not read back from the classes.txt of the shards."""
    for name, count in Counter(classes).items():
        if count > 1 or name.strip() != name or name.splitlines() != [name] or "\0" in name:
            what = (
                "is there twice"
                if count > 1
                else "is empty, or has white space at an end, a line break or a NUL"
            )
            remedy = "rename it: shards list their classes in classes.txt"
            raise DataError(f"{source}: the class {format_value(name)} {what}\n{remedy}")


def open_parts(source: str, overrides: Sequence[str], per_shard: int) -> dict[str, Part]:
    """The parts of the dataset that SOURCE names. Raises DataError and UsageError."""
    if data := cli.load_data_config(source, overrides):
        return indexed_parts(data, per_shard)
    root = Path(source).expanduser()
    files, parts = parquet_files(root), dict[str, Part]()
    for name, prefixes in PARQUET_PARTS.items():
        for prefix in prefixes:
            chosen = [path for path in files if path.name.startswith(prefix)]
            if chosen:
                classes = parts["train"].classes if parts else None
                parts[name] = parquet_part(chosen, classes, per_shard)
                print(printable(f"{name}: {join_names([path.name for path in chosen])}"))
                files = [path for path in files if path not in chosen]
                break
    if parts and files:
        print(printable(f"not packed: {join_names([path.name for path in files])}"))
    return parts or indexed_parts(DataConfig(root=str(root)), per_shard)


def parquet_files(root: Path) -> list[Path]:
    """The Parquet files in a folder and in `data` in it, sorted. Raises DataError."""
    found: list[Path] = []
    for folder in (root, root / "data"):
        try:
            found += sorted(path for path in folder.iterdir() if path.suffix == ".parquet")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise DataError(f"{folder}: {error.strerror}\n{UNREADABLE}") from None
    return found


def indexed_parts(data: DataConfig, per_shard: int) -> dict[str, Part]:
    """The parts of a dataset that `open_datasets` indexes."""
    from imagenet_cls.data.datasets import open_datasets  # imports torch, which --help should not
    from imagenet_cls.data.sources import FolderSource, describe_sizes

    opened, parts = open_datasets(data), {}

    def samples(source: FolderSource, start: int) -> Iterator[Sample]:
        for i in range(start, min(start + per_shard, len(source))):
            try:
                yield (
                    source.name(i),
                    source.read(i),
                    int(source.index.targets[i]),
                    source.index.describe(i),
                )
            except (OSError, DataError) as error:
                raise DataError(
                    f"{source.index.describe(i)}: {getattr(error, 'strerror', None) or error}"
                ) from None

    for name, source in (("train", opened.train), ("val", opened.val)):
        if not isinstance(source, FolderSource):
            raise UsageError(
                f"data.name {data.name!r} is not made of image files\ngive a folder, an archive or a list"
            )
        shards = [partial(samples, source, start) for start in range(0, len(source), per_shard)]
        parts[name] = Part(
            source.classes, f"{source.digest()} {describe_sizes(source)}", len(source), shards
        )
    return parts


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A ParquetFile. Raises DataError if it can't be read."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise UsageError("Parquet files need pyarrow.\nInstall it: pip install pyarrow") from None
    try:
        check_regular(path)
        path.open("rb").close()  # pyarrow's errors hide the reason
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}\n{UNREADABLE}") from None
    explain = explain_content_errors(DataError, path, "broken or cut short", "download it again")
    with explain, parquet.ParquetFile(path) as file:
        yield file


def parquet_part(files: Sequence[Path], classes: Sequence[str] | None, per_shard: int) -> Part:
    """The rows of Parquet files with the columns `image` (`bytes`, `path`) and `label`.

    A shard has whole row groups. classes: the training classes; None: the names in the first file
    that stores them, else the lines of a classes.txt beside the files, else those of the labels.
    Integers are positions in the names of their file, else in the classes; for strings see
    `label_positions`.
    """
    groups: list[RowGroup] = []
    names: dict[Path, list[str]] = {}
    labels: dict[Path, list[int | str]] = {}  # the different ones, in files that store no names
    for path in files:
        with open_parquet(path) as file:
            if file.metadata.num_rows == 0:
                continue
            _check_columns(path, file.schema_arrow)
            stored = _class_names(path, file.schema_arrow)
            if stored is None:
                column = file.read(columns=["label"])["label"]
                labels[path] = column.drop_null().unique().to_pylist()
            else:
                names[path] = stored
            groups += [
                (path, i, file.metadata.row_group(i).num_rows) for i in range(file.num_row_groups)
            ]
    folder = files[0].parent
    if not groups:
        listed = join_names([path.name for path in files])
        raise DataError(f"{folder}: no rows in {listed}\ngive other files")
    targets, classes = _targets_of_labels(names, labels, classes, folder)
    shards: list[list[RowGroup]] = []
    for group in groups:
        if not shards or sum(rows for _, _, rows in shards[-1]) >= per_shard:
            shards.append([])
        shards[-1].append(group)

    def samples(shard: Sequence[RowGroup]) -> Iterator[Sample]:
        for path, group, _ in shard:
            with open_parquet(path) as file:
                rows = file.read_row_group(group, columns=["image", "label"]).to_pylist()
            for number, row in enumerate(rows):
                place = f"{path}: row {number} of row group {group}"
                name, data, target = _parquet_row(row, targets.get(path, {}), place)
                yield name or f"{path.stem}-{group}-{number}", data, target, place

    source = str([[path.name, path.stat().st_size] for path in files])
    count = sum(rows for _, _, rows in groups)
    return Part(classes, source, count, [partial(samples, shard) for shard in shards])


def _targets_of_labels(
    names: Mapping[Path, list[str]],
    labels: Mapping[Path, list[int | str]],
    classes: Sequence[str] | None,
    folder: Path,
) -> tuple[dict[Path, dict[int | str, int]], Sequence[str]]:
    """The target of each label, for each file, and the classes.

    names, labels: of `parquet_part`. folder: of the files.
    """
    if classes is None and names:
        classes = next(iter(names.values()))
    elif classes is None and (folder / "classes.txt").is_file():
        classes = read_classes(folder / "classes.txt")
    targets: dict[Path, dict[int | str, int]] = {}
    for path, stored in names.items():
        assert classes is not None
        if sorted(stored) != sorted(classes):
            others = join_names(sorted(set(stored) ^ set(classes)))
            text = f"its {len(stored)} classes are not the {len(classes)} of the files before"
            raise DataError(f"{path}: {text}; not in both: {others}\ngive files of one dataset")
        position = {name: i for i, name in enumerate(classes)}
        targets[path] = {i: position[name] for i, name in enumerate(stored)}
    found = {label for different in labels.values() for label in different}
    if found:
        are_integers = all(isinstance(label, int) for label in found)
        position, classes = label_positions(set(map(str, found)), classes, folder, are_integers)
        for path, different in labels.items():
            known = [label for label in different if str(label) in position]
            targets[path] = {label: position[str(label)] for label in known}
    return targets, classes or ()


def _class_names(path: Path, schema: Any) -> list[str] | None:
    """The names of the classes that Hugging Face's `datasets` stores in a file, or None."""
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = stored.get("info", {}).get("features", {}).get("label", {}).get("names")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{path}: the names of its classes are not a list of strings: {format_value(names)}\n"
            "store them as the ClassLabel of `datasets` does, or leave them out"
        )
    return names


def _check_columns(path: Path, schema: Any) -> None:
    """Raise DataError for an Arrow schema without a column of images and one of labels."""
    from pyarrow import types

    if not {"image", "label"} <= set(schema.names):
        raise DataError(
            f"{path}: its columns are {printable(', '.join(schema.names))}; `image` and `label` are needed\n"
            "rename the columns, or give a dataset for image classification"
        )
    image, label = schema.field("image").type, schema.field("label").type
    content = (
        image.field("bytes").type
        if types.is_struct(image) and image.get_field_index("bytes") >= 0
        else None
    )
    if content is None or not (types.is_binary(content) or types.is_large_binary(content)):
        wrong, needed = f"`image` has type {image}", "a struct with `bytes`, the file"
    elif not (types.is_integer(label) or types.is_string(label) or types.is_large_string(label)):
        wrong, needed = f"`label` has type {label}", "integers or strings"
    else:
        return
    raise DataError(f"{path}: column {shorten(printable(wrong), 200)}\nconvert it to {needed}")


def _parquet_row(
    row: dict[str, Any], targets: Mapping[int | str, int], place: str
) -> tuple[str, bytes, int]:
    """Name (perhaps empty), file and target. targets: of the labels."""
    image, label = row["image"] or {}, row["label"]
    if not image.get("bytes"):
        raise DataError(
            f"{place}: no image: `bytes` is empty\ngive files that hold the images, not only their paths"
        )
    if label not in targets:
        what = f"label {format_value(label)} is not one of the classes"
        if label is None:
            what = "no label"
        remedy = "pack labeled parts only: move the files of others elsewhere"
        raise DataError(f"{place}: {what}\n{remedy}")
    return image.get("path") or "", image["bytes"], targets[label]


def write_part(
    out: Path,
    name: str,
    part: Part,
    max_px: int | None,
    quality: int,
    per_shard: int,
    num_threads: int,
) -> None:
    """Write the shards of a part to a hidden folder, read them back, and give the folder its name.

    Raises DataError, OSError, and UsageError for a folder with other data or options.
    """
    folder, partial_folder = out / name, out / f".{name}.partial"
    plan = json.dumps([part.source, list(part.classes), max_px, quality, per_shard, SHARD_FORMAT])
    for place in (folder, partial_folder):
        if place.exists() and (
            not (place / PLAN_FILE).exists() or (place / PLAN_FILE).read_text() != plan
        ):
            what = "was made of other data, with other options, or by an earlier version"
            raise UsageError(f"{place} {what}.\nGive another OUT, or remove it.")
    if not folder.exists():
        partial_folder.mkdir(exist_ok=True)
        write_file(partial_folder / PLAN_FILE, plan)
        labels = "".join(f"{label}\n" for label in part.classes)
        write_file(partial_folder / "classes.txt", labels.encode("utf-8", "surrogateescape"))
        paths = [partial_folder / f"{name}-{number:05d}.tar" for number in range(len(part.shards))]
        pack = partial(packed, classes=part.classes, max_px=max_px, quality=quality)
        with ThreadPoolExecutor(num_threads) as pool:
            for path, samples in cli.track(
                list(zip(paths, part.shards, strict=True)), f"packing {name}"
            ):
                if not path.exists():
                    temporary = path.with_name(f"{TEMPORARY}{path.name}")
                    write_shard(temporary, pool.map(pack, samples()))
                    temporary.replace(path)
        index = index_archives(out, partial_folder.name, paths)
        if len(index) != part.count or index.classes != tuple(part.classes):
            raise DataError(
                f"{partial_folder}: {len(index)} images instead of {part.count}\nremove it, and pack again"
            )
        fsync(partial_folder)
        partial_folder.rename(folder)
        fsync(out)
    print(
        f"{folder}: {part.count:,} images of {len(part.classes):,} classes in {len(part.shards):,} shards"
    )


def write_shard(path: Path, files: Iterator[Sample]) -> None:
    """Write images, each followed by its label, with equal bytes for equal images. Raises DataError for equal keys."""
    keys: set[str] = set()
    with path.open("wb") as opened:
        with tarfile.open(fileobj=opened, mode="w") as tar:
            for name, data, target, place in files:
                key = name.rpartition(".")[0]
                if key in keys:
                    raise DataError(
                        f"{printable(place)}: another image has this key in a shard\nrename one of them"
                    )
                keys.add(key)
                for member_name, content in ((name, data), (f"{key}.cls", str(target).encode())):
                    member = tarfile.TarInfo(member_name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        opened.flush()
        os.fsync(opened.fileno())


def shrunk(data: bytes, max_px: int, quality: int) -> bytes:
    """A JPEG of the pixels that training would decode, which keeps the EXIF orientation."""
    from imagenet_cls.data.decode import ORIENTATION, decode_rgb, exif_orientation  # imports torch

    image, exif, file = (
        Image.fromarray(decode_rgb(data).permute(1, 2, 0).numpy()),
        Image.Exif(),
        io.BytesIO(),
    )
    image.thumbnail((max_px, max_px), Image.Resampling.LANCZOS)
    if (orientation := exif_orientation(data)) != 1:
        exif[ORIENTATION] = orientation
    image.save(file, "JPEG", quality=quality, exif=exif.tobytes() if exif else b"")
    return file.getvalue()


def packed(sample: Sample, classes: Sequence[str], max_px: int | None, quality: int) -> Sample:
    """The sample as a shard has it: CLASS/NAME.SUFFIX, with no dot but the last; an image that is too large shrunk.

    The suffix is in lower case, and `jpg` for JPEG files. Raises DataError where an image that has to
    be shrunk, or whose format its name does not tell, can't be read.
    """
    name, data, target, place = sample
    folder, _, base = os.path.normpath(f"/{name}")[1:].rpartition("/")
    stem, dot, suffix = base.rpartition(".") if is_image(os.fsencode(base)) else (base, "", "")
    if max_px is not None or not dot:
        try:
            from imagenet_cls.data.decode import open_image  # imports torch

            with open_image(data) as image:
                suffix, size = suffix or str(image.format), image.size
            if max_px is not None and max(size) > max_px:
                data, suffix = shrunk(data, max_px, quality), "jpg"
        except Exception as error:  # damaged files make decoders raise anything
            is_unknown = isinstance(error, Image.UnidentifiedImageError)
            reason = "not an image of a known format" if is_unknown else first_line(error)
            raise DataError(f"{printable(place)}: {reason}\nreplace the file") from None
    suffix = SUFFIXES.get(suffix.lower(), suffix.lower())
    if not is_image(b"image." + suffix.encode()):
        what = f"a {suffix} file, which training does not read"
        raise DataError(f"{printable(place)}: {what}\nreplace the file")
    folder = folder or classes[target].replace("/", "_")
    folder = re.sub(r"(^|/)\.", r"\1_", folder)  # hidden files are not read
    return f"{folder}/{stem.replace('.', '_')}.{suffix}", data, target, place
