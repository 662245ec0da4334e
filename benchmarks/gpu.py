"""Training on one GPU: `python tools/benchmark.py gpu`.

ResNet-50, 224 px, bfloat16, channels-last. Each case runs in a process of its own, and one that
fails or takes too long has no figures. Without a GPU, `--tiny` runs all cases on the CPU with small
sizes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.compare import ROOT, Row, check, measured, progress

BATCHES = (256, 512)
GOALS = {False: ">= 5500", True: ">= 6500"}  # img/s, eager and compiled
CASE_SEC, ALL_SEC = 170, 570
FILES = 4096


class Sizes:
    """Of the model and the blocks of steps."""

    def __init__(self, tiny: bool):
        import torch

        self.tiny = tiny
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        assert tiny or self.device == "cuda", "no GPU: use --tiny"
        self.steps = 2 if tiny else 20
        size_px, classes = (32, 10) if tiny else (224, 1000)
        self.overrides = [
            f"augment.size_px={size_px}",
            f"eval.crop_px={size_px}",
            f"device={self.device}",
        ]
        self.overrides += ["train.precision=bf16", "train.channels_last=true"]
        self.name = "a model of three layers" if tiny else "ResNet-50"
        if tiny:
            self.overrides += [
                "model.name=benchmarks.step:tiny",
                "model.kwargs={}",
                "eval.resize_px=36",
            ]
        images = (
            f"train_images: 1281167, val_images: 64, num_classes: {classes}, size_px: {size_px}"
        )
        self.synthetic = [*self.overrides, "data.name=synthetic", f"data.kwargs={{{images}}}"]

    def batch(self, size: int) -> int:
        return 4 if self.tiny else size


def group_of(sizes: Sizes, mode: str = "auto") -> Any:
    import torch

    from imagenet_cls.parallel.environment import RankInfo
    from imagenet_cls.parallel.process_group import init_process_groups

    device = torch.device("cuda", 0) if sizes.device == "cuda" else torch.device("cpu")
    return init_process_groups(RankInfo(), device, mode, "auto", "env://", 60.0)


def training(
    sizes: Sizes, rounds: int, batch: int, compiled: bool = False, mode: str = "auto"
) -> list[Row]:
    """Synthetic images: images per second, ratio to the reference loop, peak memory."""
    from benchmarks.step import throughput_rows

    how = {"auto": "", "dp": ", DP on one device", "ddp": ", DDP on one device"}[mode]
    name = f"{sizes.name}, batch {sizes.batch(batch)}, {'compiled' if compiled else 'eager'}{how}"
    overrides = [
        *sizes.synthetic,
        f"train.compile={str(compiled).lower()}",
        f"parallel.mode={mode}",
    ]
    goal = GOALS[compiled] if mode == "auto" else ""
    return throughput_rows(
        name, overrides, group_of(sizes, mode), sizes.batch(batch), sizes.steps, rounds, goal
    )


def files(sizes: Sizes, rounds: int, batch: int) -> list[Row]:
    """From JPEG files: loader and step alone, and both together."""
    from benchmarks.images import prepare_images
    from benchmarks.step import TrainingLoop, seconds_in_turn

    count, workers = (32, 2) if sizes.tiny else (FILES, len(os.sched_getaffinity(0)))
    batch, steps = sizes.batch(batch), 2 * sizes.steps
    options = [f"train.global_batch_size={batch}", f"data.num_workers={workers}"]
    with tempfile.TemporaryDirectory() as folder:
        prepare_images(Path(folder, "images"), count)
        from_files = [
            "data.name=folder",
            f"data.root={folder}/images",
            "data.kwargs={}",
            "model.num_classes=1000",
        ]
        context = group_of(sizes)
        together = TrainingLoop(
            [*sizes.overrides, *options, *from_files], context, Path(folder, "files")
        )
        step = TrainingLoop([*sizes.synthetic, *options], context, Path(folder, "synthetic"))
        epochs = iter(range(10**6, 10**7))

        def load(wanted: int) -> None:
            while wanted > 0:
                wanted -= sum(
                    1 for _ in islice(together.parts.train_loader.epoch(next(epochs)), wanted)
                )

        loops: Sequence[Callable[[int], None]] = (together, load, step)
        for loop in loops:
            loop(steps)
        rates = [
            [batch * steps / wall for wall, _ in found]
            for found in seconds_in_turn(loops, steps, rounds)
        ]
        together.close()
        step.close()
    name = f"{sizes.name}, batch {batch}, JPEG files, {workers} workers"
    whats = ("together", "loader", "step")
    ratios = [both / min(alone) for both, *alone in zip(*rates, strict=True)]
    rows = [
        measured(f"{name}: {what}", values, "img/s")
        for what, values in zip(whats, rates, strict=True)
    ]
    return [
        *rows,
        measured(f"{name}: together / the slower of loader and step", ratios, "x", ">= 0.95"),
    ]


def sync_bn(sizes: Sizes, rounds: int) -> list[Row]:
    """torch's SyncBatchNorm against this project's for CPUs, on two ranks that share the device, by
    gloo.

    On a CPU, where torch's does not run, against BatchNorm over the images of both ranks.
    """
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_sync_bn_rank, (folder, sizes.device, sizes.tiny, rounds), nprocs=2)
        found = json.loads(Path(folder, "rows.json").read_text())
    return [measured(f"SyncBN, 2 ranks: {name}", values, unit) for name, values, unit in found]


def _sync_bn_rank(rank: int, folder: str, device: str, tiny: bool, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from imagenet_cls.parallel.sync_bn import CpuSyncBatchNorm

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    shape = (8, 16, 8, 8) if tiny else (256, 256, 56, 56)
    whole = torch.randn(2 * shape[0], *shape[1:], device=device) * 2 + 1
    own, weights = (
        whole.chunk(2)[rank].clone(),
        torch.linspace(-1, 1, shape[1], device=device).view(1, -1, 1, 1),
    )
    on_gpu = device == "cuda"
    theirs = (nn.SyncBatchNorm if on_gpu else nn.BatchNorm2d)(shape[1], device=device)
    seconds: dict[str, list[float]] = {"ours": [], "torch's": []}
    results = {}
    for _ in range(rounds + 1):
        for name, layer, images in (
            ("ours", CpuSyncBatchNorm(shape[1], device=device), own),
            ("torch's", theirs, own if on_gpu else whole),
        ):
            images = images.clone().requires_grad_()
            begin = time.perf_counter()
            output = layer(images)
            (output.square() * weights).sum().backward()
            if on_gpu:
                torch.cuda.synchronize()
            seconds[name].append(1e3 * (time.perf_counter() - begin))
            assert images.grad is not None
            pair = [output.detach(), images.grad]
            results[name] = [each.chunk(2)[rank] if len(each) > len(own) else each for each in pair]
    if rank == 0:
        rows: list[tuple[str, list[float], str]] = []
        for what, mine, other in zip(
            ("output", "gradient"), results["ours"], results["torch's"], strict=True
        ):
            rows.append(
                (f"largest difference of the {what}", [(mine - other).abs().max().item()], "")
            )
        rows += [
            (f"{name}, forward and backward", values[1:], "ms")
            for name, values in seconds.items()
            if on_gpu
        ]
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)


def resume(sizes: Sizes, rounds: int) -> list[Row]:
    """Whether a resumed run ends with the same weights as an uninterrupted one, with
    `train.deterministic`.
    """
    steps = 6 if sizes.tiny else 40
    options = [*sizes.synthetic, f"train.global_batch_size={sizes.batch(64)}", "optimizer.lr=0.01"]
    options += [
        "train.deterministic=true",
        f"train.max_steps={steps}",
        f"checkpoint.every_steps={steps // 2}",
    ]
    options += ["log.tensorboard=false", "log.plots=false", "checkpoint.keep_last=2"]
    digests = []
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "tools" / "train.py"),
            "resnet50",
            *options,
            "--work-dir",
            folder,
        ]
        last = Path(folder, "checkpoints", f"step-{steps:07d}")
        for _ in range(2):
            done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            digests.append(sha256((last / "model.safetensors").read_bytes()).hexdigest())
            shutil.rmtree(last)  # the second run resumes from the checkpoint before
    return [
        check(
            f"same weights after {steps} steps, resumed after {steps // 2}",
            digests[0] == digests[1],
        )
    ]


CASES: dict[str, Callable[[Sizes, int], list[Row]]] = {
    **{
        f"{'compiled' if compiled else 'eager'}-{batch}": (
            lambda sizes, rounds, batch=batch, compiled=compiled: training(
                sizes, rounds, batch, compiled
            )
        )
        for compiled in (False, True)
        for batch in BATCHES
    },
    "files": lambda sizes, rounds: files(sizes, rounds, BATCHES[0]),
    "dp": lambda sizes, rounds: training(sizes, rounds, BATCHES[0], mode="dp"),
    "ddp": lambda sizes, rounds: training(sizes, rounds, BATCHES[0], mode="ddp"),
    "sync_bn": sync_bn,
    "resume": resume,
}


def run(rounds: int = 5, tiny: bool = False, cases: Sequence[str] = tuple(CASES)) -> list[Row]:
    """The rows of all cases. tiny: each batch has four images, so one of the two sizes is
    enough.
    """
    rows, end = [], time.perf_counter() + ALL_SEC
    for case in cases:
        if tiny and case.endswith(str(BATCHES[1])):
            continue
        begin = time.perf_counter()
        limit = CASE_SEC if tiny else min(CASE_SEC, max(end - begin, 1))
        with tempfile.NamedTemporaryFile() as file:
            command = [
                sys.executable,
                "-m",
                "benchmarks.gpu",
                case,
                str(rounds),
                str(int(tiny)),
                file.name,
            ]
            note = f"not finished in {limit:.0f} s"
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, timeout=limit
                )
                note = (done.stderr.strip().splitlines() or ["failed"])[-1][:200]
            text = Path(file.name).read_text()
        rows += json.loads(text) if text else [measured(case, [], note=note)]
        progress(f"{case}: {time.perf_counter() - begin:.0f} s")
    return rows


def main() -> None:
    """Run one case: name, rounds, tiny (0 or 1), file for the rows."""
    case, rounds, tiny, path = sys.argv[1:]
    Path(path).write_text(json.dumps(CASES[case](Sizes(tiny == "1"), int(rounds))))
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of process groups


if __name__ == "__main__":
    main()
