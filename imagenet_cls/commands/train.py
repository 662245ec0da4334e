"""`tools/train.py`: train from a config."""

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import cli
from imagenet_cls.commands.distributed import (
    RankCommand,
    add_rank_options,
    check_components,
    run_command,
)
from imagenet_cls.config.keys import sections, value_types
from imagenet_cls.config.load import LoadedConfig, load_config
from imagenet_cls.config.schema import Kwargs
from imagenet_cls.engine.run_folder import RunFolder, RunOptions
from imagenet_cls.errors import CheckpointError, UsageError
from imagenet_cls.files import is_url
from imagenet_cls.lookup import did_you_mean

if TYPE_CHECKING:
    from imagenet_cls.parallel.process_group import Group


def train_command(argv: Sequence[str]) -> int:
    """Train from a config, on one rank or many. Returns the exit code."""
    command = RankCommand(
        "train", train_parser, load_for_training, check_files, check_components, train_on_rank
    )
    return run_command(command, argv)


def train_parser() -> argparse.ArgumentParser:
    parser = cli.build_parser(
        "train",
        "Train an image classifier from a config. Without one: the demo, on real handwritten digits.",
        "[CONFIG] [key=value ...] [options]",
    )
    cli.add_config_arguments(parser)
    run = parser.add_argument_group("the run folder")
    run.add_argument(
        "--work-dir", type=cli.not_empty, metavar="DIR",
        help="where the run writes (default: work_dirs/<config name>); auto: a new folder in there, named by the time",
    )  # fmt: skip
    run.add_argument(
        "--resume", type=cli.not_empty, nargs="?", const="auto", metavar="CKPT",
        help="resume from the newest whole checkpoint of the run folder; from scratch if there is none. With a "
        "checkpoint: as --resume-from",
    )  # fmt: skip
    run.add_argument(
        "--resume-from", type=cli.not_empty, metavar="CKPT",
        help="resume from this checkpoint: weights, optimizer and step; with --resume only if the folder has none",
    )  # fmt: skip
    run.add_argument(
        "--overwrite",
        action="store_true",
        help="remove the run in the folder and start from scratch",
    )
    run.add_argument(
        "--allow-change", type=allowed_key, metavar="KEY", action="append", default=[],
        help="allow this key (or section) of the config to differ from the checkpoint's; may be repeated",
    )  # fmt: skip
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the plan, try one batch; create no run folder",
    )
    add_rank_options(parser)
    parser.add_argument("--syncbn", action="store_true", help="the same as parallel.sync_bn=true")
    return parser


def load_for_training(arguments: argparse.Namespace) -> LoadedConfig:
    """Stage 1 of the checks, without torch."""
    if arguments.resume not in (None, "auto"):
        arguments.resume, arguments.resume_from = None, arguments.resume
    if arguments.resume and arguments.work_dir == "auto":
        raise UsageError(
            "--work-dir auto is a new folder, which --resume can't resume.\nName the folder of the run."
        )
    overrides, configs = cli.split_overrides(arguments, ["one config"])
    if arguments.syncbn:
        overrides.append("parallel.sync_bn=true")
    return load_config(configs[0] if configs else None, overrides)


def check_files(arguments: argparse.Namespace, loaded: LoadedConfig) -> None:
    """Raise a UserError for missing data, and on the first machine for weights and run folder."""
    from imagenet_cls.data.lists import check_paths

    check_paths(loaded.config.data, subset=loaded.config.eval.classes == "present")
    needed = {"distill.teacher.checkpoint": loaded.config.distill.teacher.checkpoint}
    restarts = {
        os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    }
    if not arguments.resume and restarts == {"0"}:
        needed["model.checkpoint"] = loaded.config.model.checkpoint
        needed["--resume or --resume-from"] = arguments.resume_from
    for name, path in needed.items() if arguments.node_rank == 0 else ():
        if path is not None and not is_url(path) and not os.access(path, os.R_OK):
            raise CheckpointError(
                f"{name}: {path}: no such file or folder, or no permission\ncorrect the path"
            )
    options = run_options(arguments, loaded)
    # After a restart, `open_run_folder` checks the folder.
    if arguments.node_rank == 0 and not (options.new_folder or options.restarted_by):
        RunFolder(options.work_dir).check_usable(loaded.config, options)


def allowed_key(key: str) -> str:
    """An argparse type: a key or section of a config, or a key below a section's `kwargs`."""
    known = {**sections(), **value_types()}
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

    torchrun restarts its ranks with the same command after a failure, and SLURM restarts a requeued job; torchrun may
    run inside a SLURM job. torchrun is identified by its process: its run id is often the same for several jobs.
    """
    launchers = {}
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        launchers["TORCHELASTIC_RESTART_COUNT"] = f"ranks of {process_identity(os.getppid())}"
    if "SLURM_JOB_ID" in os.environ:
        launchers["SLURM_RESTART_COUNT"] = f"SLURM's job {os.environ['SLURM_JOB_ID']}"
    return RunOptions(
        work_dir=Path(
            f"work_dirs/{loaded.name}"
            if arguments.work_dir in (None, "auto")
            else arguments.work_dir
        ),
        new_folder=arguments.work_dir == "auto",
        resume=arguments.resume is not None,
        resume_from=arguments.resume_from and Path(arguments.resume_from),
        overwrite=arguments.overwrite,
        allow_change=tuple(arguments.allow_change),
        dry_run=arguments.dry_run,
        launchers=tuple(launchers.values()),
        restarted_by=tuple(
            job for count, job in launchers.items() if os.environ.get(count, "0") != "0"
        ),
    )


def process_identity(pid: int) -> str:
    """Process id, host and start time (from /proc, in clock ticks since boot), since containers reuse process ids."""
    try:
        since = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        since = "unknown"
    return f"process {pid} on {socket.gethostname()}, started at {since}"


def train_on_rank(arguments: argparse.Namespace, loaded: LoadedConfig, group: "Group") -> None:
    """One rank's part of a training run."""
    from imagenet_cls.engine.check import check_agreement
    from imagenet_cls.engine.run import run_training

    check_agreement(loaded, group, training=True)
    run_training(loaded, run_options(arguments, loaded), group)
