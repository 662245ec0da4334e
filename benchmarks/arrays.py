"""Training on images in memory against a plain loop: `python tools/benchmark.py arrays`.

`configs/fashion_mnist/fast.yaml` with random images and targets, in fp32, without EMA and label
smoothing.
The plain loop is the reference loop of `step`; it makes crops, flips and erased boxes with the same
distributions from a tensor of all images: padded crops by one index for a batch, and those of
RandomResizedCrop image by image. The loops run in turn in one process, on one thread, without data
workers. "Batches alone" are made and not used.
"""

import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional
from torchvision.transforms import v2

from benchmarks.compare import ROOT, Row, measured, progress, rounded
from benchmarks.step import ReferenceLoop, TrainingLoop, seconds_in_turn
from imagenet_cls.config.load import load_config
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.loaders import build_train_loader, build_val_batches
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import RankContext

SIZE_PX, PAD_PX, MEAN = 28, 2, 73  # MEAN: of the images, 0 to 255
ERASING_PROB = 0.25
GOALS = {"pad_crop": ">= 0.85", "random_resized": ">= 0.6"}
QUICK = "{layers: [1, 1, 1, 1], channels: [16, 32, 64, 128], zero_init_last: false}"
MODELS = {
    "ResNet-20": ["model.name=resnet20_cifar"],
    "quick ResNet": ["model.name=resnet18", f"model.kwargs={QUICK}"],
}


def write_images(root: Path, images: int) -> None:
    """Files of Fashion-MNIST with random pixels and targets."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        header = struct.pack(">4i", 0x803, images, SIZE_PX, SIZE_PX)
        pixels = torch.randint(256, (images, SIZE_PX, SIZE_PX), dtype=torch.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.numpy().tobytes())
        header = struct.pack(">2i", 0x801, images)
        targets = torch.randint(10, (images,), dtype=torch.uint8)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + targets.numpy().tobytes())


def plain_batches(
    images: torch.Tensor, targets: torch.Tensor, crop: str, batch_size: int
) -> Iterator[TrainBatch]:
    """Batches without end. images: uint8 (N, H, W). targets: int64 (N,)."""
    padded = functional.pad(images, [PAD_PX] * 4)
    resized_crop = v2.Compose([v2.RandomResizedCrop(SIZE_PX), v2.RandomHorizontalFlip()])
    erasing = v2.RandomErasing(1.0, scale=(0.02, 0.3), value=MEAN)
    while True:
        for indices in torch.randperm(len(images)).split(batch_size):
            if crop == "pad_crop":
                batch = padded_crops(padded, indices)
            else:
                batch = torch.stack([resized_crop(images[index, None]) for index in indices])
            for row in torch.nonzero(torch.rand(len(batch)) < ERASING_PROB).flatten().tolist():
                batch[row] = erasing(batch[row])
            yield TrainBatch(batch, targets[indices])


def padded_crops(padded: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Random crops of padded images, flipped with probability 0.5: (B, 1, SIZE_PX, SIZE_PX)."""
    offsets = torch.randint(2 * PAD_PX + 1, (2, len(indices), 1))
    side = torch.arange(SIZE_PX)
    rows = offsets[0] + side
    columns = offsets[1] + torch.where(torch.rand(len(indices), 1) < 0.5, side, side.flip(0))
    return padded[indices[:, None, None], rows[:, :, None], columns[:, None, :]][:, None]


def training_rows(
    model: str, crop: str, root: Path, batch_size: int, steps: int, rounds: int
) -> list[Row]:
    """Images per second of `train()` and of its batches alone, and their ratios to the plain
    loop.
    """
    overrides = [
        *MODELS[model],
        f"data.root={root}",
        "data.num_workers=0",
        f"augment.crop={crop}",
        f"train.global_batch_size={batch_size}",
        f"eval.batch_size={batch_size}",
        "ema.half_life_images=null",
        "loss.label_smoothing=0",
        "train.precision=fp32",  # bf16 of CPUs without its instructions would hide the batches
        "device=cpu",
    ]
    context = RankContext(RankInfo(), torch.device("cpu"))
    epochs = iter(range(10**6, 10**7))

    def take(batches: Iterator[Any], count: int) -> None:
        assert len(list(islice(batches, count))) == count

    with tempfile.TemporaryDirectory() as folder:
        config = str(ROOT / "configs" / "fashion_mnist" / "fast.yaml")
        ours = TrainingLoop(overrides, context, Path(folder), config)
        parts = ours.parts
        plain = ReferenceLoop(parts)
        dataset = parts.data.train.images.dataset
        plain.batches = plain_batches(dataset.data, dataset.targets, crop, batch_size)
        loops: dict[str, Callable[[int], None]] = {
            "train()": ours,
            "plain loop": plain,
            "our batches alone": lambda count: take(parts.train_loader.epoch(next(epochs)), count),
            "plain batches alone": lambda count: take(plain.batches, count),
            "our evaluation batches alone": lambda count: take(
                build_val_batches(parts.config, parts.data.val, context, 1, parts.mean_std[0]),
                count,
            ),
        }
        seconds_in_turn(list(loops.values()), 1, 1)
        measurements = seconds_in_turn(list(loops.values()), steps, rounds)
        ours.close()
    seconds = dict(zip(loops, measurements, strict=True))
    name = f"{model}, {crop}"
    rows = []
    for loop, found in seconds.items():
        rates = [batch_size * steps / wall for wall, _ in found]
        cpu_ms = median(1000 * cpu / (batch_size * steps) for _, cpu in found)
        rows.append(measured(f"{name}: {loop}", rates, "img/s", cpu_ms=rounded(cpu_ms)))
    pairs = list(zip(seconds["train()"], seconds["plain loop"], strict=True))
    ratios, cpu_ratios = (
        [theirs[clock] / mine[clock] for mine, theirs in pairs] for clock in (0, 1)
    )
    cpu_ratio = rounded(median(cpu_ratios))
    row = f"{name}: train() / plain loop"
    return [*rows, measured(row, ratios, "x", GOALS[crop], cpu_ratio=cpu_ratio)]


def fetch_rows(root: Path, batch_size: int, batches: int, rounds: int) -> list[Row]:
    """CPU time of this process for a batch from a data worker, without and with random erasing.

    In microseconds where `x.add(x)` of four numbers, measured beside it, takes one microsecond.
    """
    numbers = torch.ones(4)
    context = RankContext(RankInfo(), torch.device("cpu"))

    def cpu_us(function: Callable[[], Any], calls: int) -> float:
        started = time.process_time()
        for _ in range(calls):
            function()
        return 1e6 * (time.process_time() - started) / calls

    rows = []
    for prob in (0.0, ERASING_PROB):
        overrides = [f"data.root={root}", "data.num_workers=1", "device=cpu"]
        overrides += [f"augment.erasing.prob={prob}", f"train.global_batch_size={batch_size}"]
        config = load_config(
            str(ROOT / "configs" / "fashion_mnist" / "fast.yaml"), overrides
        ).config
        source = open_datasets(config.data, ("train",)).train
        plan = plan_run(config.train, len(source), 1, 1)
        with closing(build_train_loader(config, source, plan, context, [MEAN / 255])) as loader:
            endless = chain.from_iterable(map(loader.epoch, count()))
            cpu_us(partial(next, endless), batches)
            found = [
                cpu_us(partial(next, endless), batches)
                / cpu_us(partial(numbers.add, numbers), 10_000)
                for _ in range(rounds)
            ]
        name = "a batch from a worker" + ", random erasing" * (prob > 0)
        rows.append(measured(f"{name}: CPU time at 1.0 us an add", found, "us", "<= 450"))
    return rows


def run(rounds: int = 5, tiny: bool = False) -> list[Row]:
    """The rows of a batch from a worker, and of two models and two crops."""
    torch.set_num_threads(1)
    images, batch_size, steps = (64, 4, 2) if tiny else (60_000, 128, 40)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), images)
        rows += fetch_rows(Path(folder), batch_size, steps, rounds)
        for model in MODELS:
            for crop in GOALS:
                rows += training_rows(model, crop, Path(folder), batch_size, steps, rounds)
                progress(rows[-1]["row"])
    return rows
