"""A step of `train()`, its parts and a reference loop: `python tools/benchmark.py step`.

The host's time is the CPU time of the main thread, divided by that of `x.add(x)` on four numbers,
which is measured beside it: microseconds on a machine on which this takes one. Each round
takes the fastest calls in a row of each part, and the fastest step, since other programs empty the
caches. The models and images are tiny, so that the kernels of the CPU take little of it. Operators
that return views are not counted. Both can be compared between machines. On a GPU a step takes at
least the host's time.

`train()` runs with all that a run does after a step (reports, guards), without evaluations and
saves. The reference loop normalizes the images, runs forward and backward, clips, steps and
averages as configured, and reads the losses once in each round. A ResNet-18 gives images per
second. On the CPU, one thread for each rank.
"""

import contextlib
import io
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import multiprocessing, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.compare import Row, measured, progress, rounded
from imagenet_cls.checkpoint.progress import Progress
from imagenet_cls.config.load import load_config
from imagenet_cls.data.device import erase
from imagenet_cls.engine.build import build
from imagenet_cls.engine.meter import StepResult
from imagenet_cls.engine.parts import TrainingParts
from imagenet_cls.engine.plan import Due
from imagenet_cls.engine.precision import autocast
from imagenet_cls.engine.run import Run
from imagenet_cls.engine.run_folder import RunFolder
from imagenet_cls.engine.state import open_saver
from imagenet_cls.engine.train import train
from imagenet_cls.guards.hang import HangLog
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.optim.optimizers import build_optimizer
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import RankContext, init_process_groups
from imagenet_cls.parallel.stop_requests import StopSignalHandler
from imagenet_cls.report.reporter import Reporter
from imagenet_cls.seeding import hash_key, seed_generators
from imagenet_cls.text import count_of

SETTINGS = ("optimizer.lr=0.001", "log.tensorboard=false", "log.plots=false", "log.report=false")
RATIO_GOAL = ">= 0.99"
BATCHES = 4  # distinct ones, of synthetic images
SINGLE = RankContext(RankInfo(), torch.device("cpu"))
CALLS = 10  # in a row
# The model by its name in the rows, and microseconds of its parts. It has as many tensors as a
# ResNet-20 and a ResNet-50.
PART_GOALS: dict[str, tuple[str, dict[str, str]]] = {
    "65 tensors": (
        "resnet20_cifar",
        {"norm, groups, skip": "<= 100", "BatchNorm statistics": "<= 30", "EMA": "<= 150"},
    ),
    "161 tensors": (
        "benchmarks.step:ManyTensors",
        {
            "seed the generators": "",
            "loss stack, top-1": "<= 40",
            "norm, groups, skip": "<= 210",
            "BatchNorm statistics": "<= 30",
            "EMA": "<= 150",
            "after_step": "",
        },
    ),
}
ERASING_GOALS = {"const": "<= 80", "rand": "", "pixel": ""}
# Microseconds that `train()` may add to a step, by what is in it.
ADDED_GOALS: dict[str, tuple[list[str], str]] = {
    "161 tensors": ([], "<= 350"),
    "161 tensors, EMA, clipping": (["ema.decay=0.999", "train.clip_norm=1.0"], "<= 500"),
}


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


class FixedGradients(torch.autograd.Function):
    """The identity of its first input. The gradients of the others are theirs, once more."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = [parameter.detach() for parameter in parameters]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, *ctx.gradients


class ManyTensors(nn.Module):
    """A linear layer, and beside it as many tensors and BatchNorm layers as a ResNet-50, which get
    gradients and compute nothing.
    """

    def __init__(self, num_classes: int):
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(53):
            layers += [nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return FixedGradients.apply(self.head(images.mean((2, 3))), *self.layers.parameters())


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
        self.run = PartialRun(
            self.parts,
            self.progress,
            self.reporter,
            saver,
            self.stop_signals,
            HangLog(folder / "stacks.log", after_sec=3600),
        )

    def __call__(self, steps: int) -> None:
        self.parts.plan = replace(self.parts.plan, total_steps=self.progress.step + steps)
        train(self.run)

    def close(self) -> None:
        self.parts.train_loader.close()
        self.reporter.close()
        self.stop_signals.close()


class ReferenceLoop:
    """The same steps as a script would write them, on a copy of the model."""

    def __init__(self, parts: TrainingParts):
        config = parts.config
        self.clip_norm = config.train.clip_norm
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
            if self.clip_norm is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
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
) -> list[Row]:
    """Rows of a config: images per second of `train()`, and its ratio to the reference loop."""
    with tempfile.TemporaryDirectory() as folder:
        ours = TrainingLoop(
            [f"train.global_batch_size={batch_size}", *overrides], context, Path(folder)
        )
        ours(steps)
        reference = ReferenceLoop(ours.parts)
        reference(steps)
        our_seconds, reference_seconds = seconds_in_turn([ours, reference], steps, rounds)
        ours.close()
    rates = [batch_size * steps / wall for wall, _ in our_seconds]
    pairs = list(zip(our_seconds, reference_seconds, strict=True))
    ratios, cpu_ratios = (
        [theirs[clock] / mine[clock] for mine, theirs in pairs] for clock in (0, 1)
    )
    return [
        measured(f"{name}: train()", rates, "img/s"),
        measured(
            f"{name}: train() / reference loop",
            ratios,
            "x",
            RATIO_GOAL,
            cpu_ratio=rounded(median(cpu_ratios)),
        ),
    ]


def fastest_call(function: Callable[[], object]) -> float:
    """CPU seconds of the main thread: the least mean of some calls in a row."""
    means = []
    for _ in range(10):
        begin = time.thread_time()
        for _ in range(CALLS):
            function()
        means.append((time.thread_time() - begin) / CALLS)
    return min(means)


def add_seconds() -> float:
    numbers = torch.ones(4)
    return fastest_call(lambda: numbers.add(numbers))


def fastest_step(
    loop: Callable[[int], None], optimizer: torch.optim.Optimizer, steps: int
) -> float:
    """CPU seconds of the main thread. optimizer: of the loop, which clears its gradients once in a
    step.
    """
    ends = []
    zero_grad = optimizer.zero_grad

    def zero_grad_and_record(*args: Any, **kwargs: Any) -> None:
        zero_grad(*args, **kwargs)
        ends.append(time.thread_time())

    with mock.patch.object(optimizer, "zero_grad", zero_grad_and_record):
        loop(steps)
    return min(end - begin for begin, end in pairwise(ends))


def part_rows(name: str, overrides: Sequence[str], rounds: int) -> list[Row]:
    """The host's time and the operators of the parts of a step, each called alone."""
    goals = PART_GOALS[name][1]
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        loop = TrainingLoop([*overrides, "ema.decay=0.999"], SINGLE, Path(folder))
        loop(BATCHES)
        parts = loop.parts
        images, targets = parts.preprocess(next(parts.train_loader.epoch(0)), 0, 0, 0)
        loss, _ = parts.wrapped(images, targets)
        loss.backward()
        outputs = parts.model(images).detach()
        skipped = torch.tensor(False)
        result = StepResult(BATCHES, 0, 0.1, torch.zeros(2), torch.ones(()), skipped)
        for owner, function, value in (
            (parts.model, "forward", outputs),
            (parts.wrapped, "criterion", loss),
            (parts.optimizer, "step", None),
            (parts.optimizer, "zero_grad", None),
        ):
            patches.enter_context(
                mock.patch.object(owner, function, lambda *_, value=value, **__: value)
            )
        calls: dict[str, Callable[[], object]] = {
            "seed the generators": lambda: seed_generators(hash_key("batch", 0, 0, 0, 0)),
            "loss stack, top-1": lambda: parts.wrapped(images, targets),
            "norm, groups, skip": lambda: parts.updater.update(0.1),
            "BatchNorm statistics": lambda: parts.batch_norm_statistics.sync(skipped),
            "EMA": lambda: parts.ema.update(parts.model, BATCHES),
            "after_step": lambda: loop.run.after_step(result),
        }
        for part, goal in goals.items():
            rows.append(part_row(f"{name}: {part}", calls[part], goal, rounds))
        loop.close()
    return rows


def part_row(name: str, function: Callable[[], object], goal: str, rounds: int) -> Row:
    function()
    with CountOperators() as mode:
        function()
    note = f"{mode.counts.total()} operators"
    values = [fastest_call(function) / add_seconds() for _ in range(rounds)]
    return measured(name, values, "us", goal, note)


def erasing_rows(rounds: int) -> list[Row]:
    """Of 60 boxes in 128 images of 4 pixels: with 32, kernels of the CPU take most of the time."""
    images = torch.zeros(128, 3, 4, 4)
    boxes = torch.zeros(128, 1, 4, dtype=torch.int32)
    boxes[:60] = torch.tensor([1, 1, 2, 2])
    keys = torch.arange(128)
    rows = []
    for mode, goal in ERASING_GOALS.items():
        call = partial(erase, images, boxes, keys, mode)
        rows.append(part_row(f"erase 60 boxes, {mode}", call, goal, rounds))
    return rows


def added_row(
    name: str, overrides: Sequence[str], goal: str, context: RankContext, steps: int, rounds: int
) -> Row:
    """The host's time that `train()` adds to a step of the reference loop, and its operators."""
    added = []
    with tempfile.TemporaryDirectory() as folder:
        ours = TrainingLoop(overrides, context, Path(folder))
        reference = ReferenceLoop(ours.parts)
        loops = [ours, reference]
        for loop in loops:
            loop(BATCHES)
        for _ in range(rounds):
            mine = fastest_step(ours, ours.parts.optimizer, steps)
            theirs = fastest_step(reference, reference.optimizer, steps)
            added.append((mine - theirs) / add_seconds())
        counts = [operators_of_steps(loop).total() / BATCHES for loop in loops]
        ours.close()
    note = f"{counts[0]:g} operators, {counts[0] - counts[1]:g} more"
    title = f"{name}, {count_of(context.world_size, 'rank')}: train() - reference loop"
    return measured(title, added, "us", goal, note)


def host_rows(context: RankContext, steps: int, rounds: int) -> list[Row]:
    """The rows of the host's time on this many ranks."""
    words = [*synthetic(8), f"train.global_batch_size={8 * context.world_size}"]
    words.append("log.every_steps=1000000")
    if context.world_size > 1:
        words.append("model.name=benchmarks.step:tiny")
        return [added_row("tiny", words, "", context, steps, rounds)]
    adds = [1e6 * add_seconds() for _ in range(rounds)]
    rows = [measured("x.add(x) of four numbers, here", adds, "us")]
    for name, (model, _) in PART_GOALS.items():
        rows += part_rows(name, [*words, f"model.name={model}"], rounds)
        progress(rows[-1]["row"])
    rows += erasing_rows(rounds)
    words.append("model.name=benchmarks.step:ManyTensors")
    for name, (overrides, goal) in ADDED_GOALS.items():
        rows.append(added_row(name, [*words, *overrides], goal, context, steps, rounds))
        progress(rows[-1]["row"])
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
    rows += host_rows(context, 2 if tiny else 50, rounds)
    if context.is_main:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    os._exit(0)  # threads of gloo may abort a normal exit
