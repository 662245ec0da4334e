"""Run a command on one rank or many: start the ranks, join them, and report an error once."""

import argparse
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from traceback import format_exception
from types import TracebackType
from typing import TYPE_CHECKING, Self

from imagenet_cls.commands.child import child_command
from imagenet_cls.commands.cli import number, open_streams, parse, positive
from imagenet_cls.config.load import LoadedConfig, name_origins
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import ResourceError, Stopped, UsageError, UserError, explain_path_error
from imagenet_cls.parallel.cpus import cgroup_cpus, threads_of_rank
from imagenet_cls.parallel.environment import LAUNCHERS, RankInfo, find_rank_info
from imagenet_cls.parallel.exit import (
    RESTART_ADVICE,
    hard_exit,
    print_error,
    report_error,
    requeue_if_slurm,
    write_error_file,
)
from imagenet_cls.parallel.signals import (
    signal_launching_process,
    terminate_with_launching_process,
)
from imagenet_cls.text import first_line, shorten

if TYPE_CHECKING:
    from imagenet_cls.parallel.process_group import RankContext

# A rank whose collective failed waits this long before it reports: the launcher may end it first
# and report the rank that caused it.
_LOST_RANK_WAIT_SEC = 5.0


def check_components(loaded: LoadedConfig, world_size: int | None, training: bool = True) -> None:
    """Check the components that the config names. world_size: None if unknown. Raises
    ConfigError.
    """
    from imagenet_cls.engine.component_checks import config_problems, raise_problems

    raise_problems(config_problems(loaded.config, world_size, training), loaded)


def join_ranks(loaded: LoadedConfig, rank_info: RankInfo) -> "RankContext":
    """Rendezvous with the other ranks. Raises UsageError or ResourceError if it fails."""
    from imagenet_cls.engine.build import data_parallel_devices
    from imagenet_cls.parallel.devices import choose_device
    from imagenet_cls.parallel.process_group import init_process_groups

    logging.captureWarnings(True)  # warnings of libraries go to the log files
    parallel = loaded.config.parallel
    device = choose_device(
        loaded.config.device, rank_info, None if parallel.mode == "dp" else parallel.device_ids
    )
    if parallel.mode == "dp" and device.type == "cuda" and rank_info.world_size == 1:
        device = data_parallel_devices(loaded.config).all[0]
    return init_process_groups(
        rank_info,
        device,
        parallel.mode,
        parallel.backend,
        parallel.init_method,
        parallel.timeout_sec,
    )


def check_is_no_rank() -> None:
    """Raise UsageError if a launcher has started this process as a rank."""
    if find_rank_info(os.environ) is not None:
        raise UsageError(
            "This process is a rank of a launcher.",
            "Start the command without one: it starts its own processes.",
        )


def join_alone(loaded: LoadedConfig) -> tuple[Config, "RankContext"]:
    """The config with `parallel.mode` none, and the context of a command that runs in one process.

    Raises UsageError if a launcher has started several processes. Checks the components of the
    config, too.
    """
    rank_info = find_rank_info(os.environ)
    if rank_info is not None and rank_info.world_size > 1:
        raise UsageError(
            f"This runs in one process, and a launcher has started {rank_info.world_size}.",
            "Run it without torchrun, srun or mpirun, and unset WORLD_SIZE and RANK.",
        )
    loaded = replace(
        loaded, config=replace(loaded.config, parallel=replace(loaded.config.parallel, mode="none"))
    )
    prepare_process(loaded, RankInfo())
    check_components(loaded, None)
    return loaded.config, join_ranks(loaded, RankInfo())


def run_on_ranks(
    name: str,
    command: Callable[[Sequence[str]], int],
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    load: Callable[[argparse.Namespace], LoadedConfig],
    work: Callable[[argparse.Namespace, LoadedConfig, "RankContext"], None],
    training: bool | None = None,
) -> int:
    """Run a command on one rank or many: `work` on each. Returns the exit code.

    name, command: the command that calls this, in the process that the user starts and in the
    ranks that it starts. parser: with the options of `add_rank_options`. load: returns the config.
    training: whether the command trains, to check the components before the ranks are started;
    None: it uses none.
    """
    arguments, rank_info = parse_rank_arguments(parser, argv)
    arguments.checks_files = rank_info is None or rank_info.is_single_process
    if rank_info is None:  # this process starts the ranks
        loaded = load(arguments)
        if training is not None:
            check_components(loaded, arguments.gpus * arguments.nodes, training)
        return start_ranks(name, command, arguments, loaded, argv)
    with RankProcess(rank_info, arguments.traceback) as process:
        loaded = load(arguments)
        with name_origins(loaded.origins):
            work(arguments, loaded, process.join(loaded))
    return 0


def parse_rank_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, RankInfo | None]:
    """Parse the arguments of a command that runs on ranks, and find the rank of this process.

    The rank is None if this process is to start the ranks; `arguments.launcher` is then `spawn` or
    `pytorch`. Raises UsageError.
    """
    arguments = parse(parser, argv)
    rank_info = find_rank_info(os.environ, arguments.launcher)
    if rank_info is not None:
        check_number_of_ranks(arguments, rank_info)
        return arguments, rank_info
    several = arguments.gpus > 1 or arguments.nodes > 1
    if arguments.launcher == "auto" and several:
        arguments.launcher = "spawn"
    if arguments.launcher in ("spawn", "pytorch"):
        return arguments, None
    if several:
        options = f"--gpus {arguments.gpus} --nodes {arguments.nodes}"
        raise UsageError(
            f"{options} with --launcher {arguments.launcher} starts no ranks.",
            "Use --launcher spawn.",
        )
    return arguments, RankInfo()


def check_number_of_ranks(arguments: argparse.Namespace, rank_info: RankInfo) -> None:
    """Raise UsageError if --gpus and --nodes ask for other ranks than a launcher has started."""
    ranks = arguments.gpus * arguments.nodes
    if not rank_info.launched and ranks not in (1, rank_info.world_size):
        raise UsageError(
            f"--gpus {arguments.gpus} --nodes {arguments.nodes}: {ranks} ranks, but the launcher "
            f"({rank_info.launcher}) has started {rank_info.world_size}.",
            "Let the launcher start as many, or start one process for each machine with "
            "--launcher spawn.",
        )


def start_ranks(
    name: str,
    command: Callable[[Sequence[str]], int],
    arguments: argparse.Namespace,
    loaded: LoadedConfig,
    argv: Sequence[str],
) -> int:
    """Start the ranks of this machine, each of which runs the command with the same arguments.

    command: importable, since spawned ranks unpickle it. Returns the exit code when all ranks have
    ended.
    """
    from imagenet_cls.parallel.launch import configure_agent, launch_ranks
    from imagenet_cls.parallel.process_group import check_backend

    parallel = loaded.config.parallel
    check_backend(parallel.backend, arguments.launcher)
    agent = configure_agent(
        arguments.gpus,
        arguments.nodes,
        arguments.node_rank,
        arguments.master_addr,
        arguments.master_port,
        parallel.init_method,
        parallel.timeout_sec,
    )
    rank_command = None if arguments.launcher == "spawn" else child_command(name)
    return launch_ranks(agent, rank_command, argv, partial(run_spawned_rank, command))


def run_spawned_rank(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run the command in a process of torch.multiprocessing. Returns the exit code."""
    open_streams()
    return command(["--launcher", "spawn", *argv])


class RankProcess:
    """One rank of a command, from the start of its process to its end.

    Used as a context manager around the work of the rank. If there are several ranks, an error ends
    the process here, after it was reported once for all ranks. The error of a single process is
    printed by `cli.main`, as for any other command.
    """

    def __init__(self, rank_info: RankInfo, show_traceback: bool):
        self.rank_info = rank_info
        self.show_traceback = show_traceback
        self.context: RankContext | None = None

    def __enter__(self) -> Self:
        if not self.rank_info.is_single_process:
            terminate_with_launching_process()  # before torch is imported, which takes seconds
        return self

    def join(self, loaded: LoadedConfig) -> "RankContext":
        """Prepare this process and join the other ranks. Raises UsageError or ResourceError."""
        prepare_process(loaded, self.rank_info)
        self.context = join_ranks(loaded, self.rank_info)
        return self.context

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.rank_info.is_single_process:
            if isinstance(error, Stopped):
                raise requeue_if_slurm(error, os.environ) from None
            return
        from imagenet_cls.parallel.process_group import destroy_process_groups

        code = 0 if error is None else self.report(error)
        if self.context is not None and (error is None or isinstance(error, Stopped)):
            destroy_process_groups(self.context)
        if code != 0:
            hard_exit(code)

    def report(self, error: BaseException) -> int:
        """Print or log the error of this rank. Returns the exit code."""
        from imagenet_cls.parallel.process_group import is_communication_error

        if isinstance(error, Stopped):  # every rank stops; rank 0 reports it
            if self.rank_info.is_main:
                stopped = requeue_if_slurm(error, os.environ)
                write_error_file(stopped)
                print_error(stopped, error.exit_code)
            signal_launching_process(error.signal_number)
            return error.exit_code
        if is_communication_error(error):
            error = lost_rank_error(error, self.rank_info)
        error = explain_path_error(error)
        code = error.exit_code if isinstance(error, UserError) else 1
        text = str(error)
        if code == 1 or self.show_traceback:
            text = "".join(format_exception(error))
        report_error(error, text, code, self.rank_info.rank)
        return code


def lost_rank_error(error: BaseException, rank_info: RankInfo) -> ResourceError:
    """The error of a rank whose collective failed: nccl's own, or that of a lost rank."""
    from imagenet_cls.parallel.process_group import nccl_error

    time.sleep(_LOST_RANK_WAIT_SEC)
    if (own := nccl_error(error, rank_info.rank)) is not None:
        return own
    remedy = "See the errors and logs of the other ranks for the cause."
    if re.search("timed? ?out", str(error), re.IGNORECASE):
        is_pair = rank_info.world_size == 2
        logs = f"logs/rank{1 - rank_info.rank}.log" if is_pair else "logs/rank*.log"
        remedy = (
            f"In a training, see the stacks in {logs}, which show where another rank hangs; "
            "with nccl also logs/nccl_trace_rank*. If a machine is down, its log ends early."
        )
    reason = shorten(first_line(error), 200)
    return ResourceError(
        f"Rank {rank_info.rank} lost contact with another rank ({reason}).",
        f"{remedy} {RESTART_ADVICE}",
    )


def prepare_process(loaded: LoadedConfig, rank_info: RankInfo) -> None:
    """Set environment variables that torch and its libraries read at import, and the number of CPU
    threads.
    """
    if loaded.config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if rank_info.world_size > 1 or cgroup_cpus() < (os.cpu_count() or 1):
        # Few launchers set the number of threads, which changes the last bits of results, and torch
        # ignores CPU quotas of containers.
        threads = os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_rank(rank_info)))
        import torch

        if threads.isdigit():  # OpenMP also takes a list, one number for each level
            torch.set_num_threads(max(1, int(threads)))  # a spawned rank has imported torch before


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that runs on ranks. `checks_files` says whether the process is
    to check files: it starts the ranks, or is the only one.
    """
    parser.set_defaults(checks_files=False)
    add = parser.add_argument_group("several ranks").add_argument
    add(
        "--launcher",
        choices=LAUNCHERS,
        default="auto",
        help="what started, or is to start, the ranks",
    )
    add(
        "--gpus",
        "-g",
        "--nproc-per-node",
        "--nproc_per_node",
        type=gpu_count,
        default=1,
        metavar="N",
        help="ranks to start on this machine, on GPUs if it has any; all: as many as it has GPUs",
    )
    add(
        "--nodes",
        type=positive,
        default=1,
        metavar="N",
        help="number of machines",
    )
    add(
        "--node-rank",
        type=number(0),
        default=0,
        metavar="K",
        help="number of this machine, from 0",
    )
    add("--master-addr", metavar="HOST", help="address of the first machine")
    add(
        "--master-port",
        type=number(1, 65535),
        metavar="PORT",
        help="free port of the first machine",
    )
    # torch.distributed.launch passes the local rank as an option, in either spelling, and in the
    # environment.
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)


def gpu_count(text: str) -> float:
    """An argparse type: the number of ranks on this machine. Raises UsageError for `all` without
    GPUs.
    """
    if text != "all":
        return number(1, 1024)(text)  # the limit catches typos
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError(
            "--gpus all: this machine has no GPU that torch can use.",
            "Leave it out to train on the CPU, or give the number of ranks.",
        )
    return count
