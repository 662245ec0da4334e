"""`tools/sweep.py`: train a grid of settings, seeds or folds, and compare them.

Each run is a process of `train` with its own run folder, in the folder of the sweep.
"""

import argparse
import os
import shlex
import signal
import time
from collections.abc import Sequence

from imagenet_cls.commands import cli
from imagenet_cls.commands.child import Child
from imagenet_cls.commands.distributed import check_is_no_rank
from imagenet_cls.errors import Stopped, UsageError, UserError
from imagenet_cls.extras.sweep.plan import SweepRun, load_grid
from imagenet_cls.extras.sweep.results import finished_progress, show_results
from imagenet_cls.files import check_replaced, explain_write_errors, take_lock
from imagenet_cls.parallel.signals import handle_stop_signals
from imagenet_cls.text import command_line, join_names

# Between two polls of the runs.
_POLL_SEC = 1.0


class RunsFailed(UserError):
    """Some runs of a sweep failed."""

    exit_code = 7


def sweep_command(argv: Sequence[str]) -> None:
    """Run the sweep and show its results. Raises RunsFailed if runs fail, Stopped after a stop
    signal, or another UserError.
    """
    arguments = cli.parse(sweep_parser(), argv)
    check_is_no_rank()
    out = arguments.out
    overrides, source = cli.split_overrides(arguments, ["one config or dataset"])
    runs = load_grid(source, overrides, arguments.folds)
    if not (out / ".lock").exists():  # not the folder of an earlier sweep
        check_replaced(out / "table.csv")
    if arguments.table:
        if not any((out / run.name).exists() for run in runs):
            raise UsageError(
                f"{out} has no run of this command.", "Give the command that started the sweep."
            )
        show_results(out, runs)
        return
    for warning in dict.fromkeys(line for run in runs for line in run.warnings):
        print(f"warning: {warning}")
    unfinished = [run for run in runs if finished_progress(out, run) is None]
    if arguments.dry_run:
        for run in unfinished:
            print(command_line("train"), shlex.join(run_arguments(run, arguments)))
        return
    gpus = visible_gpus(arguments, {run.config.device for run in runs})
    with explain_write_errors(out, "Name another folder with --out."):
        out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(out, "Wait for that sweep, or name another folder with --out.")
    with lock:
        failed = train_runs(unfinished, arguments, gpus)
        show_results(out, runs)
    if failed:
        raise RunsFailed(
            f"Failed runs: {join_names(failed)}.",
            f"See {out}/*.log, correct the cause, and start the same command again.",
        )


def sweep_parser() -> argparse.ArgumentParser:
    parser = cli.build_parser(
        "sweep",
        "Train every combination of the values of some keys, each with several seeds or on all "
        "folds; then compare the settings. The same command continues a sweep that was stopped.",
        "[CONFIG | DATA] [key=value,value ...] --out DIR [options]",
    )
    cli.add_config_arguments(parser)
    add = parser.add_argument
    add("--out", type=cli.path, required=True, metavar="DIR", help="the folder of the sweep")
    add(
        "--folds",
        type=cli.number(2),
        metavar="K",
        help="train K runs for each combination, each of which holds out another fold",
    )
    add(
        "--parallel",
        type=cli.positive,
        default=1,
        metavar="N",
        help="runs at a time (default: %(default)s)",
    )
    add(
        "--gpus-per-run",
        type=cli.positive,
        default=1,
        metavar="N",
        help="ranks of a run, on GPUs if there are any (default: %(default)s)",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true", help="check the configs, and print the commands"
    )
    instead.add_argument(
        "--table", action="store_true", help="only show the results so far of the same command"
    )
    return parser


def run_arguments(run: SweepRun, arguments: argparse.Namespace) -> list[str]:
    """The arguments of `train` for a run, which resumes if it has begun."""
    ranks = arguments.gpus_per_run
    options = ["--gpus", str(ranks)] if ranks > 1 else []
    return [*run.arguments, *options, "--work-dir", str(arguments.out / run.name), "--resume"]


def visible_gpus(arguments: argparse.Namespace, devices: set[str]) -> list[str]:
    """The GPUs to divide among the runs, as in CUDA_VISIBLE_DEVICES; none if each run may choose,
    or runs on CPUs. Raises UsageError if they are too few.
    """
    needed = arguments.parallel * arguments.gpus_per_run
    if arguments.parallel == 1 or devices == {"cpu"}:
        return []
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        ids = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        gpus = [gpu for gpu in ids if gpu not in ("", "-1")]  # -1 hides all GPUs
    else:
        import torch

        gpus = [str(number) for number in range(torch.cuda.device_count())]
    if 0 < len(gpus) < needed:
        raise UsageError(
            f"{needed} GPUs are needed, and there are {len(gpus)}.",
            "Give a smaller --parallel or --gpus-per-run, or device=cpu.",
        )
    return gpus


def train_runs(
    runs: Sequence[SweepRun], arguments: argparse.Namespace, gpus: Sequence[str]
) -> list[str]:
    """Train runs, at most `--parallel` at a time. Returns the names of those that failed. Raises
    Stopped. gpus: to be divided among the runs.
    """
    waiting = iter(runs)
    running: dict[int, tuple[SweepRun, Child]] = {}  # by slot
    failed = []
    stop_signals: list[int] = []
    handlers = handle_stop_signals(lambda number, _: stop_signals.append(number))
    try:
        while not stop_signals:
            for slot in range(arguments.parallel):
                if slot not in running and (run := next(waiting, None)):
                    running[slot] = run, start_run(run, slot, arguments, gpus)
                    print(f"{run.name}: started", flush=True)
            if not running:
                break
            time.sleep(_POLL_SEC)
            for slot, (run, process) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[slot]
                outcome = "finished"
                if code:
                    failed.append(run.name)
                    log = arguments.out / f"{run.name}.log"
                    outcome = f"failed with exit code {code}: {log}"
                print(f"{run.name}: {outcome}", flush=True)
    finally:  # also after an error, such as a full disk
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if stop_signals:
        raise Stopped(
            f"The sweep was stopped by {signal.Signals(stop_signals[0]).name}, and its runs have "
            "saved.",
            "The same command continues it.",
            stop_signals[0],
        )
    return failed


def start_run(
    run: SweepRun, slot: int, arguments: argparse.Namespace, gpus: Sequence[str]
) -> Child:
    """Start a run with its share of the CPUs and GPUs."""
    cpus: list[int] = []
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        # Threads and data workers follow from the number of CPUs, which is the same for each slot:
        # the number of threads changes the last bits of a result.
        every = sorted(os.sched_getaffinity(0))
        share = max(1, len(every) // arguments.parallel)
        cpus = every[slot % len(every) :: arguments.parallel][:share]
    env = {}
    if gpus:
        ranks = arguments.gpus_per_run
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * ranks : (slot + 1) * ranks])
    with (arguments.out / f"{run.name}.log").open("ab") as log:
        # Ctrl-C in a terminal reaches the run once, as SIGTERM from here.
        return Child(
            "train", run_arguments(run, arguments), env=env, cpus=cpus, stdout=log, stderr=log
        )
