"""The training loop against a bare loop, in turn in one process: `python tools/benchmark.py step`.

A ResNet-18 with 64 px and batches of 32 on the CPU, in one thread. `train()` runs with all that a run does after a step
(reports, guards), without evaluations and saves. The bare loop normalizes the images, runs forward and backward, steps,
and reads the losses once for each block.
"""

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compare import Row, measured, rounded
from imagenet_cls.checkpoint.format import Progress
from imagenet_cls.config.load import load_config
from imagenet_cls.engine.build import TrainingParts, build
from imagenet_cls.engine.run import Run
from imagenet_cls.engine.run_folder import RunFolder
from imagenet_cls.engine.state import open_saver
from imagenet_cls.engine.step import autocast
from imagenet_cls.engine.train import train
from imagenet_cls.optim.build import build_optimizer
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.signals import StopSignalHandler
from imagenet_cls.report.reporter import Reporter

SETTINGS = ("optimizer.lr=0.001", "log.tensorboard=false", "log.plots=false")
BARE_GOAL = ">= 0.99"
BATCHES = 4  # distinct batches of the bare loop


class PartialRun(Run):
    """A run without evaluations and saves."""

    def evaluate_if_due(self) -> None:
        pass

    def save_scheduled(self) -> bool:
        return False


class TrainingLoop:
    """`train()` of a config, some steps at a time."""

    def __init__(self, overrides: Sequence[str], group: Group, folder: Path):
        config = load_config("resnet50", [*SETTINGS, *overrides]).config
        self.parts, self.progress = build(config, group), Progress()
        plan = self.parts.plan
        self.reporter = Reporter(folder, 0, config, True, plan.total_steps, plan.epochs)
        saver = open_saver(self.parts, self.progress, RunFolder(folder), self.reporter)
        self.run = PartialRun(self.parts, self.progress, self.reporter, saver, StopSignalHandler(group))

    def __call__(self, steps: int) -> None:
        self.parts.plan = replace(self.parts.plan, total_steps=self.progress.step + steps)
        with contextlib.redirect_stdout(io.StringIO()):
            train(self.run)

    def close(self) -> None:
        self.parts.train_loader.close()
        self.reporter.close()


class BareLoop:
    """The same steps as a script would write them, on a copy of the model."""

    def __init__(self, parts: TrainingParts):
        self.model = deepcopy(parts.model).train()
        if parts.config.train.compile:
            self.model.compile()
        self.wrapped = self.model
        if isinstance(parts.wrapped, DistributedDataParallel):
            self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = build_optimizer(parts.config.optimizer, parameter_groups(self.model, parts.config.optimizer))
        self.preprocess, self.device = parts.preprocess.preprocess, parts.group.device
        self.dtype = parts.evaluation.autocast_dtype
        self.batches = cycle(list(islice(parts.train_loader.epoch(0), BATCHES)))

    def __call__(self, steps: int) -> None:
        losses = []
        for batch in islice(self.batches, steps):
            images, targets = self.preprocess(batch.images), batch.targets.to(self.device, non_blocking=True)
            with autocast(self.device, self.dtype):
                loss = functional.cross_entropy(self.wrapped(images), targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        torch.stack(losses).tolist()


def seconds_in_turn(loops: Sequence[Callable[[int], None]], steps: int, rounds: int) -> list[list[tuple[float, float]]]:
    """Wall-clock and CPU seconds of a block of steps, for each loop and round. Loops wait for the device."""
    seconds: list[list[tuple[float, float]]] = [[] for _ in loops]
    for _ in range(rounds):
        for loop, found in zip(loops, seconds, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            loop(steps)
            found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return seconds


def against_bare(
    name: str, overrides: Sequence[str], group: Group, batch_size: int, steps: int, rounds: int, goal: str = ""
) -> list[Row]:
    """Rows of a config: images per second of `train()`, its ratio to the bare loop, on GPUs its peak memory.

    goal: of the images per second.
    """
    on_gpu = group.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        ours = TrainingLoop([f"train.global_batch_size={batch_size}", *overrides], group, Path(folder))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        ours(steps)
        memory = [torch.cuda.max_memory_allocated() / 2**30] if on_gpu else []
        bare = BareLoop(ours.parts)
        bare(steps)
        our_seconds, bare_seconds = seconds_in_turn([ours, bare], steps, rounds)
        ours.close()
    rates = [batch_size * steps / wall for wall, _ in our_seconds]
    ratios = [theirs / mine for (mine, _), (theirs, _) in zip(our_seconds, bare_seconds, strict=True)]
    cpu = [theirs / mine for (_, mine), (_, theirs) in zip(our_seconds, bare_seconds, strict=True)]
    rows = [
        measured(f"{name}: train()", rates, "img/s", goal),
        measured(f"{name}: train() / bare loop", ratios, "x", BARE_GOAL, cpu_ratio=rounded(median(cpu))),
    ]
    return rows + ([measured(f"{name}: peak memory", memory, "GiB")] if on_gpu else [])


def run(rounds: int = 10, tiny: bool = False) -> list[Row]:
    """The rows of a ResNet-18 on the CPU."""
    size_px, batch_size, steps = (32, 4, 2) if tiny else (64, 32, 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sizes = [f"augment.size_px={size_px}", f"eval.crop_px={size_px}", "model.name=resnet18", "model.kwargs={}"]
    data = ["data.name=synthetic", "device=cpu"]
    data += [f"data.kwargs={{train_images: 65536, val_images: 64, num_classes: 10, size_px: {size_px}}}"]
    name = f"ResNet-18, {size_px} px, batch {batch_size}"
    rows = against_bare(name, [*sizes, *data], Group(RankInfo(), torch.device("cpu")), batch_size, steps, rounds)
    torch.set_num_threads(threads)
    return rows
