"""Run a command on one rank or many: start the ranks, or be one of them; print an error once."""

import argparse
import os
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from imagenet_cls.commands.program import not_negative, open_streams, port_number, positive, print_error
from imagenet_cls.config.load import Loaded
from imagenet_cls.config.schema import ParallelConfig
from imagenet_cls.errors import ResourceError, Stopped, UsageError, UserError, first_line
from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE, LAUNCHERS, RankInfo, cpu_threads, find_rank_info
from imagenet_cls.parallel.exit import (
    end_process,
    exit_code_of_stopped_rank,
    report_error,
    requeue,
    terminate_with_launcher,
    write_error_file,
)

if TYPE_CHECKING:
    from imagenet_cls.parallel.launch import Launch
    from imagenet_cls.parallel.process_group import Group

TOOLS = Path(__file__).resolve().parents[2] / "tools"

# A rank that lost another one waits this long before it reports that: its launcher may end it first, and report the
# other one's error, which is the cause.
_PATIENCE_SEC = 5.0


def check_names(loaded: Loaded, world_size: int | None, training: bool = True) -> None:
    """Stage 2 of checking; raises ConfigError. world_size: None if unknown."""
    from imagenet_cls.engine.check import config_problems
    from imagenet_cls.engine.start import raise_problems

    raise_problems(config_problems(loaded.config, world_size, training), loaded)


def join_run(loaded: Loaded, rank_info: RankInfo) -> "Group":
    """`engine.start.join_group`, imported when called."""
    from imagenet_cls.engine.start import join_group

    return join_group(loaded, rank_info)


@dataclass(frozen=True)
class RankCommand:
    """A command that runs on ranks. All functions are importable, since spawned ranks unpickle them.

    script: its file in tools/. parser: builds the parser, with `add_rank_options`. load: stage 1 of checking, without
    torch. precheck: what the launching process checks beyond the config. run: one rank's part. check: stage 2 of
    checking, in the launching process. join: the rendezvous of one rank.
    """

    script: str
    parser: Callable[[], argparse.ArgumentParser]
    load: Callable[[argparse.Namespace], Loaded]
    precheck: Callable[[argparse.Namespace, Loaded], None]
    run: Callable[[argparse.Namespace, Loaded, "Group"], None]
    check: Callable[[Loaded, int | None], None] = check_names
    join: Callable[[Loaded, RankInfo], "Group"] = join_run


def run_command(command: RankCommand, argv: Sequence[str]) -> int:
    """Run as the only rank, as one of several (then the process ends here), or as the process that starts them."""
    if {LAUNCHED_VARIABLE, "RANK"} <= os.environ.keys():  # our launching process prints errors, also the parser's
        run_rank(command, argv)
    arguments = command.parser().parse_intermixed_args(argv)
    launcher, gpus = arguments.launcher, arguments.gpus or 1
    rank_info = find_rank_info(os.environ, "auto" if launcher == "spawn" else launcher)
    if rank_info is not None and rank_info.world_size > 1:
        run_rank(command, argv)
    several = f"--gpus {gpus}" if gpus > 1 else "" if arguments.nodes == "1" else f"--nodes {arguments.nodes}"
    if rank_info is None and (launcher in ("spawn", "pytorch") or (launcher == "auto" and several)):
        return start(command, arguments, argv, "spawn" if launcher == "auto" else launcher)
    if rank_info is None and several:
        raise UsageError(f"{several} with --launcher {launcher}: that starts no ranks.\nUse --launcher spawn.")
    loaded = command.load(arguments)
    rank_info = rank_info or RankInfo()
    prepare_process(loaded, rank_info)
    try:
        command.run(arguments, loaded, command.join(loaded, rank_info))
    except Stopped as stopped:
        raise requeue(stopped, os.environ) from None
    return 0


def start(command: RankCommand, arguments: argparse.Namespace, argv: Sequence[str], launcher: str) -> int:
    """Check everything once, then start the ranks and wait for them. Returns the exit code."""
    loaded = command.load(arguments)
    from imagenet_cls.parallel.launch import check_gpu_count, check_port, launch_ranks
    from imagenet_cls.parallel.process_group import check_backend

    check_backend(loaded.config.parallel.backend, launcher)
    launch = build_launch(arguments, loaded.config.parallel, launcher)
    check_port(launch)
    check_gpu_count(launch.gpus, loaded.config.device)
    command.check(loaded, launch.gpus * int(launch.nodes) if launch.nodes.isdigit() else None)
    if launch.node_rank == 0:
        command.precheck(arguments, loaded)
    return launch_ranks(launch, str(TOOLS / command.script), argv, partial(run_rank, command))


def build_launch(arguments: argparse.Namespace, parallel: ParallelConfig, launcher: str) -> "Launch":
    """The ranks to start by options and parallel.init_method; an address in the latter has priority.

    Raises UsageError for a node rank beyond the number of machines, UsageError or ResourceError for a rendezvous file
    that these ranks can't use.
    """
    from imagenet_cls.parallel.launch import Launch
    from imagenet_cls.parallel.rendezvous import Rendezvous, check_rendezvous_file, find_rendezvous

    if arguments.node_rank >= int(arguments.nodes.rpartition(":")[2]):
        raise UsageError(
            f"--node-rank {arguments.node_rank} with --nodes {arguments.nodes}: machines count from 0.\n"
            "Give each machine its own NODE_RANK (--node-rank), and all of them the same NNODES (--nodes)."
        )
    is_named = parallel.init_method != "env://"
    rendezvous = find_rendezvous({}, parallel.init_method, RankInfo()) if is_named else Rendezvous()
    if rendezvous.file is not None:
        if arguments.max_restarts > 0 or not arguments.nodes.isdigit():
            raise UsageError(
                "parallel.init_method: ranks that may be restarted can't use a file, which keeps entries of "
                "ranks that have exited.\n"
                "Leave it out, and set MASTER_ADDR (--master-addr) if there are several machines."
            )
        check_rendezvous_file(rendezvous.file, 0.0 if arguments.nodes == "1" else None)
    return Launch(
        launcher=launcher,
        gpus=arguments.gpus or 1,
        nodes=arguments.nodes,
        node_rank=arguments.node_rank,
        master_addr=rendezvous.host or arguments.master_addr,
        master_port=rendezvous.port or arguments.master_port,
        max_restarts=arguments.max_restarts,
        rendezvous_file=rendezvous.file is not None,
        timeout_sec=parallel.timeout_sec,
    )


def run_rank(command: RankCommand, argv: Sequence[str]) -> NoReturn:
    """Run one of several ranks, from the command line to the end of the process.

    One rank's error is printed: by our launching process that of the rank that failed first; under a foreign launcher
    by the ranks themselves, rank 0 first.
    """
    terminate_with_launcher()  # before torch is imported, which takes seconds
    open_streams()
    from imagenet_cls.parallel.process_group import destroy_group, is_communication_error

    group: Group | None = None
    # From the environment, since a rank without valid rank information reports an error, too.
    rank, launched, code, together = 0, LAUNCHED_VARIABLE in os.environ, 0, False
    try:
        arguments = command.parser().parse_intermixed_args(argv)
        rank_info = find_rank_info(os.environ, "auto" if arguments.launcher == "spawn" else arguments.launcher)
        assert rank_info is not None
        rank = rank_info.rank
        loaded = command.load(arguments)
        prepare_process(loaded, rank_info)
        group = command.join(loaded, rank_info)
        command.run(arguments, loaded, group)
        together = True
    except Stopped as stopped:  # every rank stops; rank 0 reports it
        if rank == 0:
            print_error(requeue(stopped, os.environ), argv)
        code, together = exit_code_of_stopped_rank(stopped.exit_code), True
    except UserError as error:
        code = error.exit_code
        write_error_file(str(error), code)
        if not launched and not error.reported_by_main:
            time.sleep(0.0 if rank == 0 else 1.0)
            print_error(error, argv)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as usage:
        code = usage.code if isinstance(usage.code, int) else 1
    except BaseException as error:
        if is_communication_error(error):
            lost = lost_rank_error(error, rank, group)
            code = lost.exit_code
            report_error(str(lost), code, launched, lost.reported_by_main)
        else:
            code = 1
            report_error("".join(traceback.format_exception(error)), code, launched)
    heartbeat = None if group is None else group.heartbeat
    if group is not None and together:
        if heartbeat is not None:
            heartbeat.stop_aborting()
        destroy_group(group)
    if heartbeat is not None:
        heartbeat.close(failed=not together)
    end_process(code)


def lost_rank_error(error: BaseException, rank: int, group: "Group | None") -> ResourceError:
    """The error of a rank whose collective failed, after time for the launcher to end it.

    The heartbeat names lost ranks. A rank that is alive but late has no name.
    """
    if group is not None and group.heartbeat is not None:
        lost = group.heartbeat.wait_for_lost_rank(_PATIENCE_SEC)
        if lost is not None:
            return lost
    else:
        time.sleep(_PATIENCE_SEC)
    return ResourceError(
        f"rank {rank} lost contact with another rank: {first_line(error)[:200]}\n"
        "See the other ranks' logs (logs/rank*.log) for the cause. Resume with the same command and --resume."
    )


def prepare_process(loaded: Loaded, rank_info: RankInfo) -> None:
    """Set what torch and its libraries read at import."""
    if loaded.config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if rank_info.world_size > 1:
        # The number of threads changes the last bits, and only some launchers set it.
        threads = os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(rank_info.local_world_size)))
        import torch

        torch.set_num_threads(max(1, int(threads)))  # a spawned rank has imported torch before


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that runs on ranks."""
    ranks = parser.add_argument_group("several ranks")
    ranks.add_argument("--launcher", choices=LAUNCHERS, default="auto", help="what started, or is to start, the ranks")
    ranks.add_argument(
        "--gpus", type=positive, metavar="N", help="ranks to start on this machine (on the CPU without GPUs)"
    )
    ranks.add_argument(
        "--nodes",
        default="1",
        type=node_count,
        metavar="N",
        help="machines; 1:4 for one to four (elastic, pytorch only)",
    )
    ranks.add_argument(
        "--node-rank", type=not_negative, default=0, metavar="K", help="which of the machines this is, from 0"
    )
    ranks.add_argument("--master-addr", metavar="HOST", help="address of the first machine")
    ranks.add_argument("--master-port", type=port_number, metavar="PORT", help="free port of the first machine")
    ranks.add_argument(
        "--max-restarts", type=not_negative, default=0, metavar="N", help="restarts after a failure (pytorch only)"
    )
    # torch.distributed.launch passes the local rank as an option, in either spelling, and in the environment.
    ranks.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)


def node_count(text: str) -> str:
    """An argparse type: torchrun's number of machines, `N` or `MIN:MAX`."""
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of machines nor a range such as 1:4")
    return text
