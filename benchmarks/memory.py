"""Memory of the index of 1,281,167 images, once and in each worker: `python tools/benchmark.py
memory`.

The images are hard links to one small JPEG in 1,000 class folders. Once: by how much the resident
memory of the process grows when it opens the data. In each worker: the private memory of a worker
after the same number of samples, less that of a worker with an index of 20,000 images; pages that a
worker shares with its parent do not count.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from PIL import Image

from benchmarks.compare import Row, measured, progress

# an epoch of the small index is not exceeded
IMAGES, SMALL, BATCH_SIZE, WORKERS = 1_281_167, 20_000, 64, 2


def memory_bytes(process: int | str, kind: str) -> int:
    """Memory of a process: `Rss`, all that is resident; `Private`, what it shares with no other
    process.
    """
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


def make_folder(root: Path, images: int) -> None:
    """train/ and val/ with 1,000 classes, or fewer, that have about the same number of images."""
    file = root / "image.jpeg"
    root.mkdir()
    Image.new("RGB", (48, 48), (90, 120, 150)).save(file)
    classes = min(images, 1000)
    for number in range(classes):
        for part, count in (("train", images // classes + (number < images % classes)), ("val", 1)):
            folder = root / part / f"n{number:08d}"
            folder.mkdir(parents=True)
            for index in range(count):
                os.link(file, folder / f"{folder.name}_{index}.JPEG")


def our_batches(root: str) -> Iterable[Any]:
    import torch

    from imagenet_cls.config.load import load_config
    from imagenet_cls.data.datasets import open_datasets
    from imagenet_cls.engine.loaders import build_train_loader
    from imagenet_cls.engine.plan import plan_run
    from imagenet_cls.parallel.environment import RankInfo
    from imagenet_cls.parallel.process_group import RankContext

    options = [
        f"data.root={root}",
        f"data.num_workers={WORKERS}",
        f"train.global_batch_size={BATCH_SIZE}",
    ]
    config = load_config("resnet50", [*options, "augment.size_px=32", "eval.crop_px=32"]).config
    source = open_datasets(config.data, ("train",)).train
    context, plan = (
        RankContext(RankInfo(), torch.device("cpu")),
        plan_run(config.train, len(source), 1),
    )
    return build_train_loader(config, source, plan, context, (0.5, 0.5, 0.5)).epoch(0)


def torchvision_batches(root: str) -> Iterable[Any]:
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    steps = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
    dataset = datasets.ImageFolder(f"{root}/train", steps)
    return DataLoader(
        dataset, BATCH_SIZE, shuffle=True, num_workers=WORKERS, multiprocessing_context="fork"
    )


def measure(
    batches_of: Callable[[str], Iterable[Any]], warm_up: str, root: str, steps: int
) -> tuple[int, float]:
    """In a fresh process: bytes by which opening `root` enlarges it, and mean private bytes of its
    workers.

    warm_up: another root, opened before, so that imports do not count.
    """
    next(iter(batches_of(warm_up)))
    before = memory_bytes("self", "Rss")
    batches = iter(batches_of(root))
    opened = memory_bytes("self", "Rss") - before
    for _ in islice(batches, steps):
        pass
    workers = multiprocessing.active_children()
    assert len(workers) == WORKERS
    return opened, mean(memory_bytes(worker.pid, "Private") for worker in workers if worker.pid)


def run(rounds: int = 1, tiny: bool = False) -> list[Row]:
    """Bytes of each sample, of this project's index and of torchvision's ImageFolder."""
    images, small_images, steps = (4000, 1000, 10) if tiny else (IMAGES, SMALL, 300)
    rows = []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        make_folder(Path(root, "large"), images)
        make_folder(Path(root, "small"), small_images)
        for name, batches_of in (
            ("ours", our_batches),
            ("torchvision's ImageFolder", torchvision_batches),
        ):
            found = []
            for part in ("large", "small"):
                progress(f"{name}, {part} index")
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    found.append(
                        process.submit(
                            measure, batches_of, f"{root}/small", f"{root}/{part}", steps
                        ).result()
                    )
            (once, large), (_, small) = found
            goal, after = "<= 1" if name == "ours" else "", f"after {BATCH_SIZE * steps:,} samples"
            rows += [
                measured(f"{name}: once", [once / images], "B/sample"),
                measured(
                    f"{name}: in each worker, {after}",
                    [(large - small) / (images - small_images)],
                    "B/sample",
                    goal,
                ),
                measured(f"{name}: private memory of a worker, {after}", [large / 2**20], "MiB"),
            ]
    return rows
