"""`tools/compare_parallel.py`: train the same few steps in several parallel modes and compare.

Each row is a real run of `tools/train.py` in a temporary run folder.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import check_is_no_rank, child_command
from imagenet_cls.config.layers import find_config
from imagenet_cls.config.load import DEMO, LoadedConfig, load_config
from imagenet_cls.config.reader import dump_inline
from imagenet_cls.engine.plan import ceil_div, micro_batch_for
from imagenet_cls.errors import UsageError, UserError
from imagenet_cls.parallel.signals import handle_interrupts, set_parent_death_signal
from imagenet_cls.report.jsonl import read_metrics

if TYPE_CHECKING:
    from torch import Tensor

# Settings of every run; overrides have priority.
SHORT_RUN = """\
train: {max_steps: 12}
log: {every_steps: 4, tensorboard: false}
"""
# What is trained without a CONFIG: the demo's digits, by a small ResNet with BatchNorm and smooth
# activations. With ReLU and max pooling a rounding error of 1e-7 grows to 1e-2 in four steps, and
# all rows would differ by that much.
DEMO_RUN = """\
model: {name: resnet10t, kwargs: {act_layer: silu, replace_stem_pool: true}}
data: {num_workers: 0}
optimizer: {lr: 0.02}
schedule: {warmup_epochs: 0}
ema: {decay: null}
train: {max_steps: 12, precision: fp32}
log: {every_steps: 4, tensorboard: false}
"""
NOTES = """\
images/forward: images that BatchNorm normalizes together. A row with fewer has other losses from
  the first step on, and that is correct.
first loss diff, max loss diff, weight diff: the largest differences from the run in one process.
img/s: of all ranks. MiB: the peak of rank 0. See docs/parallel.md."""


@dataclass(frozen=True)
class Mode:
    """A row of the table. arguments: of train.py. missing: why the mode can't run here, or ""."""

    name: str
    arguments: Sequence[str]
    images_per_forward: int
    use: str
    missing: str = ""


def compare_command(argv: Sequence[str]) -> None:
    """Run all modes and print the table. Raises UserError, also with the message and exit code of a
    run that failed.
    """
    parser = cli.build_parser(
        "compare-parallel",
        "Train the same few steps in one process, under DP and under DDP, and show what differs.",
        "[CONFIG] [key=value ...] [--ranks N]",
        epilog="Each run ends with an evaluation, so a CONFIG's validation images should be few.",
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=cli.num_ranks,
        default=2,
        metavar="N",
        help="processes, or GPUs of DP (default: %(default)s)",
    )
    arguments = cli.parse(parser, argv)
    overrides, configs = cli.split_overrides(arguments, ["one config"])
    handle_interrupts(signal.default_int_handler)
    # so that nothing is left behind
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="imagenet-cls-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        outcomes: list[Outcome | None] = []
        config = write_config(folder / "compare.yaml", configs[0] if configs else None)
        modes = plan_modes(config, overrides, arguments.ranks)
        for number, mode in enumerate(modes, start=1):
            text = ": ".join(filter(None, [mode.name, mode.missing]))
            print(f"{number} of {len(modes)}: {text}", file=sys.stderr)
            outcome = None
            if not mode.missing:
                # the last of two equal keys counts
                run_arguments = [config, *overrides, *mode.arguments]
                outcome = read_outcome(run(mode.name, run_arguments, folder / str(number)))
            outcomes.append(outcome)
    print(table(modes, outcomes), NOTES, sep="\n\n")


def write_config(path: Path, config: str | None) -> str:
    """Write the config of all runs, which is based on `config` or the demo's. Returns its path."""
    base = DEMO
    settings = DEMO_RUN
    if config is not None:
        base = find_config(config).resolve()
        settings = SHORT_RUN
    path.write_text(f"_base_: {dump_inline([str(base)])}\n{settings}")
    return str(path)


def plan_modes(config: str, overrides: Sequence[str], ranks: int) -> list[Mode]:
    """The rows, in order; the others are compared with the first. Raises UserError."""
    import torch

    if ranks < 2:
        raise UsageError("--ranks 1: there is nothing to compare.", "Ask for two ranks or more.")
    check_is_no_rank()
    loaded = load_config(config, overrides)
    present = torch.cuda.device_count()
    if loaded.config.device != "cpu" and 0 < present < ranks:
        raise UsageError(
            f"{ranks} ranks need as many GPUs, and there are {present}.",
            "Give device=cpu, or fewer --ranks.",
        )
    batch = loaded.config.train.global_batch_size
    limit = loaded.config.train.micro_batch_size
    share = micro_batch_for(batch, ranks, limit)
    if batch < 2 * ranks or share < 2:
        raise UsageError(
            f"{batch} images on {ranks} ranks are too few to accumulate gradients.",
            "Give a larger batch.",
        )
    part = micro_batch_for(batch, ranks, share // 2)
    accumulation = ceil_div(batch, ranks * part)
    on_all_ranks = ceil_div(batch, ceil_div(batch, ranks * share))
    none = ["--launcher", "none"]
    spawn = ["--launcher", "spawn", "--gpus", str(ranks), "parallel.mode=ddp"]
    torchrun = ["--launcher", "pytorch", "--gpus", str(ranks), "parallel.mode=ddp"]
    dp_share = micro_batch_for(batch, ranks, limit, equal=True)
    dp = [*none, "parallel.mode=dp", f"parallel.device_ids={list(range(ranks))}"]
    accumulated = [*spawn, f"train.micro_batch_size={part}"]
    sync_bn = [*spawn, "parallel.sync_bn=true"]
    why_no_dp = missing_for_dp(loaded, ranks)
    return [
        Mode(
            "one process",
            [*none, "parallel.mode=none"],
            micro_batch_for(batch, 1, limit),
            "one GPU, debugging",
        ),
        Mode(f"DP, {ranks} GPUs", dp, dp_share, "old scripts: no launcher, but slower", why_no_dp),
        Mode("DDP by spawn", spawn, share, "all GPUs of a machine, without a launcher"),
        Mode("DDP by torchrun", torchrun, share, "one machine or many; can restart"),
        Mode(
            f"DDP, {accumulation} accumulation steps",
            accumulated,
            part,
            "a batch that the GPUs can't hold",
        ),
        Mode("DDP with SyncBN", sync_bn, on_all_ranks, "BatchNorm with few images on each GPU"),
    ]


def missing_for_dp(loaded: LoadedConfig, gpus: int) -> str:
    """Why DataParallel can't run here, or ""."""
    import torch

    if loaded.config.train.compile:
        return "not with train.compile"
    if loaded.config.train.global_batch_size % gpus:
        return "needs equal shares"
    present = 0 if loaded.config.device == "cpu" else torch.cuda.device_count()
    return "" if present >= gpus else f"needs {gpus} GPUs, and there are {present}"


def run(name: str, arguments: Sequence[str], folder: Path) -> Path:
    """Run train.py with these arguments in a process; return the run folder. Raises UserError if it
    fails.
    """
    folder.mkdir()
    command = [*child_command("train"), *arguments, "--work-dir", str(folder / "run")]
    done = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=set_parent_death_signal,
    )
    if code := done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {code}, without a message"]
        *problem, remedy = lines[-2:]
        error = UserError(": ".join([name, *problem]), remedy)
        error.exit_code = 128 - code if code < 0 else code
        raise error
    return folder / "run"


@dataclass(frozen=True)
class Outcome:
    """The results of a run. losses: the losses of every step. images_per_sec: the speed of all
    ranks together. memory_mib: rank 0's peak.
    """

    losses: list[float]
    weights: "dict[str, Tensor]"
    images_per_sec: float
    memory_mib: float


def read_outcome(run_folder: Path) -> Outcome:
    """A finished run's results. The first logging interval, which includes one-time work, does not
    count as speed.
    """
    from imagenet_cls.checkpoint.select import load_newest

    steps = [record for record in read_metrics(run_folder) if record["kind"] == "train"]
    intervals = [record for record in steps if "images_per_sec" in record]
    return Outcome(
        losses=[record["loss"] for record in steps],
        weights=load_newest(run_folder)[0].model,
        images_per_sec=median(record["images_per_sec"] for record in intervals[1:] or intervals),
        memory_mib=intervals[-1]["memory_mib"],
    )


def loss_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest absolute difference of two runs' losses, step by step; NaN where a loss is."""
    return float(np.abs(np.subtract(one, other)).max())


def weight_difference(one: "Mapping[str, Tensor]", other: "Mapping[str, Tensor]") -> float:
    """The largest absolute difference of any weight; BatchNorm's running statistics are not
    weights.
    """
    differences = [
        (one[name].double() - other[name].double()).abs().max().item()
        for name in one
        if not name.endswith(("running_mean", "running_var"))
        and one[name].is_floating_point()
        and one[name].numel()
    ]
    return float(np.max(differences))


def table(modes: Sequence[Mode], outcomes: Sequence[Outcome | None]) -> str:
    """Aligned text, a line for each mode. The others are compared with the first."""
    one = outcomes[0]
    assert one is not None
    rows = [
        [
            "",
            "images/forward",
            "first loss diff",
            "max loss diff",
            "weight diff",
            "img/s",
            "MiB",
            "use for",
        ]
    ]
    for mode, outcome in zip(modes, outcomes, strict=True):
        if outcome is None:
            rows.append([mode.name, *["-"] * 6, f"not run: {mode.missing}"])
            continue
        differences = [
            loss_difference(outcome.losses[:1], one.losses[:1]),
            loss_difference(outcome.losses, one.losses),
            weight_difference(outcome.weights, one.weights),
        ]
        texts = ["-"] * 3 if outcome is one else [f"{difference:.1e}" for difference in differences]
        texts += [f"{outcome.images_per_sec:.0f}", f"{outcome.memory_mib:.0f}"]
        rows.append([mode.name, str(mode.images_per_forward), *texts, mode.use])
    return cli.format_columns(rows)
