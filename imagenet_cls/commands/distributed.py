"""Run a command on one rank or many: start the ranks, or be one of them; print an error once."""

import argparse
import logging
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands.cli import not_negative, num_ranks, open_streams, parse, port_number
from imagenet_cls.config.load import LoadedConfig
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import (
    ResourceError,
    Stopped,
    UsageError,
    UserError,
    explain_path_error,
    first_line,
)
from imagenet_cls.parallel.environment import (
    LAUNCHERS,
    RankInfo,
    cgroup_cpus,
    cpu_threads,
    find_rank_info,
    machine_options,
)
from imagenet_cls.parallel.exit import (
    COMMAND_VARIABLE,
    end_process,
    exit_on_signal,
    handle_interrupts,
    print_error,
    report_error,
    requeue_if_slurm,
    restart_advice,
    signal_launching_process,
    terminate_with_launching_process,
    trains,
)

if TYPE_CHECKING:
    from imagenet_cls.parallel.process_group import Group

# A rank that lost another one waits this long before it reports that: its launcher may end it first, and report the
# other one's error, which is the cause.
_PATIENCE_SEC = 5.0

if (
    multiprocessing.parent_process() is not None
):  # a spawned rank imports this module, and then torch
    handle_interrupts(exit_on_signal)


def check_components(loaded: LoadedConfig, world_size: int | None, training: bool = True) -> None:
    """Stage 2 of the checks; raises ConfigError. world_size: None if unknown."""
    from imagenet_cls.engine.check import config_problems, raise_problems

    raise_problems(config_problems(loaded.config, world_size, training), loaded)


def join_group(loaded: LoadedConfig, rank_info: RankInfo) -> "Group":
    """Rendezvous with the other ranks and start the heartbeat. Raises UsageError or ResourceError if it fails."""
    from imagenet_cls.engine.build import data_parallel_devices
    from imagenet_cls.guards.heartbeat import start_heartbeat
    from imagenet_cls.parallel.devices import choose_device
    from imagenet_cls.parallel.process_group import init_group

    logging.captureWarnings(True)  # warnings of libraries go to the log files
    parallel = loaded.config.parallel
    device = choose_device(
        loaded.config.device, rank_info, None if parallel.mode == "dp" else parallel.device_ids
    )
    if parallel.mode == "dp" and device.type == "cuda" and rank_info.world_size == 1:
        device = data_parallel_devices(loaded.config).all[0]
    group = init_group(
        rank_info,
        device,
        parallel.mode,
        parallel.backend,
        parallel.init_method,
        parallel.timeout_sec,
    )
    return replace(group, heartbeat=start_heartbeat(group, parallel.timeout_sec))


def join_alone(loaded: LoadedConfig) -> tuple[Config, "Group"]:
    """The config with `parallel.mode` none, and the group of a command that runs in one process.

    Raises UsageError if a launcher has started several processes. Checks the components of the config, too.
    """
    rank_info = find_rank_info(os.environ)
    if rank_info is not None and rank_info.world_size > 1:
        raise UsageError(
            f"this runs in one process, and a launcher has started {rank_info.world_size}.\n"
            "Run it without torchrun, srun or mpirun, and unset WORLD_SIZE and RANK."
        )
    loaded = replace(
        loaded, config=replace(loaded.config, parallel=replace(loaded.config.parallel, mode="none"))
    )
    prepare_process(loaded, RankInfo())
    check_components(loaded, None)
    return loaded.config, join_group(loaded, RankInfo())


@dataclass(frozen=True)
class RankCommand:
    """A command that runs on ranks. All functions are importable, since spawned ranks unpickle them.

    name: in `commands.main`. load: stage 1 of the checks, without torch. check_files: of the files and folders that are
    named, likewise. check_before_start: stage 2 of the checks, in the process that starts the ranks; gets the world
    size, None if unknown. run, join: of one rank.
    """

    name: str
    parser: Callable[[], argparse.ArgumentParser]
    load: Callable[[argparse.Namespace], LoadedConfig]
    check_files: Callable[[argparse.Namespace, LoadedConfig], None]
    check_before_start: Callable[[LoadedConfig, int | None], None]
    run: Callable[[argparse.Namespace, LoadedConfig, "Group"], None]
    join: Callable[[LoadedConfig, RankInfo], "Group"] = join_group


def run_command(command: RankCommand, argv: Sequence[str]) -> int:
    """Run as the only rank, as one of several (then the process ends here), or as the process that starts them."""
    os.environ[COMMAND_VARIABLE] = command.name
    parser = command.parser()
    arguments = parse(parser, argv)
    launcher, gpus = arguments.launcher, arguments.gpus or 1
    rank_info = find_rank_info(os.environ, launcher)
    if rank_info is None and launcher == "pytorch":
        parser.set_defaults(**machine_options(os.environ))
        arguments = parse(parser, argv)
    if rank_info is not None and (rank_info.world_size > 1 or rank_info.launched):
        end_process(run_rank(command, arguments, rank_info))
    several = gpus > 1 or arguments.nodes != "1"
    if rank_info is None and (launcher in ("spawn", "pytorch") or (launcher == "auto" and several)):
        return start(command, arguments, argv, "spawn" if launcher == "auto" else launcher)
    if rank_info is None and several:
        options = f"--gpus {gpus} --nodes {arguments.nodes} with --launcher {launcher}"
        raise UsageError(f"{options}: that starts no ranks.\nUse --launcher spawn.")
    loaded = command.load(arguments)
    command.check_files(arguments, loaded)
    rank_info = rank_info or RankInfo()
    prepare_process(loaded, rank_info)
    try:
        command.run(arguments, loaded, command.join(loaded, rank_info))
    except Stopped as stopped:
        raise requeue_if_slurm(stopped, os.environ) from None
    return 0


def start(
    command: RankCommand, arguments: argparse.Namespace, argv: Sequence[str], launcher: str
) -> int:
    """Check everything once, then start the ranks and wait for them. Returns the exit code."""
    loaded = command.load(arguments)
    command.check_files(arguments, loaded)
    from imagenet_cls.parallel.launch import configure_agent, launch_ranks
    from imagenet_cls.parallel.process_group import check_backend

    parallel, gpus, nodes = loaded.config.parallel, arguments.gpus or 1, arguments.nodes
    check_backend(parallel.backend, launcher)
    config = configure_agent(
        gpus, nodes, arguments.node_rank, arguments.master_addr, arguments.master_port, arguments.max_restarts,
        parallel.init_method, parallel.timeout_sec,
    )  # fmt: skip
    command.check_before_start(loaded, gpus * int(nodes) if nodes.isdigit() else None)
    executed = None if launcher == "spawn" else child_command(command.name)
    return launch_ranks(config, executed, argv, partial(run_spawned_rank, command))


def child_command(name: str) -> list[str]:
    """The command line, without arguments, of a process that runs a command of `commands.main`.

    The process imports the same package as this one, and no modules of the working directory (-P).
    """
    root = Path(__file__).resolve().parents[2]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root.name not in ("site-packages", "dist-packages") and str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), *paths]))
    return [sys.executable, "-u", "-P", "-m", "imagenet_cls", name]


def run_spawned_rank(command: RankCommand, argv: Sequence[str]) -> int:
    """Run one rank in a process of torch.multiprocessing; return its exit code."""
    open_streams()
    rank_info = find_rank_info(os.environ, "spawn")
    assert rank_info is not None
    return run_rank(command, parse(command.parser(), argv), rank_info)


def run_rank(command: RankCommand, arguments: argparse.Namespace, rank_info: RankInfo) -> int:
    """Run one launched rank; return its exit code, after printing its error unless another rank prints it."""
    terminate_with_launching_process()  # before torch is imported, which takes seconds
    from imagenet_cls.parallel.process_group import is_communication_error, leave_group

    group, code, failed = None, 0, False
    try:
        loaded = command.load(arguments)
        prepare_process(loaded, rank_info)
        group = command.join(loaded, rank_info)
        command.run(arguments, loaded, group)
    except Stopped as stopped:  # every rank stops; rank 0 reports it
        code = stopped.exit_code
        if rank_info.is_main:
            print_error(requeue_if_slurm(stopped, os.environ), code)
        signal_launching_process(stopped.signal_number)
    except KeyboardInterrupt:  # before the handler of signals is installed
        failed, code = True, 130
    except BaseException as error:
        failed = True
        if is_communication_error(error):
            error = lost_rank_error(error, rank_info.rank, group)
        error = explain_path_error(error)
        code = error.exit_code if isinstance(error, UserError) else 1
        text = (
            "".join(traceback.format_exception(error))
            if code == 1 or arguments.traceback
            else str(error)
        )
        report_error(text, code, rank_info.rank, getattr(error, "printed_elsewhere", False))
    if group is not None:
        leave_group(group, failed)
    return code


def lost_rank_error(error: BaseException, rank: int, group: "Group | None") -> ResourceError:
    """The error of a rank whose collective failed. It names the lost ranks if the heartbeat knows them."""
    from imagenet_cls.parallel.process_group import nccl_error

    lost = None
    if group is not None and group.heartbeat is not None:
        lost = group.heartbeat.wait_for_lost_rank(_PATIENCE_SEC)
    where = "the errors and logs of the other ranks for the cause."
    if re.search("timed? ?out", str(error), re.IGNORECASE) and trains():
        others = (
            f"rank{1 - rank}.log"
            if group is not None and group.world_size == 2
            else "rank<r>.log of the others"
        )
        where = f"the stacks in logs/{others}, which show where a rank hangs; with nccl also logs/nccl_trace_rank<r>."
    lost = lost or nccl_error(error, rank)
    return lost or ResourceError(
        f"rank {rank} lost contact with another rank: {first_line(error)[:200]}\nSee {where} {restart_advice()}"
    )


def prepare_process(loaded: LoadedConfig, rank_info: RankInfo) -> None:
    """Set environment variables that torch and its libraries read at import, and the number of CPU threads."""
    if loaded.config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if rank_info.world_size > 1 or cgroup_cpus() < (os.cpu_count() or 1):
        # Only some launchers set the number of threads, which changes the last bits, and torch knows no quotas.
        threads = os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(rank_info)))
        import torch

        if threads.isdigit():  # OpenMP also takes a list, one number for each level
            torch.set_num_threads(max(1, int(threads)))  # a spawned rank has imported torch before


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that runs on ranks."""
    add = parser.add_argument_group("several ranks").add_argument
    add(
        "--launcher",
        choices=LAUNCHERS,
        default="auto",
        help="what started, or is to start, the ranks",
    )
    add(
        "--gpus", "-g", "--nproc-per-node", "--nproc_per_node", type=num_ranks, metavar="N",
        help="ranks to start on this machine, on GPUs if it has any",
    )  # fmt: skip
    add(
        "--nodes",
        type=node_count,
        default="1",
        metavar="N",
        help="machines; 1:4 for one to four (elastic)",
    )
    add(
        "--node-rank",
        type=not_negative,
        default=0,
        metavar="K",
        help="number of this machine, from 0",
    )
    add("--master-addr", metavar="HOST", help="address of the first machine")
    add("--master-port", type=port_number, metavar="PORT", help="free port of the first machine")
    add(
        "--max-restarts", type=not_negative, default=0, metavar="N", help="restarts after a failure"
    )
    # torch.distributed.launch passes the local rank as an option, in either spelling, and in the environment.
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)


def node_count(text: str) -> str:
    """An argparse type: torchrun's number of machines, `N` or `MIN:MAX`."""
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of machines nor a range such as 1:4"
        )
    return text
