"""Start the ranks of this machine with torch's elastic agent, and wait for them.

torchrun uses the same agent.
"""

import atexit
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel.cpus import cpu_threads
from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE, RankInfo
from imagenet_cls.parallel.exit import hard_exit, print_error, print_rank_failure
from imagenet_cls.parallel.network import address_towards
from imagenet_cls.parallel.process_group import Rendezvous, check_rendezvous_file, find_rendezvous
from imagenet_cls.parallel.signals import handle_stop_signals
from imagenet_cls.text import first_line

DEFAULT_PORT = 29500  # for the rendezvous of several machines: torch's default
_STOP_TIMEOUT_SEC = 300  # for ranks to save after a stop signal

RunRank = Callable[[Sequence[str]], int]


def configure_agent(
    gpus: int,
    nodes: int,
    node_rank: int,
    master_addr: str | None,
    master_port: int | None,
    init_method: str,
    timeout_sec: float,
) -> LaunchConfig:
    """The configuration of the agent that starts this machine's ranks. It restarts none.

    nodes: the number of machines. The c10d rendezvous is used on a single machine without a given
    port, otherwise the static one. Raises UsageError for options that contradict each other,
    ResourceError for a rendezvous file of an earlier run.
    """
    if node_rank >= nodes:
        raise UsageError(
            f"--node-rank {node_rank} with --nodes {nodes}: machines count from 0.",
            "Give each machine its own NODE_RANK (--node-rank), and all of them the same NNODES "
            "(--nodes).",
        )
    rendezvous = choose_rendezvous(nodes, master_addr, master_port, init_method)
    is_static = rendezvous.port != 0
    options: dict[str, Any] = {}
    if is_static:
        options = {"rank": node_rank, "timeout": math.ceil(timeout_sec)}
    # torch 2.11 has no such field: its agent waits 30 seconds.
    has_timeout = "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}
    stop_timeout: dict[str, Any] = {"shutdown_timeout": _STOP_TIMEOUT_SEC} if has_timeout else {}
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=gpus,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(os.devnull),
        run_id="imagenet-cls",
        rdzv_backend="static" if is_static else "c10d",
        rdzv_endpoint=str(rendezvous),
        rdzv_configs=options,
        local_addr=None if is_static else address_towards(rendezvous.host),
        # the agent's handler raises for each signal, also during the clean-up
        signals_to_handle="",
        **stop_timeout,
    )


def choose_rendezvous(
    nodes: int, master_addr: str | None, master_port: int | None, init_method: str
) -> Rendezvous:
    """The rendezvous of the agents of all machines. Port 0: one machine, whose agent takes a free
    port.

    An address in `init_method` has priority. Ranks with a rendezvous file use that; their agents
    need an address, too.
    """
    configured = (
        Rendezvous() if init_method == "env://" else find_rendezvous({}, init_method, RankInfo())
    )
    host = configured.host or master_addr
    port = configured.port or master_port
    if nodes == 1:
        if configured.file is not None:
            check_rendezvous_file(configured.file, 0.0)
        return Rendezvous(host or "127.0.0.1", port) if port else Rendezvous("127.0.0.1", 0)
    if host is None:
        raise UsageError(
            f"{nodes} machines need an address for their rendezvous.",
            "On each, set MASTER_ADDR (--master-addr) to the first machine's address, and "
            "NODE_RANK to 0, 1, ...",
        )
    return Rendezvous(host, port or DEFAULT_PORT)


def launch_ranks(
    config: LaunchConfig, command: Sequence[str] | None, argv: Sequence[str], run_rank: RunRank
) -> int:
    """Start the ranks, wait for them, and return the exit code for the shell: the code of the rank
    that failed first.

    Prints the message of that rank. A rank executes `command` with `argv`, or, without a command,
    `run_rank(argv)` in a process of torch.multiprocessing. Raises ResourceError if a port is taken,
    or the agents don't find each other.
    """
    for name in logging.root.manager.loggerDict:  # each of torch's modules sets its own level
        if name.startswith(
            ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = cpu_threads(config.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # the number changes last bits
    os.environ[LAUNCHED_VARIABLE] = str(os.getpid())
    _install_signal_handlers()
    if config.max_nodes > 1:  # torch waits silently
        node = f"node {config.rdzv_configs['rank']} of {config.max_nodes}"
        print(f"{node}: rendezvous at {config.rdzv_endpoint}", flush=True)
    entrypoint: Any
    if command is not None:
        entrypoint = command[0]
        entry_arguments: list[Any] = [*command[1:], *argv]
    else:
        entrypoint = _spawned_rank
        entry_arguments = [run_rank, list(argv)]
        # The ranks import torch's modules, and not a `queue.py` of the user's working directory.
        sys.path[:] = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]
        os.environ["PYTHONSAFEPATH"] = "1"
    with tempfile.TemporaryDirectory(prefix="imagenet-cls-", ignore_cleanup_errors=True) as folder:
        config.logs_specs = DefaultLogsSpecs(folder)  # error files are there, too
        try:
            elastic_launch(config, entrypoint)(*entry_arguments)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            message = failure.message if Path(failure.error_file).is_file() else ""
            return print_rank_failure(rank, failure.exitcode, message)
        except SignalException as stop:
            # A rank may have failed to save.
            file = next(Path(folder).rglob("*.json"), None)
            if file is not None:
                error = json.loads(file.read_text())
                print_error(error["message"], error["exit_code"])
                return int(error["exit_code"])
            return 128 + int(stop.sigval)
        except (OSError, DistError, RendezvousError) as error:
            raise ResourceError(
                f"Could not start {config.nproc_per_node} ranks ({first_line(error)[:200]}).",
                "Check the address, the port (MASTER_PORT) and the limits, and that every machine "
                "was started.",
            ) from error
        finally:
            # torch leaves them running if the start fails
            for process in multiprocessing.active_children():
                process.terminate()
    return 0


def _install_signal_handlers() -> None:
    """Raise SignalException for the first signal, and ignore others: schedulers repeat SIGTERM.

    At a second Ctrl-C, `handle_stop_signals` exits.
    """
    seen = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            raise SignalException(f"signal {number}", signal.Signals(number))

    handle_stop_signals(handle)


def _spawned_rank(run_rank: RunRank, argv: list[str]) -> None:
    """One rank, in a process of torch.multiprocessing."""
    os.setsid()  # a terminal's Ctrl-C reaches the launching process only, which forwards it
    code = run_rank(argv)
    if code != 0:
        hard_exit(code)
    atexit.register(hard_exit, 0)  # the agent waits until this function has returned on all ranks
