"""A command on one rank or many: start the ranks, be one of them, and show an error once.

Owns the difference between a launching process and a rank, and what a rank ends with. Refuses to know what a command
does. Called by `cli` and the entries in `tools/`.
"""

import argparse
import os
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.commands.arguments import not_negative, port_number, positive
from imagenet_cls.commands.program import open_streams, print_error
from imagenet_cls.config.load import Loaded
from imagenet_cls.config.schema import ParallelConfig
from imagenet_cls.errors import ResourceError, Stopped, UsageError, UserError
from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE, LAUNCHERS, RankInfo, cpu_threads, find_rank_info
from imagenet_cls.parallel.slurm import requeue

if TYPE_CHECKING:
    from imagenet_cls.parallel.launch import Ranks
    from imagenet_cls.parallel.process_group import Group

TOOLS = Path(__file__).resolve().parents[2] / "tools"

# How long a rank that lost another waits to be ended by its launcher before it speaks: the other one's message is the
# cause.
_PATIENCE_SEC = 5.0


def check_names(loaded: Loaded, world_size: int | None, training: bool = True) -> None:
    """Stage 2 of checking; raises ConfigError. world_size: None where it isn't known yet."""
    from imagenet_cls.engine.check import config_problems
    from imagenet_cls.engine.run import raise_problems

    raise_problems(config_problems(loaded.config, world_size, training), loaded)


@dataclass(frozen=True)
class RankCommand:
    """A command that runs on ranks. All functions are importable, since a spawned rank gets them by name.

    script: its file in tools/. parser: makes the parser, with `add_rank_options`. load: stage 1 of checking, without
    torch. precheck: what else the launching process can refuse before ranks start. run: one rank's part. check: stage 2
    of checking, by the launching process.
    """

    script: str
    parser: Callable[[], argparse.ArgumentParser]
    load: Callable[[argparse.Namespace], Loaded]
    precheck: Callable[[argparse.Namespace, Loaded], None]
    run: Callable[[argparse.Namespace, Loaded, RankInfo, "list[Group]"], None]
    check: Callable[[Loaded, int | None], None] = check_names


def run_command(command: RankCommand, argv: Sequence[str]) -> int:
    """Be the only rank, one of several (then the process ends here), or the process that starts them."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings about sockets come a dozen lines each
    if {LAUNCHED_VARIABLE, "RANK"} <= os.environ.keys():  # our launching process shows whatever is wrong from here on
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
    prepare_process(loaded, rank_info or RankInfo())
    try:
        command.run(arguments, loaded, rank_info or RankInfo(), [])
    except Stopped as stopped:
        raise requeue(stopped, os.environ) from None
    return 0


def start(command: RankCommand, arguments: argparse.Namespace, argv: Sequence[str], launcher: str) -> int:
    """Check everything that can be checked here, once, then start the ranks and wait for them."""
    loaded = command.load(arguments)
    from imagenet_cls.parallel.launch import check_gpu_count, check_port
    from imagenet_cls.parallel.process_group import check_backend
    from imagenet_cls.parallel.spawn import run_spawn, start_server
    from imagenet_cls.parallel.torchrun import run_torchrun

    check_backend(loaded.config.parallel.backend, launcher)
    ranks = ranks_to_start(arguments, loaded.config.parallel, launcher)
    check_port(ranks)
    if launcher == "spawn":
        start_server(ranks)
    check_gpu_count(ranks.gpus, loaded.config.device)
    command.check(loaded, ranks.gpus * int(ranks.nodes) if ranks.nodes.isdigit() else None)
    if ranks.node_rank == 0:
        command.precheck(arguments, loaded)
    # The ranks run the same command line again.
    if launcher == "spawn":
        return run_spawn(ranks, argv, partial(run_rank, command))
    return run_torchrun(ranks, str(TOOLS / command.script), argv)


def ranks_to_start(arguments: argparse.Namespace, parallel: ParallelConfig, launcher: str) -> "Ranks":
    """What the options and parallel.init_method ask for together; an address in the latter goes first.

    Raises UsageError for a node rank that none of the machines has, since all would wait for the one that is missing,
    and UsageError or ResourceError for a file that these ranks can't meet in.
    """
    from imagenet_cls.parallel.launch import Ranks
    from imagenet_cls.parallel.rendezvous import Rendezvous, check_rendezvous_file, find_rendezvous

    if arguments.node_rank >= int(arguments.nodes.rpartition(":")[2]):
        raise UsageError(
            f"node rank {arguments.node_rank} is none of --nodes {arguments.nodes}: machines count from 0.\n"
            "Give each machine its own NODE_RANK (--node-rank), and all of them the same NNODES (--nodes)."
        )
    is_named = parallel.init_method != "env://"
    meeting = find_rendezvous({}, parallel.init_method, RankInfo()) if is_named else Rendezvous()
    if meeting.file is not None:
        if arguments.max_restarts > 0 or not arguments.nodes.isdigit():
            raise UsageError(
                "parallel.init_method: ranks that may be started again can't meet in a file, where the dead stay.\n"
                "Leave it out, and set MASTER_ADDR (--master-addr) where there are several machines."
            )
        check_rendezvous_file(meeting.file, 0.0 if arguments.nodes == "1" else None)
    return Ranks(
        launcher=launcher,
        gpus=arguments.gpus or 1,
        nodes=arguments.nodes,
        node_rank=arguments.node_rank,
        master_addr=meeting.host or arguments.master_addr,
        master_port=meeting.port or arguments.master_port,
        max_restarts=arguments.max_restarts,
        by_file=meeting.file is not None,
        timeout_sec=parallel.timeout_sec,
    )


def run_rank(command: RankCommand, argv: Sequence[str]) -> None:
    """Be one of several ranks, from the command line to the end of the process. Never returns.

    Only one rank's error is shown. Our launching process shows that of the rank that failed first; under a foreign
    launcher ranks speak for themselves, rank 0 first.
    """
    from imagenet_cls.parallel.exit import code_after_stop, die_with_launcher, write_error_file

    die_with_launcher()  # before torch is imported, which takes seconds
    open_streams()
    from imagenet_cls.parallel.process_group import leave, lost_a_peer, tell

    groups: list[Group] = []
    # From the environment, since a rank that can't find its place has an error, too.
    rank, launched, code, together = 0, LAUNCHED_VARIABLE in os.environ, 0, False
    try:
        arguments = command.parser().parse_intermixed_args(argv)
        rank_info = find_rank_info(os.environ, "auto" if arguments.launcher == "spawn" else arguments.launcher)
        assert rank_info is not None
        rank = rank_info.rank
        loaded = command.load(arguments)
        prepare_process(loaded, rank_info)
        command.run(arguments, loaded, rank_info, groups)
        together = True
    except Stopped as stopped:
        # Not an error to be reported by the launching process: every rank stops, and rank 0 says so.
        if rank == 0:
            print_error(requeue(stopped, os.environ), argv)
        code, together = code_after_stop(stopped.exit_code), True
    except UserError as error:
        write_error_file(str(error), error.exit_code)
        if not launched and not error.reported_by_main:
            time.sleep(0.0 if rank == 0 else 1.0)
            print_error(error, argv)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit as usage:
        code = usage.code if isinstance(usage.code, int) else 1
    except BaseException as error:
        crash = lost_peer(error, rank, groups) if lost_a_peer(error) else None
        text = str(crash) if crash else "".join(traceback.format_exception(error))
        code = crash.exit_code if crash else 1
        tell(text, code, launched, crash is not None and crash.reported_by_main)
    leave(groups[0] if groups else None, code, together)


def lost_peer(error: BaseException, rank: int, groups: "Sequence[Group]") -> ResourceError:
    """What a rank says that lost another one; after it gave the launcher time to end it unheard.

    The heartbeat knows who is gone, unless it is a rank that still lives and is late.
    """
    if groups and groups[0].heartbeat is not None:
        named = groups[0].heartbeat.explain(_PATIENCE_SEC)
        if named is not None:
            return named
    else:
        time.sleep(_PATIENCE_SEC)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return ResourceError(
        f"rank {rank} lost contact with another rank: {reason}\n"
        "The other ranks' logs (logs/rank*.log) tell the cause. Go on with the same command and --resume."
    )


def prepare_process(loaded: Loaded, rank_info: RankInfo) -> None:
    """Set what torch and its libraries read when they are imported."""
    if loaded.config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if rank_info.world_size > 1:
        # The number of threads changes the last bits, and only some launchers set it.
        threads = os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(rank_info.local_world_size)))
        import torch

        torch.set_num_threads(max(1, int(threads)))  # a forked rank's torch has been imported already


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
    # torch.distributed.launch passes the local rank as an option, spelled either way; the environment says it, too.
    ranks.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)


def node_count(text: str) -> str:
    """An argparse type: machines as torchrun takes them, a number or the least and the most of them."""
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of machines nor a range such as 1:4")
    return text
