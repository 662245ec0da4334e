"""`tools/sweep.py`: train a grid of settings, seeds or folds, and compare them.

Each run is a process of `train` with its own run folder, in the folder of the sweep.
"""

import argparse
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from imagenet_cls.checkpoint.folders import list_checkpoints
from imagenet_cls.commands import cli
from imagenet_cls.commands.child import Child
from imagenet_cls.commands.distributed import check_is_no_rank
from imagenet_cls.errors import Stopped, UsageError, UserError
from imagenet_cls.extras.sweep.plan import (
    SweepRun,
    load_grid,
    read_runs,
    write_runs,
)
from imagenet_cls.extras.sweep.results import check_comparable, is_finished, show_results
from imagenet_cls.files import check_replaced, explain_write_errors, is_locked, take_lock
from imagenet_cls.parallel.cpus import cpu_threads
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
    failed = [] if arguments.table else run_sweep(arguments)
    if not arguments.dry_run:
        show_results(arguments.out)
    if failed:
        raise RunsFailed(
            f"Failed runs: {join_names(failed)}.",
            f"See {arguments.out}/*.log, correct the cause, and start the same command again.",
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
    instead.add_argument("--table", action="store_true", help="only show the results so far")
    return parser


def run_sweep(arguments: argparse.Namespace) -> list[str]:
    """Start the runs that are not finished. Returns the names of those that failed."""
    check_is_no_rank()
    out = arguments.out
    overrides, source = cli.split_overrides(arguments, ["one config or dataset"])
    runs, configs = load_grid(out, source, overrides, arguments.folds)
    grid = list(zip(runs, configs, strict=True))
    started = {run.name for run in runs}
    others = [run for run in read_runs(out).values() if run.name not in started]
    check_comparable(out, others, [loaded.config for loaded in configs])
    for warning in dict.fromkeys(line for loaded in configs for line in loaded.warnings):
        print(f"warning: {warning}")

    unfinished = (run for run, loaded in grid if not is_finished(out / run.name, loaded.config))
    if arguments.dry_run:
        for run in unfinished:
            print(command_line("train"), shlex.join(run_arguments(run, arguments)))
        return []
    gpus = visible_gpus(arguments, {loaded.config.device for loaded in configs})
    with explain_write_errors(out, "Name another folder with --out."):
        out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(out, "Wait for that sweep, or name another folder with --out.")
    with lock:
        # Read with the lock, since a sweep that has just ended may have changed them.
        known = read_runs(out)
        if not known:
            for name in ("table.csv", "report.html"):
                check_replaced(out / name)
        for run, loaded in grid:
            folder = out / run.name
            # A run that has begun keeps its arguments in the table: `train` may refuse others.
            has_begun = run.name in known and list_checkpoints(folder / "checkpoints")
            if not has_begun or is_finished(folder, loaded.config):
                known[run.name] = run
        write_runs(out, known.values())
        for name in known:
            if is_locked(out / name):
                raise UsageError(
                    f"{out / name} is in use, perhaps by a run of a killed sweep that is saving.",
                    "Wait for that process; then the same command continues.",
                )
        return Runner(arguments, known, gpus).run(unfinished)


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


class Runner:
    """Starts the runs of a sweep, at most `--parallel` at a time, and waits for them.

    known: all runs of the folder. gpus: to be divided among the runs.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        known: dict[str, SweepRun],
        gpus: Sequence[str],
    ):
        self.arguments = arguments
        self.out: Path = arguments.out
        self.known = known
        self.gpus = gpus
        self.running: dict[int, tuple[SweepRun, subprocess.Popen[bytes]]] = {}  # by slot
        self.failed: list[str] = []
        self.stop_signals: list[int] = []

    def run(self, runs: Iterator[SweepRun]) -> list[str]:
        """Returns the names of the runs that failed. Raises Stopped."""
        handlers = handle_stop_signals(lambda number, _: self.stop_signals.append(number))
        try:
            while not self.stop_signals:
                self.start_runs(runs)
                if not self.running:
                    break
                time.sleep(_POLL_SEC)
                for slot in list(self.running):
                    self.poll(slot)
        finally:  # also after an error, such as a full disk
            for _, process in self.running.values():
                process.terminate()
            for _, process in self.running.values():
                process.wait()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for slot in list(self.running):
            self.poll(slot)
        if self.stop_signals:
            name = signal.Signals(self.stop_signals[0]).name
            raise Stopped(
                f"The sweep was stopped by {name}, and its runs have saved.",
                "The same command continues it.",
                self.stop_signals[0],
            )
        return self.failed

    def start_runs(self, runs: Iterator[SweepRun]) -> None:
        """Start runs in all free slots."""
        for slot in range(self.arguments.parallel):
            if slot in self.running:
                continue
            run = next(runs, None)
            if run is None:
                return
            self.running[slot] = run, self.start(run, slot)
            print(f"{run.name}: started", flush=True)

    def start(self, run: SweepRun, slot: int) -> "subprocess.Popen[bytes]":
        ranks = self.arguments.gpus_per_run
        parallel = self.arguments.parallel
        arguments = run_arguments(run, self.arguments)
        env = {}
        cpus: list[int] = []
        if parallel > 1:
            threads = cpu_threads(parallel * ranks)
            env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
            if hasattr(os, "sched_getaffinity"):  # not on macOS
                # Data workers follow from the number of CPUs, too.
                every = sorted(os.sched_getaffinity(0))
                cpus = every[slot::parallel] or every
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[slot * ranks : (slot + 1) * ranks])
        with self.log(run).open("ab") as log:
            # Ctrl-C in a terminal reaches it once, as SIGTERM from here.
            return Child("train", arguments, env=env, cpus=cpus, stdout=log, stderr=log)

    def poll(self, slot: int) -> None:
        """Record the end of a run."""
        run, process = self.running[slot]
        code = process.poll()
        if code is None:
            return
        del self.running[slot]
        if code == 0:
            self.known[run.name] = run
            write_runs(self.out, self.known.values())
            outcome = "finished"
        elif self.stop_signals:
            outcome = "stopped"
        else:
            self.failed.append(run.name)
            outcome = f"failed with exit code {128 - code if code < 0 else code}: {self.log(run)}"
        print(f"{run.name}: {outcome}", flush=True)

    def log(self, run: SweepRun) -> Path:
        return self.out / f"{run.name}.log"
