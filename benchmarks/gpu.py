"""Training on one GPU: `python tools/benchmark.py gpu`.

Three loops train the same model, in turn in one process: `train()` with all that a run does after a
step, but without evaluations and saves, a plain loop, and timm's task. Their synthetic batches are
made once. The case `files` trains ResNet-50 from JPEG files.

Each case runs in a process of its own, which writes its rows again and again: a case that is
stopped at its time limit has those of the rounds before. Without a GPU, `--tiny` trains a small
model on the CPU.
"""

import fnmatch
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, supported_activities

import imagenet_cls.models.cifar  # noqa: F401 (registers resnet20_cifar)
from benchmarks import step
from benchmarks.compare import ROOT, Row, measured, progress
from benchmarks.images import prepare_images
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import init_process_groups

CASE_SEC = 240
EMA_DECAY = 0.9999
JPEGS = 256  # distinct ones of each part; the other files are links to these


@dataclass(frozen=True)
class Case:
    """A training. compile: `false` or a mode. h200: images per second of `train()` on an H200, see
    docs/gpu.md; a goal there. ratio: the goal of `train()` / plain loop.
    """

    model: str
    batch: int
    compile: str = "false"
    h200: int | None = None
    ratio: float | None = 0.98
    precision: str = "bf16"
    optimizer: str = "sgd"
    ema: bool = False
    parallel: str = "auto"
    size_px: int = 224
    channels: int = 3
    classes: int = 1000


RESNET20 = Case(
    "resnet20_cifar", 128, precision="fp32", size_px=28, channels=1, classes=10, ratio=None
)
CASES = {
    "resnet50-256": Case("resnet50", 256, h200=4600),
    "resnet50-32": Case("resnet50", 32, h200=1550, ratio=0.95),
    "resnet50-32-reduce-overhead": Case("resnet50", 32, "reduce-overhead", 4400, 0.95),
    "files": Case("resnet50", 256),
    "resnet20-128": replace(RESNET20, h200=14_400),
    "resnet20-128-ema": replace(RESNET20, h200=10_100, ema=True),
    "resnet20-128-reduce-overhead": replace(RESNET20, h200=29_800, compile="reduce-overhead"),
    "vit-s-256-ema": Case("vit_small_patch16_224", 256, h200=5600, optimizer="adamw", ema=True),
    "vit-b-128": Case("vit_base_patch16_224", 128, h200=2600, optimizer="adamw"),
    "resnet50-256-default": Case("resnet50", 256, "default", 6700),
    "resnet50-256-reduce-overhead": Case("resnet50", 256, "reduce-overhead"),
    "resnet50-256-dp": Case("resnet50", 256, parallel="dp"),
    "resnet50-256-ddp": Case("resnet50", 256, parallel="ddp"),
}


def find_device(tiny: bool) -> torch.device:
    assert tiny or torch.cuda.is_available(), "no GPU: use --tiny"
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def shrink(case: Case) -> Case:
    """The case with a model of three layers and four small images."""
    return replace(
        case, model="benchmarks.step:tiny", batch=4, size_px=32, channels=3, classes=10, h200=None
    )


def overrides_of(case: Case, device: torch.device) -> list[str]:
    """For `train()`, but the data."""
    mean = [0.5] * case.channels
    words = [
        f"device={device.type}",
        f"data.channels={case.channels}",
        f"data.mean={mean}",
        f"data.std={mean}",
        f"model.name={case.model}",
        "model.kwargs={}",
        f"augment.size_px={case.size_px}",
        f"eval.crop_px={case.size_px}",
        "eval.resize_px=null",
        "eval.crop_pct=1",
        f"train.global_batch_size={case.batch}",
        f"train.precision={case.precision}",
        f"train.compile={case.compile}",
        f"parallel.mode={case.parallel}",
        "log.every_steps=100000",
        "checkpoint.every_epochs=null",
    ]
    if case.optimizer != "sgd":
        words += [f"optimizer.name={case.optimizer}", "optimizer.kwargs={}"]
    return words + ([f"ema.decay={EMA_DECAY}"] if case.ema else [])


def synthetic(case: Case) -> list[str]:
    images = f"train_images: 1281167, val_images: 64, num_classes: {case.classes}"
    return ["data.name=synthetic", f"data.kwargs={{{images}, size_px: {case.size_px}}}"]


def training_loop(
    case: Case, device: torch.device, folder: Path, data: Sequence[str]
) -> step.TrainingLoop:
    """`train()`: called with a number of steps."""
    context = init_process_groups(RankInfo(), device, case.parallel, "auto", "env://", 60.0)
    return step.TrainingLoop([*overrides_of(case, device), *data], context, folder)


class OurLoop:
    """`train()`."""

    def __init__(self, case: Case, device: torch.device):
        self.device = device
        self.folder = tempfile.TemporaryDirectory()
        self.loop = training_loop(case, device, Path(self.folder.name), synthetic(case))

    def __call__(self, steps: int) -> None:
        self.loop(steps)

    def host_seconds(self) -> float:
        """From the batch of a step to the end of `after_step`."""
        times, run = [], self.loop.run
        epoch_batches, after_step = run.epoch_batches, run.after_step

        def timed_batches(*place: int) -> Iterator[Any]:
            for batch in epoch_batches(*place):
                times.append(time.perf_counter())
                yield batch

        def timed_after_step(result: Any) -> None:
            after_step(result)
            times.append(time.perf_counter())

        patches: Any = {"epoch_batches": timed_batches, "after_step": timed_after_step}
        with mock.patch.multiple(run, **patches):
            self.loop(1)
        return times[-1] - times[0]


class PlainLoop:
    """What a script does: channels-last, autocast, a fused optimizer, a moving average."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.model = self.build_model().to(device, memory_format=torch.channels_last).train()
        self.mode = None if case.compile == "false" else case.compile
        draws = torch.Generator(device).manual_seed(0)
        self.batches = itertools.cycle([self.make_batch(draws) for _ in range(step.BATCHES)])
        self.prepare()

    def build_model(self) -> Any:
        torch.manual_seed(0)
        case = self.case
        if case.model.endswith(":tiny"):
            return step.tiny(case.classes)
        return timm.create_model(case.model, num_classes=case.classes, in_chans=case.channels)

    def make_batch(self, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (self.case.batch, self.case.channels, self.case.size_px, self.case.size_px)
        options: dict[str, Any] = {"device": self.device, "generator": draws}
        images = torch.randint(256, shape, dtype=torch.uint8, **options)
        targets = torch.randint(self.case.classes, shape[:1], **options)
        return images.contiguous(memory_format=torch.channels_last), targets

    def prepare(self) -> None:
        self.called = self.model
        if self.mode:
            self.called = torch.compile(self.model, mode=self.mode, dynamic=False)
        parameters = self.model.parameters()
        self.optimizer: Any = (
            torch.optim.SGD(parameters, 0.001, momentum=0.9, weight_decay=1e-4, fused=True)
            if self.case.optimizer == "sgd"
            else torch.optim.AdamW(parameters, 1e-4, weight_decay=0.05, fused=True)
        )
        self.values = [v for v in self.model.state_dict().values() if v.is_floating_point()]
        self.average = [value.clone() for value in self.values] if self.case.ema else []

    def loss_of(self, images: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.called(images), targets)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            torch._foreach_lerp_(self.average, self.values, 1 - EMA_DECAY)

    def step(self) -> Tensor:
        images, targets = next(self.batches)
        images = images.float().sub_(127.5).mul_(1 / 127.5)
        is_bf16 = self.case.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16):
            loss = self.loss_of(images, targets)
        loss.backward()
        self.update()
        return loss.detach()

    def __call__(self, steps: int) -> None:
        torch.stack([self.step() for _ in range(steps)]).tolist()

    def host_seconds(self) -> float:
        begin = time.perf_counter()
        self.step()
        return time.perf_counter() - begin


class TimmLoop(PlainLoop):
    """timm's task, optimizer and moving average, as its train.py uses them."""

    def prepare(self) -> None:
        name = {"sgd": "momentum", "adamw": "adamw"}[self.case.optimizer]
        self.optimizer = create_optimizer_v2(self.model, opt=name, lr=0.001, weight_decay=1e-4)
        self.task: Any = ClassificationTask(
            self.model, criterion_kwargs={"smoothing": 0.0}, device=self.device, verbose=False
        )
        if self.mode:
            self.task.compile(mode=self.mode)
        self.ema = ModelEmaV3(self.model, decay=EMA_DECAY) if self.case.ema else None

    def loss_of(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.task(images, targets)["loss"]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.model)


LOOPS: dict[str, Callable[[Case, torch.device], Any]] = {
    "train()": OurLoop,
    "plain loop": PlainLoop,
    "timm": TimmLoop,
}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def cost_of_an_add(device: torch.device) -> float:
    """Microseconds in which the host issues `x.add(x)` on four numbers: the median of 15."""
    found, x = [], torch.ones(4, device=device)
    for _ in range(15):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(500):
            x.add(x)
        found.append((time.perf_counter() - begin) / 500)
    return 1e6 * median(found)


def host_ms(loop: Any, count: int) -> float:
    """Milliseconds in which the host issues a step while the device is idle."""
    found = []
    for _ in range(count):
        synchronize(loop.device)
        found.append(loop.host_seconds())
    synchronize(loop.device)
    return 1000 * median(found)


def kernel_table(loop: Any, file: Path) -> float:
    """Write the kernels of two steps, or on a CPU its operators; return the milliseconds in which
    kernels run in a step.
    """
    activities = supported_activities()
    with profile(activities=activities) as found:
        loop(2)
        synchronize(loop.device)
    averages = found.key_averages()
    file.parent.mkdir(parents=True, exist_ok=True)
    order = "cuda" if ProfilerActivity.CUDA in activities else "cpu"
    table = averages.table(f"self_{order}_time_total", row_limit=40, max_name_column_width=90)
    file.write_text(table)
    # the time of a kernel is in the row of its operator, too
    kernels = [row for row in averages if str(row.device_type).endswith("CUDA")]
    return sum(row.self_device_time_total for row in kernels if not row.is_user_annotation) / 2000


def images_per_sec(
    loop: Callable[[int], None], steps: int, case: Case, device: torch.device
) -> float:
    synchronize(device)
    begin = time.perf_counter()
    loop(steps)
    synchronize(device)
    return case.batch * steps / (time.perf_counter() - begin)


def ratio_row(row: str, ours: Sequence[float], theirs: Sequence[float], goal: float | None) -> Row:
    """The ratio of images per second in each round."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    return measured(row, ratios, "x", "" if goal is None else f">= {goal}")


def speed(name: str, case: Case, folder: Path, rounds: int, tiny: bool) -> Iterator[list[Row]]:
    """The rows of a case: after the warm-up, after each round, and with the times of kernels, whose
    tables are written into `folder`.
    """
    device, case = find_device(tiny), shrink(case) if tiny else case
    # Enough that the end of `train()` does not count where a step takes a few milliseconds.
    steps, on_gpu = 2 if tiny else max(20, 5120 // case.batch), device.type == "cuda"
    torch.backends.cudnn.benchmark = True  # as `train()` sets it
    adds = [cost_of_an_add(each) for each in dict.fromkeys([torch.device("cpu"), device])]
    note = "x.add(x) " + ", ".join(f"{add:.1f} us" for add in adds)
    loops: dict[str, Any] = {}
    rates: dict[str, list[float]] = {}
    more: dict[str, dict[str, Any]] = {"train()": {"note": note}}
    memory: list[float] = []

    def rows() -> list[Row]:
        is_h200 = on_gpu and "H200" in torch.cuda.get_device_name() and case.h200 is not None
        goals = {"train()": f">= {case.h200}"} if is_h200 else {}
        found = [
            measured(
                f"{name}: {label}",
                rates.get(label, []),
                "img/s",
                goals.get(label, ""),
                **more.get(label, {}),
            )
            for label in LOOPS
        ]
        ours = rates.get("train()", [])
        for label, goal in (("plain loop", case.ratio), ("timm", 1.0)):
            found.append(ratio_row(f"{name}: train() / {label}", ours, rates.get(label, []), goal))
        peak = measured(f"{name}: peak memory of train()", memory, "GiB")
        return [*found, peak] if on_gpu else found

    for label, build in LOOPS.items():
        try:
            loop = build(case, device)
            loop(steps)  # compiles, and cuDNN chooses
            more.setdefault(label, {})["host_ms"] = round(host_ms(loop, 3 if tiny else 15), 2)
            loops[label], rates[label] = loop, []
        except Exception as error:  # the other loops continue
            more[label] = {"note": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        if on_gpu and label == "train()":
            memory.append(torch.cuda.max_memory_allocated() / 2**30)
    yield rows()
    for _ in range(rounds):
        for label, loop in loops.items():
            rates[label].append(images_per_sec(loop, steps, case, device))
        yield rows()
    for label, loop in loops.items():
        busy = kernel_table(loop, folder / f"{name}-{label.strip('()').replace(' ', '-')}.txt")
        step_ms = 1000 * case.batch / median(rates[label])
        more[label]["gpu_busy_pct"] = round(100 * busy / step_ms) if on_gpu else None
    yield rows()
    if "train()" in loops:
        loops["train()"].loop.close()


def link_images(folder: Path, count: int, distinct: int) -> None:
    """Write `distinct` JPEG files of each part, and `count` links to each part in class folders."""
    prepare_images(folder / "distinct", distinct)
    for part in ("train", "val"):
        paths = sorted((folder / "distinct" / part).rglob("*.JPEG"))
        for number, path in zip(range(count), itertools.cycle(paths), strict=False):
            link = folder / "images" / part / path.parent.name / f"{number}.JPEG"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def endless(batches_of_epoch: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
    """The batches of one epoch after the other, from the same workers."""
    return itertools.chain.from_iterable(map(batches_of_epoch, itertools.count()))


def files(name: str, case: Case, tables: Path, rounds: int, tiny: bool) -> Iterator[list[Row]]:
    """From JPEG files: the loader alone, the step alone, and both together, after each round.

    The workers live through all rounds. What they have ready at the start of a round does not
    count.
    """
    device, case = find_device(tiny), shrink(case) if tiny else case
    workers = 2 if tiny else len(os.sched_getaffinity(0))
    ready, steps = 2 * workers, 2 if tiny else 40
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        link_images(folder, 16 * case.batch, 8 if tiny else JPEGS)
        words = [
            "data.name=folder",
            "data.kwargs={}",
            f"data.root={folder}/images",
            f"data.num_workers={workers}",
            f"model.num_classes={case.classes}",
            "train.epochs=10000",
        ]
        together = training_loop(case, device, folder / "together", words)
        alone = training_loop(case, device, folder / "step", synthetic(case))
        loader: Any = together.parts.train_loader
        batches = endless(loader.epoch)
        loader.epoch = lambda *_: batches

        def load(count: int) -> None:
            for _ in range(count):
                next(batches)

        loops = {"together": together, "step": alone, "loader": load}
        rates: dict[str, list[float]] = {label: [] for label in loops}
        for _ in range(rounds):
            for label, loop in loops.items():
                # what the workers have ready
                loop(ready)
                rates[label].append(images_per_sec(loop, steps, case, device))
            slower = list(map(min, rates["step"], rates["loader"]))
            whole = rates["together"]
            what = f"{name}, {workers} workers"
            yield [
                *(measured(f"{what}: {label}", rates[label], "img/s") for label in loops),
                ratio_row(f"{what}: together / step", whole, rates["step"], 0.95),
                ratio_row(f"{what}: together / the slower of both", whole, slower, 0.95),
            ]
        together.close()
        alone.close()


def run(rounds: int, tiny: bool, only: Sequence[str], folder: Path) -> Iterator[list[Row]]:
    """The rows of each case that a pattern of `only` matches, or of all. folder: for the tables of
    kernels.
    """
    patterns = only or ["*"]
    names = [name for name in CASES if any(fnmatch.fnmatch(name, one) for one in patterns)]
    assert names, f"--only: no case is named {' or '.join(only)}; cases: {', '.join(CASES)}"
    for name in names:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            path = Path(temporary, "rows.json")
            words = [name, str(folder / "kernels"), str(rounds), str(int(tiny)), str(path)]
            command = [sys.executable, "-m", "benchmarks.gpu", *words]
            note = f"not finished in {CASE_SEC} s"
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=os.environ | {"TMPDIR": temporary},  # removed if the process is killed
                    capture_output=True,
                    text=True,
                    timeout=CASE_SEC,
                )
                note = (done.stderr.strip().splitlines() or ["failed"])[-1][:200]
                note = note if done.returncode else ""
            rows = json.loads(path.read_text()) if path.exists() else []
        progress(f"{name}: {time.perf_counter() - begin:.0f} s")
        yield rows + ([measured(f"{name}: to its end", [], note=note)] if note else [])


def main() -> None:
    """Run one case: name, folder of the tables of kernels, rounds, tiny (0 or 1), file for the
    rows.
    """
    name, folder, rounds, tiny, file = sys.argv[1:]
    measure = files if name == "files" else speed
    for rows in measure(name, CASES[name], Path(folder), int(rounds), tiny == "1"):
        partial = Path(f"{file}.partial")
        partial.write_text(json.dumps(rows))
        partial.replace(file)
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of process groups


if __name__ == "__main__":
    main()
