"""`tools/pack.py`: pack a dataset into WebDataset shards, tars with KEY.jpg and then KEY.cls.

`data.name=folder` reads them.
"""

import argparse
import io
import json
import math
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.index import has_image_suffix
from imagenet_cls.errors import DataError, UsageError
from imagenet_cls.extras.datasets.arguments import add_data_options, load_config_if_given, track
from imagenet_cls.files import explain_write_errors, new_file, take_lock, write_file
from imagenet_cls.text import first_line, printable

if TYPE_CHECKING:
    from imagenet_cls.data.image_set import ImageSet

# In shards. WebDataset's and timm's readers look for `jpg`.
SUFFIXES = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "mpo": "jpg", "jpeg2000": "jp2"}
SHARD_FORMAT = 2  # 1: images have the suffixes of their files
PLAN_FILE = "pack.json"  # what the shards beside it were made of, and the options

# name of an image below its class, the file, classes; a description of the image, for messages
Sample = tuple[str, bytes, tuple[int, ...], str]


def pack_command(argv: Sequence[str]) -> None:
    """Pack a dataset. Raises DataError for bad data, UsageError for shards of other data."""
    parser = cli.build_parser(
        "pack",
        "Pack a dataset into WebDataset shards OUT/train/train-00000.tar, ... and OUT/val/..., for "
        "data.root=OUT. Files are copied as they are, unless --max-px or --reencode encodes them. "
        "The same command continues an interrupted one.",
        "SOURCE OUT [key=value ...] [--max-px N] [--reencode Q] "
        "[--images-per-shard N] [--multilabel] [--threads N]",
    )
    parser.add_argument(
        "source",
        type=cli.not_empty,
        metavar="SOURCE",
        help="a folder or archive with train and val; a config; hf:USER/NAME or hf:FOLDER "
        "(data.val=test names another part of these)",
    )
    parser.add_argument("--out", type=cli.path, metavar="DIR", help="the same as OUT")
    add_data_options(parser)
    parser.add_argument(
        "--max-px",
        type=cli.positive,
        metavar="N",
        help="shrink images whose longer side exceeds N, to quality 90 or that of --reencode",
    )
    parser.add_argument(
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
        help="as data.labels=multi",
    )
    arguments = parser.parse_intermixed_args(argv)
    arguments.out = out = cli.output_folder(arguments.out, arguments.overrides)
    overrides = list(filter(cli.is_override, arguments.overrides))
    if out.is_file():
        raise UsageError(f"{out} is a file.", "Give a folder as OUT.")
    data = load_data(arguments.source, overrides, arguments.multilabel)
    from imagenet_cls.data.datasets import open_datasets  # imports torch, which --help should not
    from imagenet_cls.data.image_set import EncodedImages

    opened = open_datasets(data)
    if not isinstance(opened.train.images, EncodedImages):
        raise UsageError(
            f"data.name {data.name!r} does not hold files of images.",
            "Give a folder, an archive, a list, or hf:FOLDER.",
        )
    if arguments.reencode is not None:
        print(f"lossy: every JPEG is encoded again with quality {arguments.reencode} and 4:2:0")
    with explain_write_errors(out, "Repair the cause; the same command then continues."):
        out.mkdir(parents=True, exist_ok=True)
        with take_lock(out, "Wait for that process, or stop it; then the same command continues."):
            for name, part in opened.parts.items():
                write_part(name, part, data, arguments)


def load_data(source: str, overrides: Sequence[str], multilabel: bool) -> DataConfig:
    """The section `data` of the dataset that SOURCE names. Raises UsageError."""
    config = load_config_if_given(source, overrides)
    data = DataConfig(root=source) if config is None else config.data
    return replace(data, labels="multi") if multilabel else data


def read_sample(part: "ImageSet", i: int) -> Sample:
    """Image `i` of a part. Raises DataError."""
    number = int(part.numbers[i])
    images: Any = part.images  # encoded, as `pack_command` has checked
    content = images.decoded(number, bytes)
    assert part.targets is not None
    target = part.targets[i]
    own = np.flatnonzero(target).tolist() if target.ndim else [int(target)]
    return images.file_name(number), content, tuple(own), images.describe(number)


def write_part(
    name: str, part: "ImageSet", data: DataConfig, arguments: argparse.Namespace
) -> None:
    """Write the shards of a part to a hidden folder, read them back, and give the folder its name.

    data: the section of the dataset. arguments: of the command.
    Raises DataError, OSError, and UsageError for a folder with other data or options.
    """
    out = arguments.out
    folder = out / name
    partial_folder = out / f".{name}.partial"
    max_px = arguments.max_px
    reencode = arguments.reencode is not None
    quality = arguments.reencode or 90  # FFCV's, for images that are shrunk
    per_shard = arguments.images_per_shard
    fingerprint = f"{part.digest} {part.size_fingerprint()}"
    made_of = [fingerprint, list(part.classes), max_px, quality, per_shard]
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
        names = "".join(f"{label}\n" for label in part.classes)
        write_file(partial_folder / "classes.txt", names.encode("utf-8", "surrogateescape"))
        options = {"max_px": max_px, "quality": quality, "reencode": reencode}
        pack = partial(pack_sample, classes=part.classes, **options)
        starts = range(0, len(part), per_shard)
        with ThreadPoolExecutor(arguments.threads) as pool:
            for start in track(starts, f"packing {name}"):
                path = partial_folder / f"{name}-{start // per_shard:05d}.tar"
                if not path.exists():
                    shard = range(start, min(start + per_shard, len(part)))
                    samples = pool.map(partial(read_sample, part), shard)
                    with new_file(path) as file:
                        write_shard(file, pool.map(pack, samples))
        from imagenet_cls.data.datasets import open_datasets  # imports torch

        shards = DataConfig(
            root=str(out),
            train=partial_folder.name,
            labels=data.labels,
        )
        written = open_datasets(shards, ("train",)).train
        if len(written) != len(part) or written.classes != part.classes:
            raise DataError(
                f"{partial_folder} has other images or classes than the dataset.",
                "Remove it, and pack again. Names of classes have no line break, and no white "
                "space at an end.",
            )
        partial_folder.rename(folder)
    print(
        f"{folder}: {len(part):,} images of {len(part.classes):,} classes; "
        f"shards: {math.ceil(len(part) / per_shard)}"
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
