"""A step of `train()` against reference loops, in turn in one process: `python tools/benchmark.py
step`.

`train()` runs with all that a run does after a step (reports, guards), without evaluations and
saves. The reference loop normalizes the images, runs forward and backward, clips, steps and
averages as configured, and reads the losses once in each round. With "the same arithmetic" it also
computes what `train()` reports and checks: the norm of the gradient and the top-1 accuracy.

A ResNet-18 gives images per second. The other models are tiny, so that most of a step is overhead:
microseconds of a step, and those that `train()` adds to a reference loop. On the CPU, one thread
for each rank.
"""

import contextlib
import io
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import multiprocessing, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.compare import Row, measured, progress, rounded
from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.config.load import load_config
from imagenet_cls.engine.build import TrainingParts, build
from imagenet_cls.engine.plan import Due
from imagenet_cls.engine.precision import autocast
from imagenet_cls.engine.run import Run
from imagenet_cls.engine.run_folder import RunFolder
from imagenet_cls.engine.state import open_saver
from imagenet_cls.engine.train import train
from imagenet_cls.optim.build import build_optimizer
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import RankContext, init_process_groups
from imagenet_cls.parallel.stop_requests import StopSignalHandler
from imagenet_cls.report.reporter import Reporter

SETTINGS = ("optimizer.lr=0.001", "log.tensorboard=false", "log.plots=false")
RATIO_GOAL = ">= 0.99"
BATCHES = 4  # distinct ones, of synthetic images
OVERHEAD_BATCH = 32  # of a tiny model on each rank
# Microseconds that `train()` may add to the same arithmetic, by model and number of ranks.
OVERHEAD_GOALS = {("tiny", 1): "<= 300", ("many_tensors", 1): "<= 1000", ("tiny", 2): "<= 1000"}


def tiny(num_classes: int) -> nn.Module:
    """A convolution, a BatchNorm and a linear layer."""
    layers = [
        nn.Conv2d(3, 8, 3, stride=4),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


def many_tensors(num_classes: int) -> nn.Module:
    """As many tensors and BatchNorm layers as a ResNet-50, all of them tiny."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 8, 3, stride=4, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
    ]
    for _ in range(52):
        layers += [nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


class PartialRun(Run):
    """A run without evaluations and saves."""

    def due(self) -> Due:
        return replace(super().due(), evaluation=False, save=False)


class TrainingLoop:
    """`train()` of a config, some steps at a time. Its synthetic batches are made once."""

    def __init__(
        self,
        overrides: Sequence[str],
        context: RankContext,
        folder: Path,
        config_name: str = "resnet50",
    ):
        config = load_config(config_name, [*SETTINGS, *overrides]).config
        self.parts, self.progress = build(config, context), Progress()
        if config.data.name == "synthetic":
            batches = list(islice(self.parts.train_loader.epoch(0), BATCHES))
            self.parts.train_loader.epoch = lambda *_: cycle(batches)  # type: ignore[method-assign]
        plan = self.parts.plan
        with contextlib.redirect_stdout(io.StringIO()):
            self.reporter = Reporter(
                folder, 0, config, context.is_main, plan.total_steps, plan.epochs
            )
        saver = open_saver(self.parts, self.progress, RunFolder(folder), self.reporter)
        self.stop_signals = StopSignalHandler(context)
        self.run = PartialRun(self.parts, self.progress, self.reporter, saver, self.stop_signals)

    def __call__(self, steps: int) -> None:
        self.parts.plan = replace(self.parts.plan, total_steps=self.progress.step + steps)
        train(self.run)

    def close(self) -> None:
        self.parts.train_loader.close()
        self.reporter.close()
        self.stop_signals.close()


class ReferenceLoop:
    """The same steps as a script would write them, on a copy of the model. same_arithmetic: see
    above.
    """

    def __init__(self, parts: TrainingParts, same_arithmetic: bool = False):
        config = parts.config
        self.same_arithmetic, self.clip_norm = same_arithmetic, config.train.clip_norm
        self.model = deepcopy(parts.model).train()
        if config.train.compile:
            self.model.compile()
        is_ddp = isinstance(parts.wrapped, DistributedDataParallel)
        self.wrapped = DistributedDataParallel(self.model) if is_ddp else self.model
        self.optimizer = build_optimizer(
            config.optimizer, parameter_groups(self.model, config.optimizer)
        )
        self.averaged = [
            tensor.detach()
            for tensor in self.model.state_dict().values()
            if tensor.is_floating_point()
        ]
        self.average = (
            None if config.ema.decay is None else [tensor.clone() for tensor in self.averaged]
        )
        self.scaler = torch.amp.GradScaler(
            parts.context.device.type, enabled=parts.scaler.is_enabled()
        )
        self.normalize = parts.preprocess.normalize
        self.device = parts.context.device
        self.dtype = parts.autocast_dtype
        self.batches = cycle(list(islice(parts.train_loader.epoch(0), BATCHES)))

    def __call__(self, steps: int) -> None:
        values = []
        for batch in islice(self.batches, steps):
            images, targets = (
                self.normalize(batch.images),
                batch.targets.to(self.device, non_blocking=True),
            )
            with autocast(self.device, self.dtype):
                logits = self.wrapped(images)
                loss = functional.cross_entropy(logits, targets)
            self.scaler.scale(loss).backward()
            values.append(loss.detach())
            if self.same_arithmetic:
                values.append((logits.argmax(1) == targets).float().mean())
            if self.clip_norm is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            elif self.same_arithmetic:
                gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
                values.append(nn.utils.get_total_norm(gradients))
            for group in self.optimizer.param_groups:
                group["lr"] = 0.001
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            if self.average is not None:
                torch._foreach_lerp_(self.average, self.averaged, 0.001)
        torch.stack(values).tolist()


class CountOperators(TorchDispatchMode):
    """Counts calls of operators by name, without those that return a view. On a GPU each of the
    others is about one launch, or several.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aliases = [each.alias_info for each in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        self.counts[function._opname] += not is_view
        return function(*args, **kwargs or {})


def operators_of_steps(loop: Callable[[int], None]) -> Counter[str]:
    """The operators of `BATCHES` steps, without those of reports after them. They repeat
    exactly.
    """
    totals = []
    for steps in (2 * BATCHES, BATCHES):
        with CountOperators() as mode:
            loop(steps)
        totals.append(mode.counts)
    return totals[0] - totals[1]


def seconds_in_turn(
    loops: Sequence[Callable[[int], None]], steps: int, rounds: int
) -> list[list[tuple[float, float]]]:
    """Wall-clock and CPU seconds of some steps, for each loop and round. Loops wait for the
    device.
    """
    seconds: list[list[tuple[float, float]]] = [[] for _ in loops]
    for _ in range(rounds):
        for loop, found in zip(loops, seconds, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            loop(steps)
            found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return seconds


def throughput_rows(
    name: str,
    overrides: Sequence[str],
    context: RankContext,
    batch_size: int,
    steps: int,
    rounds: int,
    goal: str = "",
) -> list[Row]:
    """Rows of a config: images per second of `train()`, its ratio to the reference loop, on GPUs
    its peak memory.

    goal: of the images per second.
    """
    on_gpu = context.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        ours = TrainingLoop(
            [f"train.global_batch_size={batch_size}", *overrides], context, Path(folder)
        )
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        ours(steps)
        memory = [torch.cuda.max_memory_allocated() / 2**30] if on_gpu else []
        reference = ReferenceLoop(ours.parts)
        reference(steps)
        our_seconds, reference_seconds = seconds_in_turn([ours, reference], steps, rounds)
        ours.close()
    rates = [batch_size * steps / wall for wall, _ in our_seconds]
    pairs = list(zip(our_seconds, reference_seconds, strict=True))
    ratios, cpu_ratios = (
        [theirs[clock] / mine[clock] for mine, theirs in pairs] for clock in (0, 1)
    )
    rows = [
        measured(f"{name}: train()", rates, "img/s", goal),
        measured(
            f"{name}: train() / reference loop",
            ratios,
            "x",
            RATIO_GOAL,
            cpu_ratio=rounded(median(cpu_ratios)),
        ),
    ]
    return rows + ([measured(f"{name}: peak memory", memory, "GiB")] if on_gpu else [])


def overhead_rows(
    model: str, ema_and_clip: bool, context: RankContext, steps: int, rounds: int
) -> list[Row]:
    """Rows of a tiny model: microseconds of a step of `train()`, and those that it adds to the
    reference loops.
    """
    overrides = [*synthetic(16), f"model.name=benchmarks.step:{model}"]
    overrides += [
        f"train.global_batch_size={OVERHEAD_BATCH * context.world_size}",
        f"log.every_steps={steps}",
    ]
    overrides += ["ema.decay=0.999", "train.clip_norm=1.0"] * ema_and_clip
    with tempfile.TemporaryDirectory() as folder:
        ours = TrainingLoop(overrides, context, Path(folder))
        loops = [ours, ReferenceLoop(ours.parts), ReferenceLoop(ours.parts, same_arithmetic=True)]
        seconds_in_turn(loops, steps, 1)
        seconds = seconds_in_turn(loops, steps, rounds)
        ours.close()
    wall, cpu = (
        [[1e6 * each[clock] / steps for each in found] for found in seconds] for clock in (0, 1)
    )
    name = (
        f"{model}{', EMA and clipping' * ema_and_clip}, {context.world_size} "
        f"rank{'s' * (context.world_size > 1)}"
    )
    rows = [measured(f"{name}: train()", wall[0], "us", note=f"CPU time {median(cpu[0]):.0f} us")]
    for number, what in ((1, "reference loop"), (2, "the same arithmetic")):
        added, cpu_added = (
            [mine - theirs for mine, theirs in zip(found[0], found[number], strict=True)]
            for found in (wall, cpu)
        )
        goal = OVERHEAD_GOALS.get((model, context.world_size), "") if number == 2 else ""
        fastest = min(wall[0]) - min(wall[number])
        note = f"CPU time {median(cpu_added):.0f} us; between the fastest rounds {fastest:.0f} us"
        rows.append(measured(f"{name}: train() - {what}", added, "us", goal, note))
    return rows


def synthetic(size_px: int) -> list[str]:
    """Overrides for synthetic images on the CPU, and for models without arguments."""
    images = f"{{train_images: 65536, val_images: 64, num_classes: 10, size_px: {size_px}}}"
    sizes = [
        f"augment.size_px={size_px}",
        f"eval.crop_px={size_px}",
        "model.kwargs={}",
        "device=cpu",
    ]
    return ["data.name=synthetic", f"data.kwargs={images}", *sizes]


def run(rounds: int = 5, tiny: bool = False) -> list[Row]:
    """The rows of all models, on one rank and on two. tiny: a smaller ResNet-18, and two steps in a
    round.
    """
    rows = []
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            arguments: tuple[Any, ...] = (world_size, folder, rounds, tiny)
            multiprocessing.spawn(run_rank, arguments, nprocs=world_size)
            rows += json.loads(Path(folder, "rows.json").read_text())
    return rows


def run_rank(rank: int, world_size: int, folder: str, rounds: int, tiny: bool) -> None:
    """All models on one rank; rank 0 writes the rows into `folder`."""
    torch.set_num_threads(1)
    rank_info = RankInfo(rank, rank, world_size, world_size)
    context = init_process_groups(
        rank_info, torch.device("cpu"), "auto", "gloo", f"file://{folder}/store", 60.0
    )
    rows: list[Row] = []
    if world_size == 1:
        size_px, batch_size, steps = (32, 4, 2) if tiny else (64, 32, 4)
        overrides = [*synthetic(size_px), "model.name=resnet18"]
        name = f"ResNet-18, {size_px} px, batch {batch_size}"
        rows += throughput_rows(name, overrides, context, batch_size, steps, rounds)
    for ema_and_clip in (False, True):
        for model in ("tiny", "many_tensors"):
            rows += overhead_rows(model, ema_and_clip, context, 2 if tiny else 20, rounds)
            if context.is_main:
                progress(rows[-1]["row"])
    if context.is_main:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    os._exit(0)  # threads of gloo may abort a normal exit
