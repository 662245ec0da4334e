"""Cost of saving: `python benchmarks/checkpoint_cost.py`.

A ResNet-50 on the CPU with EMA and momentum. Measures how long the loop waits for a save, how long
the write in the background takes, and how much slower CPU steps are during a write. The first is
relative to 2 % of an epoch of ImageNet at two published speeds (`EPOCHS`). Each number is a median.
"""

import argparse
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import timm
import torch
from torch.nn import functional

from imagenet_cls.checkpoint.format import Snapshot, prune, size_bytes, write_checkpoint
from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.checkpoint.saver import CheckpointSaver
from imagenet_cls.config.schema import CheckpointConfig, EmaConfig
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.state import take_snapshot
from imagenet_cls.guards.replicas import replicated_tensors, tensor_hashes
from imagenet_cls.models.ema import build_ema

IMAGES = 1_281_167
EPOCHS = {  # seconds
    "FFCV's 16 epochs in 14.9 minutes on 8 A100 (its README)": 14.9 * 60 / 16,
    "7,950 images/s on each of 8 GPUs (MLPerf v4.0, MXNet)": IMAGES / (8 * 7950),
}
SHARE = 0.02
BATCH, SIDE_PX = 2, 64


def seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


class Training:
    """Steps of a ResNet-50 on one batch of noise, with the state of a run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = timm.create_model("resnet50").train()
        self.ema = build_ema(self.model, EmaConfig(decay=0.999), BATCH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.images, self.targets = torch.randn(BATCH, 3, SIDE_PX, SIDE_PX), torch.arange(BATCH)
        self.progress = Progress()

    def step(self) -> None:
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(self.images), self.targets).backward()
        self.optimizer.step()
        self.progress.step += 1

    def timed_step(self) -> tuple[float, float]:
        """Wall-clock and CPU seconds: with one thread they differ if other programs use the
        core.
        """
        begin = time.thread_time()
        return seconds(self.step), time.thread_time() - begin

    def snapshot(self) -> Snapshot:
        parts = SimpleNamespace(
            model=self.model, ema=self.ema, optimizer=self.optimizer, scaler=self.scaler
        )
        return take_snapshot(cast(TrainingParts, parts), self.progress, {})

    def hash(self) -> None:
        """The hash that several ranks compare before each save."""
        tensor_hashes(replicated_tensors(self.model, self.ema.module, self.optimizer.state))


def measure(training: Training, folder: Path, saves: int) -> list[tuple[str, float]]:
    """Rows of (what, seconds)."""
    copies: list[float] = []
    hashes: list[float] = []
    writes: list[float] = []
    beside: list[float] = []
    alone: list[tuple[float, float]] = []
    meanwhile: list[tuple[float, float]] = []

    def write(snapshot: Snapshot) -> None:
        writes.append(seconds(lambda: write_checkpoint(folder, snapshot)))
        prune(folder, snapshot.state["step"], 1, set())

    started: list[float] = []
    saver = CheckpointSaver(
        folder,
        CheckpointConfig(keep_last=1),
        True,
        training.progress,
        training.snapshot,
        lambda: started.append(time.perf_counter()),
        print,
    )
    for _ in range(saves):
        hashes.append(seconds(training.hash))
        write(training.snapshot())
        alone += [training.timed_step() for _ in range(10)]
        copies.append(seconds(saver.save))
        while any(thread.name == "checkpoint" for thread in threading.enumerate()):
            meanwhile.append(training.timed_step())
        # to the end of a step; includes the deletion of the old one
        beside.append(time.perf_counter() - started[-1])
        saver.wait()
    rows = [
        ("the loop waits for the copy to host memory", median(copies)),
        ("before it, on several ranks: the hash that is compared", median(hashes)),
        ("the write, alone", median(writes)),
        ("the write, during training", median(beside)),
    ]
    for when, steps in (("alone", alone), ("during a write", meanwhile)):
        what = f"a step {when} ({BATCH} images of {SIDE_PX} px, {len(steps)} steps)"
        rows.append((what, median(wall for wall, _ in steps)))
        rows.append(("the same, in CPU time", median(cpu for _, cpu in steps)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument(
        "--threads", type=int, default=1, help="of the training; the write has another one"
    )
    parser.add_argument(
        "--folder", type=Path, help="on the disk to write to (default: a temporary one)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training()
    training.step()
    snapshot = training.snapshot()
    held = sum(
        size_bytes(tensors or {}) for tensors in (snapshot.model, snapshot.ema, snapshot.optimizer)
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = measure(training, Path(folder) / "checkpoints", arguments.saves)
    print(f"torch {torch.__version__}, timm {timm.__version__}, Python {platform.python_version()}")
    print(
        f"{arguments.threads} threads on {os.cpu_count()} cores, {held / 1e6:.0f} MB, "
        f"{arguments.saves} saves\n"
    )
    print("| | ms |\n|---|---:|")
    for what, sec in rows:
        print(f"| {what} | {1e3 * sec:.0f} |")
    still = rows[0][1]
    for name, epoch_sec in EPOCHS.items():
        share = 100 * still / epoch_sec
        print(
            f"\n{name}: {epoch_sec:.1f} s per epoch, {100 * SHARE:g} % of it "
            f"{1e3 * SHARE * epoch_sec:.0f} ms"
        )
        print(f"the loop waits for {share:.2f} % of the epoch")


if __name__ == "__main__":
    main()
