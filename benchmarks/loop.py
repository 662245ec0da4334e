"""Time that the training loop adds to a step: `python benchmarks/loop.py`.

`train()` and a bare loop with the same model, optimizer and batches take turns in one process, a block of steps each.
The bare loop normalizes the images, runs forward and backward, clips, steps and averages as configured, and reads the
losses once for each block. It runs a second time with the rest of the arithmetic of `train()`: the norm of the
gradient, the check that it is finite, and the top-1 accuracy. Each row has the median of paired differences and their
quartiles, of the wall clock and of the CPU time of the process; and the difference of the fastest blocks, which depends
least on what else runs on the machine. The models are tiny, so that the time of a step is mostly overhead. One thread
for each rank, on the CPU.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from imagenet_cls.checkpoint.format import Progress
from imagenet_cls.config.load import load_config
from imagenet_cls.data.loader import TrainBatch
from imagenet_cls.engine.build import TrainingParts, build
from imagenet_cls.engine.run import Run
from imagenet_cls.engine.run_folder import RunFolder, RunOptions
from imagenet_cls.engine.state import open_saver
from imagenet_cls.engine.step import any_nonfinite
from imagenet_cls.engine.train import train
from imagenet_cls.optim.build import build_optimizer
from imagenet_cls.optim.groups import parameter_groups
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group, init_group
from imagenet_cls.parallel.signals import StopSignalHandler
from imagenet_cls.report.reporter import Reporter

HERE = Path(__file__).resolve().parent
BLOCK_STEPS = 20  # also `log.every_steps`: each block has one report
IMAGES = 32  # of a step, on each rank
MODELS = {"tiny": "loop:tiny", "161 tensors, 53 BatchNorm": "loop:many_tensors"}
EMA_AND_CLIP = ("ema.decay=0.999", "train.clip_norm=1.0")
# Microseconds of a step that may be added to the same arithmetic, by model and ranks.
GOALS_US = {("tiny", 1): 300, ("161 tensors, 53 BatchNorm", 1): 1000, ("tiny", 2): 1000}
CASES = {name: (model, ()) for name, model in MODELS.items()} | {
    f"{name}, EMA and clipping": (model, EMA_AND_CLIP) for name, model in MODELS.items()
}


def tiny(num_classes: int) -> nn.Module:
    """A convolution, a BatchNorm and a linear layer."""
    layers = [nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


def many_tensors(num_classes: int) -> nn.Module:
    """As many tensors and BatchNorm layers as a ResNet-50, all of them tiny."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, stride=4, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    for _ in range(52):
        layers += [nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


class BareLoop:
    """The steps of `train()` as a script would write them, on a copy of its model."""

    def __init__(self, parts: TrainingParts):
        config = parts.config
        self.model = deepcopy(parts.model).train()
        self.wrapped = DistributedDataParallel(self.model) if parts.group.world_size > 1 else self.model
        self.optimizer = build_optimizer(config.optimizer, parameter_groups(self.model, config.optimizer))
        self.clip_norm = config.train.clip_norm
        self.averaged = [tensor.detach() for tensor in self.model.state_dict().values() if tensor.is_floating_point()]
        self.average = None if config.ema.decay is None else [tensor.clone() for tensor in self.averaged]
        self.preprocess = parts.preprocess.preprocess

    def run(self, batches: list[TrainBatch], same_arithmetic: bool) -> None:
        """same_arithmetic: also compute what `train()` reports: see above."""
        values = []
        for batch in batches:
            logits = self.wrapped(self.preprocess(batch.images))
            loss = functional.cross_entropy(logits, batch.targets)
            loss.backward()
            values.append(loss.detach())
            gradients = [gradient for p in self.model.parameters() if (gradient := p.grad) is not None]
            if same_arithmetic:
                values += [(logits.argmax(1) == batch.targets).float().mean(), any_nonfinite(gradients)]
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            elif same_arithmetic:
                values.append(nn.utils.get_total_norm(gradients))
            for group in self.optimizer.param_groups:
                group["lr"] = 0.001
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.average is not None:
                torch._foreach_lerp_(self.average, self.averaged, 0.001)
        torch.stack(values).tolist()


class TimedLoader:
    """Wraps a run's loader: between two blocks of steps of `train()` it times the bare loops on the same batches.

    seconds: of a step by `train()` and by the bare loop without and with the same arithmetic, for each round, (wall,
    CPU). The first block of each is a warm-up.
    """

    def __init__(self, parts: TrainingParts):
        self.inner, self.sampler, self.bare = parts.train_loader, parts.train_loader.sampler, BareLoop(parts)
        self.seconds: list[list[tuple[float, float]]] = []

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[TrainBatch]:
        block: list[TrainBatch] = []
        begin = clocks()
        for batch in self.inner.epoch(epoch, start_step):
            if len(block) == BLOCK_STEPS:
                row = [since(begin)]
                for same_arithmetic in (False, True):
                    begin = clocks()
                    self.bare.run(block, same_arithmetic)
                    row.append(since(begin))
                self.seconds.append(row)
                block, begin = [], clocks()
            block.append(batch)
            yield batch

    def close(self) -> None:
        self.inner.close()


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(begin: tuple[float, float]) -> tuple[float, float]:
    """Microseconds of a step of the block that started at `begin`."""
    return tuple(1e6 * (now - then) / BLOCK_STEPS for now, then in zip(clocks(), begin, strict=True))  # type: ignore[return-value]


def measure(name: str, group: Group, rounds: int, overrides: list[str]) -> dict[str, Any]:
    """The row of a case. A collective."""
    model, settings = CASES[name]
    steps = BLOCK_STEPS * (rounds + 1) + 1
    images = IMAGES * group.world_size * steps
    words = [
        "data.name=synthetic",
        f"data.kwargs={{train_images: {images}, val_images: 64, num_classes: 10, size_px: 16}}",
        *("augment.size_px=16", "eval.crop_px=16", "train.epochs=1", "optimizer.lr=0.001", "device=cpu"),
        *(f"model.name={model}", f"train.global_batch_size={IMAGES * group.world_size}"),
        *(f"log.every_steps={BLOCK_STEPS}", "log.tensorboard=false", "log.plots=false"),
    ]
    config = load_config(HERE.parent / "configs" / "resnet50.yaml", [*words, *settings, *overrides]).config
    parts = build(config, group)
    loader = TimedLoader(parts)
    parts.train_loader = loader
    progress, stop_signals = Progress(), StopSignalHandler(group)
    with tempfile.TemporaryDirectory() as work_dir, contextlib.redirect_stdout(io.StringIO()):
        folder, plan = RunFolder(Path(work_dir)), parts.plan
        if group.is_main:
            folder.open(config, RunOptions(Path(work_dir)))
        reporter = Reporter(Path(work_dir), 0, config, group.is_main, plan.total_steps, plan.epochs)
        with reporter, open_saver(parts, progress, folder, reporter) as saver:
            train(Run(parts, progress, reporter, saver, stop_signals))
            saver.wait()
        folder.close()
        stop_signals.close()
    row: dict[str, Any] = {"model": name, "ranks": group.world_size, "rounds": rounds, "overrides": overrides}
    for clock, kind in enumerate(("wall", "cpu")):
        ours, bare, same = ([block[clock] for block in blocks] for blocks in zip(*loader.seconds[1:], strict=True))
        row[f"{kind}_us"] = {"train": median(ours), "bare": median(bare), "same_arithmetic": median(same)}
        for label, other in (("added", bare), ("added_to_same", same)):
            low, middle, high = quantiles([a - b for a, b in zip(ours, other, strict=True)], n=4)
            least = min(ours) - min(other)
            row[f"{kind}_us"][label] = {"median": middle, "low": low, "high": high, "least": least}
    return row


def run(rounds: int = 20, overrides: tuple[str, ...] = (), ranks: tuple[int, ...] = (1, 2)) -> list[dict[str, Any]]:
    """A row for each model on each number of ranks; times in microseconds of a step, `low` and `high` are quartiles,
    `least` the difference of the fastest blocks.

    rounds: pairs of blocks. overrides: of the config.
    """
    rows = []
    for world_size in ranks:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(Path(__file__).resolve()), "--rounds", str(rounds), "--folder", folder]
            command += ["--world-size", str(world_size), *overrides]
            env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}"}
            processes = [
                subprocess.Popen([*command, "--rank", str(rank)], cwd=HERE.parent, env=env)
                for rank in range(world_size)
            ]
            codes = [process.wait() for process in processes]
            assert not any(codes), codes
            rows += json.loads(Path(folder, "rows.json").read_text())
    return rows


def run_rank(rank: int, world_size: int, folder: Path, rounds: int, overrides: list[str]) -> None:
    """All cases on one rank; rank 0 writes the rows into `folder`."""
    torch.set_num_threads(1)
    cpu, group = torch.device("cpu"), Group(RankInfo(), torch.device("cpu"))
    if world_size > 1:
        rank_info = RankInfo(rank, rank, world_size, world_size)
        group = init_group(rank_info, cpu, "auto", "gloo", f"file://{folder}/store", 60.0)
    rows = []
    for name in CASES:
        rows.append(measure(name, group, rounds, overrides))
        if group.is_main:
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if group.is_main:
        (folder / "rows.json").write_text(json.dumps(rows))
    os._exit(0)  # threads of gloo may abort a normal exit


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | ranks | clock | train() | bare | same arithmetic | added to bare | added to same | goal |"]
    lines += ["|---|---:|---|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        for clock in ("wall", "cpu"):
            us = row[f"{clock}_us"]
            added = [
                "{median:.0f} ({low:.0f} to {high:.0f}), fastest {least:.0f}".format(**us[label])
                for label in ("added", "added_to_same")
            ]
            numbers = [f"{us[label]:.0f}" for label in ("train", "bare", "same_arithmetic")]
            goal = GOALS_US.get((row["model"], row["ranks"]))
            added.append(f"<= {goal}" if goal else "")
            lines.append(f"| {' | '.join([row['model'], str(row['ranks']), clock, *numbers, *added])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the config, such as log.grad_norm=report")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of blocks for each model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    for option in ("--rank", "--world-size", "--folder"):  # of the processes that `run` starts
        parser.add_argument(option, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.rank is not None:
        ranks = int(arguments.rank), int(arguments.world_size)
        run_rank(*ranks, Path(arguments.folder), arguments.rounds, arguments.overrides)
    print(f"torch {torch.__version__}, microseconds of a step: median (quartiles) of {arguments.rounds} pairs\n")
    print(table(run(arguments.rounds, tuple(arguments.overrides), tuple(arguments.ranks))))


if __name__ == "__main__":
    main()
