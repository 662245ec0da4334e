"""`tools/prepare_imagenet.py`: unpack ImageNet (ILSVRC2012).

From its archives or Kaggle's files, into `OUT/{train,val}/<wnid>/*.JPEG`.

Nothing of the source is changed. A second call continues: each class folder of training images
appears when it is complete, and so does the folder of validation images.
"""

import contextlib
import csv
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from imagenet_cls.commands import cli
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.errors import DataError, ResourceError, explain_content_errors
from imagenet_cls.extras.datasets.arguments import track
from imagenet_cls.files import take_lock
from imagenet_cls.text import first_line

COUNTS = (1000, 1_281_167, 50_000)  # classes, training and validation images of ImageNet-1k
# Training images, validation images, and the labels of these.
ARCHIVES = (
    "ILSVRC2012_img_train.tar",
    "ILSVRC2012_img_val.tar",
    "ILSVRC2012_devkit_t12.tar.gz",
)
KAGGLE = ("ILSVRC/Data/CLS-LOC/train", "ILSVRC/Data/CLS-LOC/val", "LOC_val_solution.csv")


def prepare_command(argv: Sequence[str]) -> None:
    """Unpack ImageNet. Raises DataError for a source that is broken or incomplete."""
    parser = cli.build_parser(
        "prepare-imagenet",
        "Unpack ImageNet-1k into OUT/{train,val}/CLASS/*.JPEG. SOURCE is a folder with the "
        "ILSVRC2012 archives (img_train.tar, img_val.tar, devkit_t12.tar.gz), or with Kaggle's "
        "unpacked ILSVRC/Data/CLS-LOC and LOC_val_solution.csv. The same command continues an "
        "interrupted one.",
    )
    parser.add_argument("source", type=cli.path, metavar="SOURCE")
    parser.add_argument("words", nargs="*", metavar="OUT")
    parser.add_argument("--out", type=cli.path, metavar="DIR", help="the same as OUT")
    arguments = parser.parse_intermixed_args(argv)
    out = cli.output_folder(arguments.out, arguments.words)
    prepare(arguments.source, out)
    check_counts(out)


def prepare(source: Path, out: Path) -> None:
    """Unpack or link both parts of `source` to `out`. Raises UsageError if another process writes
    there.
    """
    has_archives = (source / ARCHIVES[0]).exists()
    files = [source / name for name in (ARCHIVES if has_archives else KAGGLE)]
    missing = [path for path in files if not path.exists()]
    if missing:
        raise DataError(
            f"{missing[0]}: not there.",
            f"Give a folder with {', '.join(ARCHIVES)}, or with Kaggle's unpacked files.",
        )
    train, val, labels = (path.resolve() for path in files)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with take_lock(out, "Wait for that process, or stop it; then the same command continues."):
            if not (out / "val").exists():  # first: the training images take an hour
                with _complete_folder(out / "val") as folder:
                    if has_archives:
                        from torchvision.datasets import imagenet

                        # both compare the MD5 of the archive
                        imagenet.parse_devkit_archive(out, labels)  # writes its meta.bin
                        imagenet.parse_val_archive(out, val, folder=folder.name)
                    else:
                        _link_val(val, folder, labels)
            if has_archives:
                _unpack_train(train, out / "train")
            elif not (out / "train").exists():
                (out / "train").symlink_to(train)
    except (tarfile.TarError, EOFError, RuntimeError) as error:
        raise DataError(
            f"{source}: an archive is broken, truncated or not the published one "
            f"({first_line(error)}).",
            "Compare its size and checksum with the publisher's, and download it again.",
        ) from None
    except OSError as error:
        raise ResourceError(
            f"{error.filename or out}: {error.strerror or error}.",
            "Repair the cause; the same command then continues.",
        ) from None


def check_counts(out: Path) -> None:
    """Print the counts in `out`: classes, training and validation images. Raises DataError unless
    they are ImageNet's.
    """
    from imagenet_cls.data.datasets import open_datasets  # imports torch

    opened = open_datasets(DataConfig(root=str(out)))
    train, val = opened.train, opened.val
    text = "{:,} classes, {:,} training and {:,} validation images"
    found = text.format(len(train.classes), len(train), len(val))
    expected = text.format(*COUNTS)
    if found != expected:
        raise DataError(
            f"{out}: {found}; expected {expected}.",
            "Remove incomplete folders and call this again.",
        )
    print(f"{out}: {found}")


def _unpack_train(archive: Path, out: Path) -> None:
    """archive: with one tar for each class. torchvision would start again after an interruption,
    and hold all class archives on the disk.
    """
    out.mkdir(exist_ok=True)
    with tarfile.open(archive) as outer:
        class_tars = [member for member in outer if member.name.endswith(".tar")]
        for member in track(class_tars, "train"):
            folder = out / Path(member.name).stem
            if not folder.exists():
                content = outer.extractfile(member)
                with _complete_folder(folder) as partial, tarfile.open(fileobj=content) as inner:
                    inner.extractall(partial, filter="data")


def _link_val(images: Path, folder: Path, solution: Path) -> None:
    """Link Kaggle's validation images in a folder for each class. solution: a CSV file with an
    ImageId, and a PredictionString that starts with the WordNet ID.
    """
    with (
        explain_content_errors(DataError, solution, "broken labels", "Download it again."),
        solution.open(newline="", encoding="utf-8-sig") as lines,
    ):
        wnids = {
            row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(lines)
        }
    for name, wnid in track(list(wnids.items()), "val"):
        image = images / f"{name}.JPEG"
        if not image.is_file():
            raise DataError(
                f"{image}: not there, but in {solution}.",
                "Unpack the validation images there, without class folders.",
            )
        target = folder / wnid / image.name
        target.parent.mkdir(exist_ok=True)
        try:
            os.link(image, target)
        except OSError:  # such as another file system
            target.symlink_to(image)


@contextlib.contextmanager
def _complete_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill, renamed to `folder` at the end. What an earlier call left of it is
    removed first.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    partial.rename(folder)
