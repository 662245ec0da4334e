"""Time to list the 1,281,167 images of a dataset: `python tools/benchmark.py index`.

The images are empty files, hard links in 1,000 class folders in memory. A round runs each
implementation once, in turn. Times are CPU time, since something else may run on the machine;
nothing waits for a disk. `os.scandir` lists and sorts names, and does nothing else. The same names
are listed from a tar and a zip with tiny members.
"""

import os
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from timm.data.readers.reader_image_folder import ReaderImageFolder
from torchvision.datasets import ImageFolder

from benchmarks.compare import Row, check, measured
from imagenet_cls.data.archives import index_archives
from imagenet_cls.data.index import index_folder

IMAGES, CLASSES = 1_281_167, 1000


GOALS = {"ours": "<= 0.8", "ours, tar": "<= 2", "ours, zip": "<= 4"}  # us of CPU time per image


def names(images: int) -> Iterator[str]:
    """Paths as ImageNet's, in another order than the sorted one."""
    for number in range(CLASSES):
        wnid = f"n{10_000_000 + number}"
        for index in range(images // CLASSES + (number < images % CLASSES)):
            yield f"{wnid}/{wnid}_{index * 7919 % 50_021}.JPEG"


def make_folder(root: Path, images: int) -> None:
    first = root / "first"
    root.mkdir()
    first.touch()
    for name in names(images):
        if not (root / name).parent.is_dir():
            (root / name).parent.mkdir()
        os.link(first, root / name)
    first.unlink()


def make_archives(folder: Path, images: int) -> None:
    """`train.tar` and `train.zip` with members of ten bytes."""
    content = b"ten bytes."
    with (
        (folder / "train.tar").open("wb") as tar,
        zipfile.ZipFile(folder / "train.zip", "w") as archive,
    ):
        for name in names(images):
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.write(header.tobuf(tarfile.USTAR_FORMAT) + content.ljust(512, b"\0"))
            archive.writestr(name, content)
        tar.write(bytes(1024))


def sorted_names(root: Path) -> int:
    """Names of all files, sorted in each folder."""
    count = 0
    for folder in sorted(os.listdir(root)):  # noqa: PTH208
        with os.scandir(root / folder) as entries:
            count += len(sorted(entry.name for entry in entries))
    return count


def torchvision_folder(root: Path) -> int:
    return len(ImageFolder(str(root)))


def timm_reader(root: Path) -> int:
    return len(ReaderImageFolder(str(root)))


def archive(name: str) -> Callable[[Path], int]:
    """Lists an archive beside the folder."""
    return lambda root: len(index_archives(root.parent, name, [root.parent / name]))


def run(rounds: int = 5, tiny: bool = False) -> list[Row]:
    """CPU seconds of each implementation, and microseconds per image."""
    images = 20_000 if tiny else IMAGES
    memory = Path("/dev/shm")
    implementations: dict[str, Callable[[Path], int]] = {
        "ours": lambda root: len(index_folder(root)),
        "ours, tar": archive("train.tar"),
        "ours, zip": archive("train.zip"),
        "os.scandir and sorted": sorted_names,
        "torchvision's ImageFolder": torchvision_folder,
        "timm's ReaderImageFolder": timm_reader,
    }
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        root = Path(folder, "train")
        make_folder(root, images)
        make_archives(root.parent, images)
        expected = index_folder(root).digest
        equal = all(
            index_archives(root.parent, name, [root.parent / name]).digest == expected
            for name in ("train.tar", "train.zip")
        )
        for _ in range(rounds):
            for name, implementation in implementations.items():
                start = time.process_time()
                assert implementation(root) == images
                seconds[name].append(time.process_time() - start)
    rows = []
    for name, values in seconds.items():
        rows.append(measured(f"{name}: CPU time", values, "s"))
        per_image = [1e6 * value / images for value in values]
        rows.append(measured(f"{name}: CPU time per image", per_image, "us", GOALS.get(name, "")))
    return [*rows, check("all have the same digest", equal)]
