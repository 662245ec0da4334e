"""`tools/train.py`: train from a config."""

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands import program
from imagenet_cls.commands.distributed import RankCommand, add_rank_options, run_command
from imagenet_cls.config.keys import is_kwargs, leaves, sections
from imagenet_cls.config.load import Loaded, load_config
from imagenet_cls.errors import UsageError
from imagenet_cls.lookup import did_you_mean

if TYPE_CHECKING:
    from imagenet_cls.engine.run_folder import RunOptions
    from imagenet_cls.parallel.process_group import Group


def main() -> None:
    """`tools/train.py`."""
    program.main(train_command)


def train_command(argv: Sequence[str]) -> int:
    """Train from a config, on one rank or many. Returns the exit code."""
    command = RankCommand("train.py", train_parser, load_for_training, check_work_dir, train_here)
    return run_command(command, argv)


def train_parser() -> argparse.ArgumentParser:
    parser = program.build_parser(
        "train.py",
        "Train an image classifier from a config. Without one: the demo, on real handwritten digits.",
        "[CONFIG] [key=value ...] [options]",
    )
    program.add_config_arguments(parser)
    run = parser.add_argument_group("the run folder")
    run.add_argument("--work-dir", metavar="DIR", help="where the run writes (default: work_dirs/<config name>)")
    run.add_argument(
        "--resume", action="store_true", help="resume from the newest whole checkpoint; from scratch if there is none"
    )
    run.add_argument(
        "--resume-from", metavar="CKPT",
        help="resume from this checkpoint: weights, optimizer and step; with --resume only if the folder has none",
    )  # fmt: skip
    run.add_argument("--overwrite", action="store_true", help="remove the run in the folder and start from scratch")
    run.add_argument(
        "--allow-change", metavar="KEY", action="append", default=[],
        help="allow this key (or section) of the config to differ from the checkpoint's; may be repeated",
    )  # fmt: skip
    run.add_argument(
        "--dry-run", action="store_true", help="check everything, print the plan, try one batch; write nothing"
    )
    add_rank_options(parser)
    parser.add_argument("--syncbn", action="store_true", help="the same as parallel.sync_bn=true")
    return parser


def load_for_training(arguments: argparse.Namespace) -> Loaded:
    """Load the config and check its keys and values (stage 1 of the checks). Does not import torch."""
    overrides, configs = program.split_overrides(arguments, ["one config"])
    if arguments.syncbn:
        overrides.append("parallel.sync_bn=true")
    for key in arguments.allow_change:
        check_allowed_key(key)
    return load_config(configs[0] if configs else None, overrides)


def check_allowed_key(key: str) -> None:
    """Raise UsageError for a key that is no key or section of a config, and not below a section's `kwargs`."""
    known = {".".join(path): hint for path, hint in {**sections(), **leaves()}.items() if path}
    below_kwargs = any(key.startswith(f"{name}.") and is_kwargs(hint) for name, hint in known.items())
    if key not in known and not below_kwargs:
        raise UsageError(f"--allow-change {key}: no such key{did_you_mean(key, known)}\nSee docs/config.md.")


def run_options(arguments: argparse.Namespace, loaded: Loaded) -> "RunOptions":
    """The options of a run from the command line and the environment.

    torchrun restarts its ranks with the same command after a failure, and SLURM restarts a requeued job. Both may
    apply, because torchrun may run inside a SLURM job. torchrun is identified by its process, because its run id is
    often the same for several jobs.
    """
    from imagenet_cls.engine.run_folder import RunOptions

    jobs = {}
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        jobs["TORCHELASTIC_RESTART_COUNT"] = f"ranks of {process_name(os.getppid())}"
    if "SLURM_JOB_ID" in os.environ:
        jobs["SLURM_RESTART_COUNT"] = f"SLURM's job {os.environ['SLURM_JOB_ID']}"
    return RunOptions(
        work_dir=Path(arguments.work_dir or Path("work_dirs") / loaded.name),
        resume=arguments.resume,
        resume_from=Path(arguments.resume_from) if arguments.resume_from else None,
        overwrite=arguments.overwrite,
        allow_change=tuple(arguments.allow_change),
        dry_run=arguments.dry_run,
        jobs=tuple(jobs.values()),
        restarted_by=tuple(job for count, job in jobs.items() if os.environ.get(count, "0") != "0"),
    )


def process_name(pid: int) -> str:
    """Process id, host and start time (from /proc, in clock ticks since boot), since containers reuse process ids."""
    try:
        since = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        since = "unknown"
    return f"process {pid} on {socket.gethostname()}, started at {since}"


def check_work_dir(arguments: argparse.Namespace, loaded: Loaded) -> None:
    from imagenet_cls.engine.run_folder import RunFolder, starts_from

    options = run_options(arguments, loaded)
    if not options.dry_run and not options.restarted_by:  # after a restart, `open_run_folder` makes these checks
        folder = RunFolder(options.work_dir)
        folder.check_free(options.resume, options.overwrite)
        if options.overwrite:
            folder.check_removable(starts_from(loaded.config, options))


def train_here(arguments: argparse.Namespace, loaded: Loaded, group: "Group") -> None:
    """One rank's part of a training run."""
    from imagenet_cls.engine.run import train_run
    from imagenet_cls.engine.start import check_agreement

    check_agreement(loaded, group, training=True)
    train_run(loaded, run_options(arguments, loaded), group)
