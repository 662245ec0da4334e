"""`tools/train.py`: train on a dataset, or from a config."""

import argparse
import os
import shlex
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import add_rank_options, run_on_ranks
from imagenet_cls.commands.own_data import load_config_or_data
from imagenet_cls.config.keys import sections, value_types
from imagenet_cls.config.load import DEMO, LoadedConfig
from imagenet_cls.config.schema import Kwargs
from imagenet_cls.engine.run_folder import RunFolder, RunOptions
from imagenet_cls.errors import CheckpointError, DataError, DownloadError, UsageError
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.text import command_line, is_called_from_python

if TYPE_CHECKING:
    from imagenet_cls.parallel.process_group import RankContext


def train_command(argv: Sequence[str]) -> int:
    """Train from a config, on one rank or many. Returns the exit code."""
    return run_on_ranks(
        "train", train_command, train_parser(), argv, load_for_training, train_on_rank, True
    )


def train_on_rank(
    arguments: argparse.Namespace, loaded: LoadedConfig, context: "RankContext"
) -> None:
    """One rank's part of a training."""
    from imagenet_cls.engine.component_checks import check_on_all_ranks
    from imagenet_cls.engine.run_training import run_training

    check_on_all_ranks(loaded, context, training=True)
    if context.is_main:  # before a download, which may fail
        for note in loaded.notes:
            print(note, flush=True)
    try:
        run_training(replace(loaded, notes=[]), run_options(arguments, loaded), context)
    except DownloadError as error:
        added = {"model.pretrained": "false"}
        if loaded.data is not None:
            added = {"model": "resnet18", **added, "size": "128"}
        given = {word.partition("=")[0] for word in arguments.argv}
        words = [f"{key}={value}" for key, value in added.items() if key not in given]
        command = f"{command_line('train')} {shlex.join([*arguments.argv, *words])}"
        if is_called_from_python():
            command = "train(..., {'model.pretrained': False}, model='resnet18', size=128)"
        faster = "" if context.device.type == "cuda" else " (faster with size=64 epochs=10)"
        remedy = f"{error.remedy}\nOr train from random weights{faster}: {command}"
        with_command = DownloadError(error.problem, remedy)
        with_command.printed_elsewhere = error.printed_elsewhere
        raise with_command from error


def train_parser() -> argparse.ArgumentParser:
    parser = cli.build_parser(
        "train",
        "Train an image classifier on a dataset (class folders, an archive or a list of images), "
        "or from a config. Without either: the demo, on real handwritten digits. Beside a data "
        "set, these short keys are allowed: model, epochs, size, lr.",
        "[CONFIG | DATA] [key=value ...] [options]",
    )
    cli.add_config_arguments(parser)
    run = parser.add_argument_group("the run folder")
    run.add_argument(
        "--work-dir",
        type=cli.not_empty,
        metavar="DIR",
        help="where the run writes (default: work_dirs/<config name>)",
    )
    run.add_argument(
        "--resume",
        action="store_true",
        help="resume from the newest complete checkpoint of the run folder, or start from scratch "
        "if it has none; `--resume auto` is the same",
    )
    run.add_argument(
        "--resume-from",
        type=cli.not_empty,
        metavar="CKPT",
        help="resume from this checkpoint: weights, optimizer and step; with --resume only if the "
        "folder has none",
    )
    run.add_argument(
        "--overwrite",
        action="store_true",
        help="remove the run in the folder and start from scratch",
    )
    run.add_argument(
        "--allow-change",
        type=allowed_key,
        metavar="KEY",
        action="append",
        default=[],
        help="allow this key (or section) of the config to differ from the checkpoint's; may be "
        "repeated",
    )
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the plan, try one batch; create no run folder",
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="the same as device=DEVICE; 0 is the first GPU"
    )
    parser.add_argument("--syncbn", action="store_true", help="the same as parallel.sync_bn=true")
    add_rank_options(parser)
    return parser


def load_run(argv: Sequence[str]) -> tuple[LoadedConfig, Path]:
    """The config and the folder of a run with these arguments. Raises as `load_for_training`."""
    arguments = cli.parse(train_parser(), argv)
    loaded = load_for_training(arguments)
    return loaded, run_options(arguments, loaded).work_dir


def load_for_training(arguments: argparse.Namespace) -> LoadedConfig:
    """Load and check the config, without importing torch. Of a dataset in its place the files are
    listed, and the config follows from them.
    """
    # Rank 0 checks in `run_training`, and may create the run folder before another rank is here.
    check: Callable[[LoadedConfig], None] = lambda loaded: None  # noqa: E731
    if arguments.checks_files:
        check = partial(check_files, arguments)
    overrides, sources = cli.split_overrides(arguments, ["one config or dataset"])
    if arguments.device is not None:
        overrides.append(f"device={arguments.device}")
    if arguments.syncbn:
        overrides.append("parallel.sync_bn=true")
    if not sources and arguments.resume_from is not None:
        raise UsageError(
            f"The checkpoint {arguments.resume_from} is given without a config or dataset.",
            "Give the config or dataset of its run, too.",
        )
    source = sources[0] if sources else str(DEMO)
    loaded = load_config_or_data(source, overrides, check)
    data = loaded.config.data
    is_missing = data.name in ("folder", "list") and not Path(data.root).expanduser().exists()
    if is_missing and Path(source).is_dir():
        raise DataError(
            f"{source} was taken for the config of that name, and its data.root={data.root} does "
            "not exist.",
            f"For the folder, write ./{source}",
        )
    if loaded.data is None:
        check(loaded)
    return loaded


def check_files(arguments: argparse.Namespace, loaded: LoadedConfig) -> None:
    """Raise a UserError if data is missing. On the first machine also if initial weights are
    missing, or the run folder can't be used.
    """
    from imagenet_cls.data.paths import check_paths

    check_paths(loaded.config.data)
    if arguments.node_rank != 0:
        return
    options = run_options(arguments, loaded)
    needed = {"distill.teacher.checkpoint": loaded.config.distill.teacher.checkpoint}
    if not options.resume and not options.restarted_by:
        needed["model.checkpoint"] = loaded.config.model.checkpoint
        needed["--resume-from"] = arguments.resume_from
    for name, path in needed.items():
        if path is not None and not os.access(path, os.R_OK):
            raise CheckpointError(
                f"{name}: {path} does not exist, or this user may not read it.",
                "Give the path of a file or folder that exists.",
            )
    # After a restart, `open_run_folder` checks the folder.
    if not options.restarted_by:
        RunFolder(options.work_dir).check_usable(loaded.config, options)


def allowed_key(key: str) -> str:
    """An argparse type: a key or section of a config, a key below a section's `kwargs`, or
    `data.files`: the sizes of the training files.
    """
    known = {**sections(), **value_types(), "data.files": str}
    below_kwargs = any(
        key.startswith(f"{name}.") and hint == Kwargs for name, hint in known.items()
    )
    if key not in known and not below_kwargs:
        raise argparse.ArgumentTypeError(
            f"no key {key!r}{did_you_mean(key, known)}; see docs/config.md"
        )
    return key


def run_options(arguments: argparse.Namespace, loaded: LoadedConfig) -> RunOptions:
    """The options of a run from the command line and the environment.

    torchrun restarts its ranks with the same command after a failure, and SLURM restarts a requeued
    job; torchrun may run inside a SLURM job. torchrun is identified by its process: its run id is
    often the same for several jobs.
    """
    launchers = {}  # their names, by the variable that counts their restarts
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        launchers["TORCHELASTIC_RESTART_COUNT"] = f"ranks of {process_identity(os.getppid())}"
    if "SLURM_JOB_ID" in os.environ:
        launchers["SLURM_RESTART_COUNT"] = f"SLURM's job {os.environ['SLURM_JOB_ID']}"
    work_dir = f"work_dirs/{loaded.name}" if arguments.work_dir is None else arguments.work_dir
    resume_from = None
    if arguments.resume_from is not None:
        resume_from = Path(arguments.resume_from)
    return RunOptions(
        work_dir=Path(work_dir),
        resume=arguments.resume,
        resume_from=resume_from,
        overwrite=arguments.overwrite,
        allow_change=tuple(arguments.allow_change),
        dry_run=arguments.dry_run,
        launchers=tuple(launchers.values()),
        restarted_by=tuple(
            launcher
            for restart_count, launcher in launchers.items()
            if os.environ.get(restart_count, "0") != "0"
        ),
    )


def process_identity(pid: int) -> str:
    """Process id, host and start time (from /proc, in clock ticks since boot), since containers
    reuse process ids.
    """
    try:
        start_time = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        start_time = "unknown"
    return f"process {pid} on {socket.gethostname()}, started at {start_time}"
