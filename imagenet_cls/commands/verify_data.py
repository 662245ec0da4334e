"""Reads every image of a data set as training would, and writes down which are bad: what `tools/verify_data.py` runs.

Owns the reading, by threads (file reading, hashing and decoding let other threads run), and the journal that an
interrupted call leaves for the next one. Refuses to change or delete an image. What becomes of the bad ones is in
`manifest`. Called by the tool only.
"""

import fcntl
import json
import os
import stat
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.decode import decode_rgb
from imagenet_cls.data.layout import listed, scan_images
from imagenet_cls.data.manifest import (
    FILE_NAME,
    BadImage,
    Contents,
    Manifest,
    cannot_write,
    read_manifest,
    write_manifest,
)
from imagenet_cls.data.sources import FolderSource
from imagenet_cls.errors import DataError, Stopped, UsageError
from imagenet_cls.interrupts import raise_interrupts
from imagenet_cls.parallel.environment import cpu_threads

FILE_SETS = ("folder", "list", "digits")


def verify_data(data: str, overrides: Sequence[str], out: Path | None, num_threads: int | None) -> None:
    """The tool. data: a folder, or a config file. Prints a summary, and each bad image as it is found.

    Raises DataError where one is bad; else see `verify`.
    """
    if Path(data).suffix in (".yaml", ".yml"):
        config = load_config(data, overrides).config
        root = Path(config.data.root).expanduser()
        names = images_of(config.data)
    elif overrides:
        raise UsageError(f"{overrides[0]!r}: a change of a config, and {data} is none\nname a .yaml file before it")
    else:
        root = Path(data).expanduser()
        names = images_below(root)
    path = out or root / FILE_NAME
    before = read_manifest(path) if path.exists() else None  # also keeps other programs' files from being replaced
    raise_interrupts()
    with _progress() as progress:
        task = progress.add_task("reading", total=len(names))

        def seen(verdict: Verdict) -> None:
            progress.advance(task)
            if verdict.reason is not None:
                print(f"bad: {verdict.path}: {verdict.reason}")

        manifest = verify(root, names, path, num_threads or cpu_threads(1), seen)
    for line in summary(manifest, before):
        print(line)
    print(f"wrote {path}")
    if manifest.bad:
        raise DataError(
            f"{len(manifest.bad)} of {len(names)} images are bad: {listed([image.path for image in manifest.bad])}\n"
            f"replace them; or leave those of the training part out: data.exclude={path}"
        )


def summary(manifest: Manifest, before: Manifest | None) -> list[str]:
    """What was found, and whether it is what the manifest `before` found."""
    whole = manifest.whole
    lines = [f"{whole.images:,} images, {whole.size_bytes / 1e9:,.3f} GB, {whole.bad} bad", f"digest {whole.digest}"]
    if before is not None:
        names = sorted({*before.folders, *manifest.folders})
        changed = [name for name in names if before.folders.get(name) != manifest.folders.get(name)]
        lines.append(f"other than the time before: {listed(changed)}" if changed else "the same as the time before")
    return lines


def _progress() -> Progress:
    """On stderr, where that is a screen."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


@dataclass(frozen=True)
class Verdict:
    """One image. reason: why it is bad, None for a good one. size_bytes and modified_ns: None where it can't be read.

    digest: SHA-256 of its bytes in hex; of none where it can't be read.
    """

    path: str
    size_bytes: int | None
    modified_ns: int | None
    digest: str
    reason: str | None


def images_below(root: Path) -> list[bytes]:
    """Every image at any depth below `root`, as sorted paths relative to it. Raises DataError where there is none."""
    names = sorted(name.removeprefix(b"./") for name in scan_images(os.fsencode(root), b"."))
    if not names:
        raise DataError(f"{root}: no image in it\nname the folder that holds the data set, or a config")
    return names


def images_of(data: DataConfig) -> list[bytes]:
    """The images of a config's training and validation parts, likewise; absolute where a list has them elsewhere.

    Raises UsageError for a data set that is not made of files, and DataError as `open_datasets` does.
    """
    if data.name not in FILE_SETS:
        raise UsageError(
            f"data.name {data.name!r} is not made of image files\ngive a folder, or a config with one of "
            f"{', '.join(FILE_SETS)}"
        )
    opened = open_datasets(replace(data, exclude=None))
    base = os.fsencode(os.path.abspath(Path(data.root).expanduser())) + b"/"  # noqa: PTH100 (no links resolved)
    names = set()
    for source in (opened.train, opened.val):
        assert isinstance(source, FolderSource)
        start = os.fsencode(os.path.abspath(source.index.root))  # noqa: PTH100
        for i in range(len(source)):
            path = os.path.normpath(os.path.join(start, source.index.raw_name(i)))  # noqa: PTH118
            names.add(path.removeprefix(base))
    return sorted(names)


def verify(
    root: Path, names: Sequence[bytes], path: Path, num_threads: int, seen: Callable[[Verdict], object]
) -> Manifest:
    """Read the images `names` (sorted, relative to `root` or absolute) and write the manifest to `path`.

    seen: is told every verdict, in order. Images that an interrupted call has read, and that have the same size and
    time of change since, are not read again. Raises Stopped (130) on Ctrl-C, ResourceError where `path` can't be
    written, and UsageError where another process is at work on it.
    """
    warnings.simplefilter("ignore")  # of odd EXIF blocks; `decode` hides them, but not from several threads at once
    whole, folders, bad = _Counter(), dict[str, _Counter](), list[BadImage]()
    journal_path = path.with_name(path.name + ".partial")
    try:
        with _Journal(journal_path) as journal:
            for verdict in _verdicts(root, names, journal, num_threads):
                top = (verdict.path.partition("/")[0] or "/") if "/" in verdict.path else "."
                whole.add(verdict)
                folders.setdefault(top, _Counter()).add(verdict)
                if verdict.reason is not None:
                    bad.append(BadImage(verdict.path, verdict.reason, verdict.size_bytes))
                seen(verdict)
            contents = {name: counter.contents() for name, counter in folders.items()}
            manifest = Manifest(whole.contents(), contents, tuple(bad))
            write_manifest(path, manifest)
            journal_path.unlink()
    except KeyboardInterrupt:
        raise Stopped(
            f"interrupted after {whole.images} of {len(names)} images\nthe same command goes on from there", 130
        ) from None
    except OSError as error:
        raise cannot_write(journal_path, error) from None
    return manifest


def read_image(root: Path, name: bytes) -> Verdict:
    """Read and decode one image, as training does. Never raises for what is wrong with a file."""
    path = os.path.join(os.fsencode(root), name)  # noqa: PTH118
    size_bytes, modified_ns, digest, reason = None, None, "", None
    try:
        size_bytes, modified_ns = _state(path)
        with open(path, "rb") as file:  # noqa: PTH123
            data = file.read()
        digest = sha256(data).hexdigest()
        decode_rgb(data)
    except OSError as error:
        reason = error.strerror or str(error)
    except DataError as error:
        reason = str(error)
    except Exception as error:  # whatever else a damaged file makes a decoder raise; training would end of it, too
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return Verdict(os.fsdecode(name), size_bytes, modified_ns, digest, reason)


def _state(path: bytes) -> tuple[int, int]:
    """Size and time of the last change. OSError for what is no regular file: reading a pipe would never end."""
    info = os.stat(path)  # noqa: PTH116
    if not stat.S_ISREG(info.st_mode):
        raise OSError("not a regular file")
    return info.st_size, info.st_mtime_ns


def _verdicts(root: Path, names: Iterable[bytes], journal: "_Journal", num_threads: int) -> Iterator[Verdict]:
    """A verdict for each name, in order; those that the journal did not know go into it."""

    def judge(name: bytes) -> tuple[Verdict, bool]:
        known = journal.known(root, name)
        return known or read_image(root, name), known is None

    pending: deque[Future[tuple[Verdict, bool]]] = deque()

    def finish_one() -> Verdict:
        verdict, is_new = pending.popleft().result()
        if is_new:
            journal.add(verdict)
        return verdict

    pool = ThreadPoolExecutor(num_threads)
    try:
        for name in names:
            pending.append(pool.submit(judge, name))
            if len(pending) >= 32 * num_threads:
                yield finish_one()
        while pending:
            yield finish_one()
    finally:
        pool.shutdown(cancel_futures=True)


class _Journal:
    """A line of JSON for each image that was read, so that a call that was stopped, or killed, loses next to nothing.

    Belongs to one process at a time (`fcntl.lockf`; the kernel frees it when that ends). A last line that was not
    written to its end does not count.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries: dict[bytes, list[Any]] = {}

    def __enter__(self) -> "_Journal":
        self.file: IO[str] = self.path.open("a+", encoding="ascii", errors="surrogateescape", buffering=1)
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise UsageError(f"{self.path}: another process is at work on it\nlet that one end, or end it") from None
        self.file.seek(0)
        whole_bytes = 0
        for line in self.file:
            entry = _parsed(line)
            if entry is None:
                break
            self.entries[os.fsencode(entry[0])] = entry
            whole_bytes += len(line)
        self.file.truncate(whole_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def known(self, root: Path, name: bytes) -> Verdict | None:
        """What is noted of an image, unless the file has changed since. Bad ones are always looked at again."""
        entry = self.entries.get(name)
        if entry is None or entry[4] is not None:
            return None
        try:
            unchanged = _state(os.path.join(os.fsencode(root), name)) == (entry[1], entry[2])  # noqa: PTH118
        except OSError:
            return None
        return Verdict(*entry) if unchanged else None

    def add(self, verdict: Verdict) -> None:
        entry = [verdict.path, verdict.size_bytes, verdict.modified_ns, verdict.digest, verdict.reason]
        self.file.write(json.dumps(entry) + "\n")


def _parsed(line: str) -> list[Any] | None:
    """A line of the journal; None for one that was not written to its end, or is none of ours."""
    try:
        entry = json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None
    return entry if isinstance(entry, list) and len(entry) == 5 and isinstance(entry[0], str) else None


@dataclass
class _Counter:
    """`Contents` in the making."""

    images: int = 0
    size_bytes: int = 0
    bad: int = 0
    hash: Any = field(default_factory=sha256)

    def add(self, verdict: Verdict) -> None:
        self.images += 1
        self.size_bytes += verdict.size_bytes or 0
        self.bad += verdict.reason is not None
        self.hash.update(os.fsencode(verdict.path) + b"\0" + verdict.digest.encode() + b"\n")

    def contents(self) -> Contents:
        return Contents(self.images, self.size_bytes, self.bad, self.hash.hexdigest())
