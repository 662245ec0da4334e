"""`tools/compare_parallel.py`: train the same few steps in several parallel modes and print a table of the differences.

Each row is a real run of `tools/train.py` in a temporary run folder.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from imagenet_cls.commands import program
from imagenet_cls.commands.distributed import TOOLS
from imagenet_cls.config.load import Loaded, load_config
from imagenet_cls.config.origin import format_problems
from imagenet_cls.engine.plan import accumulation_for, batch_problem
from imagenet_cls.errors import ConfigError, UsageError, UserError
from imagenet_cls.interrupts import raise_interrupts
from imagenet_cls.parallel.environment import find_rank_info
from imagenet_cls.report.jsonl import read_metrics

if TYPE_CHECKING:
    from torch import Tensor

# What is trained without a CONFIG: the demo's digits, by a small ResNet with BatchNorm and smooth activations. With
# ReLU and max pooling a rounding error of 1e-7 grows to 1e-2 in four steps, and all rows would differ by that much.
DEMO_SETTINGS = {
    "model.name": "resnet10t",
    "model.kwargs.act_layer": "silu",
    "model.kwargs.replace_stem_pool": "true",
    "data.num_workers": "0",
    "optimizer.lr": "0.02",
    "schedule.warmup_epochs": "0",
    "ema.decay": "null",
    "train.precision": "fp32",
}
SHORT_RUN = {"train.max_steps": "12", "log.every_steps": "4", "log.tensorboard": "false"}  # defaults for every config
ROW_KEYS = ("parallel.mode", "parallel.device_ids", "parallel.output_device", "parallel.sync_bn")

_STOP_SEC = 30.0  # for a run to save and end after SIGTERM


@dataclass(frozen=True)
class Mode:
    """A row of the table: overrides and options for train.py.

    images_at_once: in one forward pass, which BatchNorm normalises together. missing: why the mode can't run here, or
    "".
    """

    name: str
    overrides: Sequence[str]
    options: Sequence[str]
    images_at_once: int
    use: str
    missing: str = ""


def main() -> None:
    """`tools/compare_parallel.py`."""
    program.main(compare_command)


def compare_command(argv: Sequence[str]) -> None:
    """Run all modes and print the table. Raises UserError, also with the message and exit code of a run that failed."""
    parser = program.build_parser(
        "compare_parallel.py",
        "Train the same few steps in one process, under DP and under DDP, and show what differs.",
        "[CONFIG] [key=value ...] [--ranks N]",
        epilog="Each run ends with an evaluation, so a CONFIG's validation images should be few.",
    )
    program.add_config_arguments(parser)
    parser.add_argument(
        "--ranks", type=program.positive, default=2, metavar="N", help="processes, or GPUs of DP (default: %(default)s)"
    )
    arguments = parser.parse_intermixed_args(argv)
    given, configs = program.split_overrides(arguments, ["one config"])
    overrides = add_defaults(given, SHORT_RUN if configs else DEMO_SETTINGS | SHORT_RUN)
    modes = plan_modes(configs, overrides, arguments.ranks)
    raise_interrupts()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left behind
    with tempfile.TemporaryDirectory(prefix="imagenet-cls-", ignore_cleanup_errors=True) as folder:
        outcomes = []
        for number, mode in enumerate(modes, start=1):
            print(f"{number} of {len(modes)}: {mode.name}{mode.missing and ': ' + mode.missing}", file=sys.stderr)
            command_line = [*configs, *replace_overrides(overrides, mode.overrides), *mode.options]
            outcomes.append(
                None if mode.missing else read_outcome(run(mode.name, command_line, Path(folder, str(number))))
            )
    print(table(modes, outcomes), notes(outcomes), sep="\n\n")


def add_defaults(overrides: Sequence[str], defaults: Mapping[str, str]) -> list[str]:
    """Overrides with those defaults that none of them overlaps. Raises UsageError for a key that the rows set."""
    keys = [override.partition("=")[0] for override in overrides]
    for key, override in zip(keys, overrides, strict=True):
        if any(_overlap(key, row_key) for row_key in ROW_KEYS):
            raise UsageError(f"{override}: each row of the table sets this key itself.\nLeave it out.")
    # A new name resets its section, so that defaults for another model don't apply.
    renamed = tuple(key.removesuffix("name") for key in keys if key.endswith(".name"))
    kept = {key: value for key, value in defaults.items() if not any(_overlap(key, other) for other in keys)}
    return [*(f"{key}={value}" for key, value in kept.items() if not key.startswith(renamed)), *overrides]


def replace_overrides(overrides: Sequence[str], new: Sequence[str]) -> list[str]:
    """Overrides with `new` ones, which replace those of the same keys."""
    keys = {override.partition("=")[0] for override in new}
    return [*(override for override in overrides if override.partition("=")[0] not in keys), *new]


def _overlap(key: str, other: str) -> bool:
    """Whether one of two dotted keys is the other or a part of it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def plan_modes(configs: Sequence[str], overrides: Sequence[str], ranks: int) -> list[Mode]:
    """The rows, in order; the others are compared with the first. Raises ConfigError or UsageError for any row."""
    if ranks < 2:
        raise UsageError("--ranks 1: there is nothing to compare.\nAsk for two ranks or more.")
    if find_rank_info(os.environ) is not None:
        raise UsageError("this process is a rank of a launcher.\nStart the tool without one: it starts its own ranks.")
    loaded = load_config(configs[0] if configs else None, overrides)
    if problem := batch_problem(loaded.config.train, ranks):
        raise ConfigError(format_problems([problem], loaded.origins))
    batch, limit = loaded.config.train.global_batch_size, loaded.config.train.micro_batch_size

    def micro_batch(devices: int, limit: int | None) -> int:
        return batch // devices // accumulation_for(batch, devices, limit)

    share = micro_batch(ranks, limit)
    if share == 1:
        raise UsageError(f"{batch} images on {ranks} ranks are too few to accumulate gradients.\nGive a larger batch.")
    part = micro_batch(ranks, share // 2)

    from imagenet_cls.parallel.launch import check_gpu_count

    check_gpu_count(ranks, loaded.config.device)
    none, spawn, torchrun = (["--launcher", name] for name in ("none", "spawn", "pytorch"))
    gpus = ["--gpus", str(ranks)]
    dp = ["parallel.mode=dp", f"parallel.device_ids={list(range(ranks))}"]
    ddp = ["parallel.mode=ddp"]
    modes = [
        Mode("one process", ["parallel.mode=none"], none, micro_batch(1, limit), "one GPU, or a first look"),
        Mode(f"DP, {ranks} GPUs", dp, none, share, "old scripts: no launcher, but slower",
             missing_for_dp(loaded, ranks)),
        Mode("DDP by spawn", ddp, [*spawn, *gpus], share, "all GPUs of a machine, without a launcher"),
        Mode("DDP by torchrun", ddp, [*torchrun, *gpus], share, "one machine or many; can restart"),
        Mode(f"DDP, {batch // ranks // part} accumulation steps", [*ddp, f"train.micro_batch_size={part}"],
             [*spawn, *gpus], part, "a batch that the GPUs can't hold"),
        Mode("DDP with SyncBN", [*ddp, "parallel.sync_bn=true"], [*spawn, *gpus], share * ranks,
             "BatchNorm with few images on each GPU"),
    ]  # fmt: skip
    for mode in modes:
        if not mode.missing:
            load_config(configs[0] if configs else None, replace_overrides(overrides, mode.overrides))
    return modes


def missing_for_dp(loaded: Loaded, gpus: int) -> str:
    """Why DataParallel can't run here, or "". It needs GPUs: on a CPU torch calls the module itself."""
    import torch

    if loaded.config.train.compile:
        return "not with train.compile"
    present = 0 if loaded.config.device == "cpu" else torch.cuda.device_count()
    return "" if present >= gpus else f"needs {gpus} GPUs, and there are {present}"


def run(name: str, arguments: Sequence[str], folder: Path) -> Path:
    """Run train.py with these arguments in a process; return the run folder. Raises UserError where it fails."""
    folder.mkdir()
    command = [sys.executable, str(TOOLS / "train.py"), *arguments, "--work-dir", str(folder / "run")]
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C or SIGTERM: end the run, and its ranks with it
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SEC)
            raise
        finally:
            process.kill()
            process.wait()
    if code != 0:
        lines = (folder / "stderr").read_text(errors="replace").strip().splitlines() or ["no message"]
        error = UserError(f"{name}: " + "\n".join(lines[-1:] if code == 1 else lines))  # the last line of a traceback
        error.exit_code = 128 - code if code < 0 else code
        raise error
    return folder / "run"


@dataclass(frozen=True)
class Outcome:
    """A run's results. losses: of every step. images_per_sec: of all ranks together. memory_mib: rank 0's peak."""

    losses: list[float]
    weights: "dict[str, Tensor]"
    images_per_sec: float
    memory_mib: float


def read_outcome(run_folder: Path) -> Outcome:
    """A finished run's results. The first logging interval, which includes one-time work, does not count as speed."""
    from imagenet_cls.checkpoint.select import load_newest_in

    steps = [record for record in read_metrics(run_folder / "metrics.jsonl") if record["kind"] == "train"]
    intervals = [record for record in steps if "images_per_sec" in record]
    return Outcome(
        losses=[record["loss"] for record in steps],
        weights=load_newest_in(run_folder)[0].model,
        images_per_sec=median(record["images_per_sec"] for record in intervals[1:] or intervals),
        memory_mib=intervals[-1]["memory_mib"],
    )


def loss_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest absolute difference of two runs' losses, step by step; NaN where a loss is."""
    return float(np.abs(np.subtract(one, other)).max())


def weight_difference(one: "Mapping[str, Tensor]", other: "Mapping[str, Tensor]") -> float:
    """The largest absolute difference of any weight; BatchNorm's running statistics are not weights."""
    differences = [
        (one[name].double() - other[name].double()).abs().max().item()
        for name in one
        if not is_statistic(name) and one[name].is_floating_point() and one[name].numel()
    ]
    return float(np.max(differences))


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def table(modes: Sequence[Mode], outcomes: Sequence[Outcome | None]) -> str:
    """Aligned text, a line for each mode. The others are compared with the first."""
    one = outcomes[0]
    assert one is not None
    rows = [["", "at once", "first loss", "losses", "weights", "img/s", "MiB", "good for"]]
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
        speed, memory = f"{outcome.images_per_sec:.0f}", f"{outcome.memory_mib:.0f}"
        rows.append([mode.name, str(mode.images_at_once), *texts, speed, memory, mode.use])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, use in rows:
        aligned = [text.rjust(width) for text, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned, use]))
    return "\n".join(lines)


def notes(outcomes: Sequence[Outcome | None]) -> str:
    """What the columns are, and why the numbers differ."""
    one = outcomes[0]
    assert one is not None
    paragraphs = [
        "at once: images in one forward pass of one device. The global batch is the same in every row.",
        "first loss, losses, weights: the largest difference from one process, in the first step, in any of the "
        f"{len(one.losses)} steps, and in any weight after the last. Rounding errors grow from step to step: slowly in "
        "a smooth network, up to a hundredfold with ReLU or max pooling; there, look at the first loss. Dropout and "
        "mixing draw for each rank.",
        "img/s: of all ranks together. On a CPU they share its cores, so more ranks are no faster.",
        "MiB: rank 0's peak, of GPU memory or else of the whole process.",
        "BatchNorm normalises the images of one forward pass together, so a row with fewer at once has other losses "
        "from the first step on, and that is correct. SyncBN takes the images of all ranks together, as one process "
        "does, and only rounding is left."
        if any(map(is_statistic, one.weights))
        else "This model has no BatchNorm: the split of a batch makes no difference, and only rounding is left.",
    ]
    return "\n".join(textwrap.fill(text, 110, subsequent_indent="  ") for text in paragraphs)
