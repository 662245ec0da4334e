"""ImageNet as it is handed out, into `OUT/{train,val}/<wnid>/*.JPEG`: what `tools/prepare_imagenet.py` runs.

Owns the command line, the placing of files and the count at the end. Refuses to download, and to change or delete
anything of the source. What lies in archives and label files is read in `ilsvrc`. Called by the tool only.

A second call goes on where the first one ended: a class folder of training images appears under its name only when it
is whole, and each validation image only when it is.
"""

import argparse
import contextlib
import errno
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from imagenet_cls.commands import program
from imagenet_cls.data.ilsvrc import TRAIN_TAR, Source, find_source, safe_members, validation_labels
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.layout import class_folders, is_image
from imagenet_cls.errors import DataError, ResourceError, UsageError, UserError
from imagenet_cls.interrupts import raise_interrupts

# What shows progress: an iterable and a word for it -> the same iterable.
Track = Callable[[Iterable[Any], str], Iterable[Any]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"prepare_imagenet.py: {message}\nsee: python tools/prepare_imagenet.py --help")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The tool's command line. Raises UsageError."""
    parser = _Parser(
        prog="prepare_imagenet.py",
        description="Bring ImageNet-1k into OUT/{train,val}/CLASS/*.JPEG. SOURCE is a folder with the ILSVRC2012 "
        "archives (img_train.tar, img_val.tar, devkit_t12.tar.gz), or with Kaggle's unpacked ILSVRC/Data/CLS-LOC and "
        "LOC_val_solution.csv, or one whose val folder is flat. Can be called again to go on.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("out", type=Path, metavar="OUT")
    labels_help = "devkit (.tar.gz, or its folder) or LOC_val_solution.csv, where it is not in SOURCE"
    parser.add_argument("--labels", type=Path, metavar="FILE", help=labels_help)
    parser.add_argument("--copy", action="store_true", help="copy image files instead of linking to them")
    parser.add_argument("--expect-classes", type=int, default=1000, metavar="N")
    parser.add_argument("--expect-train", type=int, default=1_281_167, metavar="N")
    parser.add_argument("--expect-val", type=int, default=50_000, metavar="N")
    parser.add_argument("--no-count-check", action="store_true", help="do not compare the counts at the end")
    return parser.parse_args(argv)


def main() -> None:
    """`tools/prepare_imagenet.py`."""
    program.main(prepare_main)


def prepare_main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code: 0, 2 usage, 3 data, 5 disk, 130 Ctrl-C. Errors are three lines at most."""
    raise_interrupts()
    try:
        args = parse_args(argv)
        source = find_source(args.source, args.labels)
        with _progress() as progress:
            prepare(source, args.out, args.copy, lambda things, text: progress.track(things, description=text))
        print(check_counts(args))
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def prepare(source: Source, out: Path, copy: bool, track: Track) -> None:
    """RankInfo every part that `source` has below `out`. track: wraps an iterable, as `Progress.track` does.

    Raises DataError for archives and labels that are broken or do not fit, and ResourceError where the disk is full.
    """
    labels = validation_labels(source)  # first: unpacking takes an hour, and may be in vain without them
    try:
        (out / "train").mkdir(parents=True, exist_ok=True)
        (out / "val").mkdir(exist_ok=True)
        if source.train_tar is not None:
            _train_from_tar(source.train_tar, out / "train", track)
        elif source.train_folder is not None:
            _train_from_folder(source.train_folder, out / "train", copy, track)
        if source.val_tar is not None:
            _val_from_tar(source.val_tar, out / "val", labels, track)
        elif source.val_folder is not None:
            _val_from_folder(source.val_folder, out / "val", labels, copy, track)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(
            f"{source.train_tar} or {source.val_tar}: broken or cut short ({_first_line(error)})\n"
            "compare its size and checksum with the publisher's, and download it again"
        ) from None
    except OSError as error:
        remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "correct that"
        where = error.filename or out
        raise ResourceError(f"{where}: {error.strerror or error}\n{remedy}; the same command then goes on") from None


def check_counts(args: argparse.Namespace) -> str:
    """Count what is in OUT: a line for the screen. DataError where it is not what was expected."""
    train = index_folder(args.out / "train")
    val = index_folder(args.out / "val", None if args.no_count_check else train.classes)
    found = (len(train.classes), len(train), len(val))
    expected = (args.expect_classes, args.expect_train, args.expect_val)
    if not args.no_count_check and found != expected:
        raise DataError(
            f"{args.out}: has {found[0]:,} classes, {found[1]:,} training and {found[2]:,} validation images; "
            f"expected were {expected[0]:,}, {expected[1]:,} and {expected[2]:,}\n"
            "compare the archives with the publisher's checksums; --no-count-check for a smaller set"
        )
    return f"{args.out}: {found[0]:,} classes, {found[1]:,} training and {found[2]:,} validation images"


def _train_from_tar(archive: Path, out: Path, track: Track) -> None:
    """ILSVRC2012_img_train.tar: one tar for each class."""
    with tarfile.open(archive) as outer:
        members = [member for member in safe_members(outer, archive) if member.name.endswith(".tar")]
        if not members:
            raise DataError(
                f"{archive}: holds no class archives\n{TRAIN_TAR} is a tar of tars, n01440764.tar and so on"
            )
        for member in track(members, "train"):
            class_name = Path(member.name).stem
            if (out / class_name).is_dir():
                continue
            with _whole_folder(out, class_name) as folder, tarfile.open(fileobj=outer.extractfile(member)) as inner:
                for image in safe_members(inner, archive):
                    _write(inner, image, folder / Path(image.name).name)


def _val_from_tar(archive: Path, out: Path, labels: dict[str, str], track: Track) -> None:
    """ILSVRC2012_img_val.tar: all images in one flat tar."""
    with tarfile.open(archive) as tar:
        members = [member for member in safe_members(tar, archive) if is_image(os.fsencode(Path(member.name).name))]
        for member in track(members, "val"):
            name = Path(member.name).name
            target = out / _label(labels, name, archive) / name
            if not (target.is_file() and target.stat().st_size == member.size):
                target.parent.mkdir(exist_ok=True)
                _write(tar, member, target)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """One member's bytes to `target`, which appears when it is whole."""
    content: IO[bytes] | None = tar.extractfile(member)
    assert content is not None, member.name
    beside = target.with_name(f".{target.name}.partial")
    with beside.open("wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    beside.replace(target)


def _train_from_folder(source: Path, out: Path, copy: bool, track: Track) -> None:
    for class_name in track(class_folders(source), "train"):
        if (out / class_name).exists():
            continue
        with _whole_folder(out, class_name) as folder:
            for image in _images(source / class_name):
                _place(image, folder / image.name, copy)


def _val_from_folder(source: Path, out: Path, labels: dict[str, str], copy: bool, track: Track) -> None:
    """A flat folder, sorted by its labels; or one that is sorted already."""
    flat = _images(source)
    todo = [(image, _label(labels, image.name, source)) for image in flat]
    for class_name in [] if flat else class_folders(source):
        todo.extend((image, class_name) for image in _images(source / class_name))
    for image, class_name in track(todo, "val"):
        target = out / class_name / image.name
        if not (target.is_file() and target.stat().st_size == image.stat().st_size):
            target.parent.mkdir(exist_ok=True)
            _place(image, target, copy)


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_image(os.fsencode(path.name)) and path.is_file())


def _label(labels: dict[str, str], name: str, where: Path) -> str:
    label = labels.get(Path(name).stem)
    if label is None:
        raise DataError(
            f"{where}: {name} is not among the {len(labels)} labelled images\ngive its labels with --labels FILE"
        )
    return label


def _place(image: Path, target: Path, copy: bool) -> None:
    """A hard link, else (another file system) a symbolic link, else a copy; a copy at once where asked for."""
    target.unlink(missing_ok=True)
    for link in () if copy else (os.link, os.symlink):
        try:
            link(image.resolve(), target)
            return
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
    beside = target.with_name(f".{target.name}.partial")
    shutil.copyfile(image, beside)
    beside.replace(target)


@contextlib.contextmanager
def _whole_folder(out: Path, name: str) -> Iterator[Path]:
    """A hidden folder to fill, renamed to `out/name` at the end; what an earlier call left of it is removed first."""
    partial = out / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    partial.rename(out / name)
