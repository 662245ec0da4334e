"""Time to list the 1,281,167 images of a dataset: `python tools/benchmark.py index`.

The images are empty files, hard links in 1,000 class folders in memory. A round runs each implementation once, in turn.
Times are CPU time, since something else may run on the machine; nothing waits for a disk. `index_folder` of this
project runs with and without its cache; `os.scandir` lists and sorts names, and does nothing else.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from timm.data.readers.reader_image_folder import ReaderImageFolder
from torchvision.datasets import ImageFolder

from benchmarks.compare import Row, check, measured
from imagenet_cls.data import index_cache
from imagenet_cls.data.index import index_folder

IMAGES, CLASSES = 1_281_167, 1000


def make_folder(root: Path, images: int) -> None:
    """Class folders with names as ImageNet's, in another order than the sorted one."""
    for number in range(CLASSES):
        folder = root / f"n{10_000_000 + number}"
        folder.mkdir(parents=True)
        first = folder / f"{folder.name}_0.JPEG"
        first.touch()
        for index in range(1, images // CLASSES + (number < images % CLASSES)):
            os.link(first, folder / f"{folder.name}_{index * 7919 % 50_021}.JPEG")


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


def without_cache(root: Path) -> int:
    before = os.environ[index_cache.CACHE_VARIABLE]
    os.environ[index_cache.CACHE_VARIABLE] = "/dev/null"
    try:
        return len(index_folder(root))
    finally:
        os.environ[index_cache.CACHE_VARIABLE] = before


def run(rounds: int = 5, tiny: bool = False) -> list[Row]:
    """CPU seconds of each implementation, and microseconds per image."""
    images = 20_000 if tiny else IMAGES
    memory = Path("/dev/shm")
    implementations: dict[str, Callable[[Path], int]] = {
        "ours, without cache": without_cache,
        "ours, from the cache": lambda root: len(index_folder(root)),
        "os.scandir and sorted": sorted_names,
        "torchvision's ImageFolder": torchvision_folder,
        "timm's ReaderImageFolder": timm_reader,
    }
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    environment, age = dict(os.environ), index_cache.MIN_AGE_SEC
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        root = Path(folder, "train")
        make_folder(root, images)
        try:
            os.environ[index_cache.CACHE_VARIABLE] = str(Path(folder, "cache"))
            index_cache.MIN_AGE_SEC = 0  # the files are new
            time.sleep(0.1)
            expected = index_folder(root).digest()
            cached = index_cache.read_scan(root) is not None
            equal = expected == index_folder(root).digest()
            for _ in range(rounds):
                for name, implementation in implementations.items():
                    start = time.process_time()
                    assert implementation(root) == images
                    seconds[name].append(time.process_time() - start)
        finally:
            os.environ.clear()
            os.environ.update(environment)
            index_cache.MIN_AGE_SEC = age
    rows = []
    for name, values in seconds.items():
        goal = "<= 0.2" if name == "ours, from the cache" else ""
        rows.append(measured(f"{name}: CPU time", values, "s", goal))
        goal = "<= 0.8" if name == "ours, without cache" else ""
        rows.append(measured(f"{name}: CPU time per image", [1e6 * value / images for value in values], "us", goal))
    return [*rows, check("the index was cached, and has the same digest", cached and equal)]
