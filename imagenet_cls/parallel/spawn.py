"""Ranks by torch.multiprocessing: one server imports the libraries once and forks them (`spawn`).

Owns these processes: the server, the ranks' environment, how they meet, signals. Called by `ranks`.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path

import imagenet_cls
from imagenet_cls.errors import UsageError
from imagenet_cls.interrupts import end_by_interrupts, raise_interrupts
from imagenet_cls.parallel.exit import (
    ERROR_FILE_VARIABLE,
    PATIENCE_AFTER_FAILURE_SEC,
    report_failure,
    shell_code,
)
from imagenet_cls.parallel.launch import DEFAULT_PORT, Ranks, variables


def start_server(ranks: Ranks) -> None:
    """Start the process that is to fork the ranks, so that its imports run beside what this process has to do first.

    It has not touched a GPU when it forks.
    """
    preload = ["imagenet_cls.parallel.fork_server", "torch", "torchvision", "timm", "imagenet_cls.commands.train"]
    multiprocessing.set_forkserver_preload(preload)
    environment = dict(os.environ)
    root = Path(imagenet_cls.__file__).parents[1]
    try:
        os.environ.update(variables(ranks), PYTHONSAFEPATH="1")  # not what lies in the folder where the user stands
        if not root.name.endswith("-packages"):  # a checkout, perhaps not installed
            os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [environment.get("PYTHONPATH")])])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(environment)


def run_spawn(ranks: Ranks, argv: Sequence[str], run_rank: Callable[[Sequence[str]], None]) -> int:
    """Start the ranks of this machine, wait for them, and return the exit code that a shell should see.

    The code is the one of the rank that failed first, and its message is printed here, once. argv: what the ranks
    are to do. run_rank: the function that does it; importable, and it ends its process itself.
    """
    import torch.multiprocessing as mp

    raise_interrupts()  # there is a folder to be removed
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    shared, _store = _meeting_place(ranks)  # the store lives as long as this function
    with tempfile.TemporaryDirectory(prefix="imagenet-cls-") as folder:
        first_rank = ranks.node_rank * ranks.gpus
        arguments = (run_rank, list(argv), shared, first_rank, folder)
        context = mp.start_processes(_spawned, arguments, ranks.gpus, join=False, start_method="forkserver")
        _forward_signals(lambda: [p.pid for p in context.processes])
        try:
            while not context.join(timeout=1.0, grace_period=PATIENCE_AFTER_FAILURE_SEC):
                pass
        except mp.ProcessExitedException as failure:
            report_failure(
                first_rank + failure.error_index, failure.exit_code, Path(folder) / f"{failure.error_index}.json"
            )
            return shell_code(failure.exit_code)
    return 0


def _meeting_place(ranks: Ranks) -> tuple[dict[str, str], object]:
    """The variables that all spawned ranks share, and what this process has to keep for them while they run.

    On one machine the launching process itself serves the store that the ranks meet in, as torchrun's agent does: the
    port is held from the moment that it was found free, so two jobs that start at once can't be given the same.
    """
    import torch.distributed as dist

    if not ranks.nodes.isdigit():
        raise UsageError(f"--nodes {ranks.nodes}: an elastic number of machines needs --launcher pytorch.")
    nodes = int(ranks.nodes)
    shared = {"WORLD_SIZE": str(ranks.gpus * nodes), "LOCAL_WORLD_SIZE": str(ranks.gpus)}
    shared |= {name: os.environ.get(name, "") for name in ("PYTHONPATH", "PYTHONSAFEPATH")}  # not the server's
    if ranks.by_file:
        return shared, None
    if nodes > 1:
        if ranks.master_addr is None:
            raise UsageError(
                "--launcher spawn on several machines: the ranks need an address to meet at.\n"
                "Add parallel.init_method=tcp://FIRST_MACHINE:PORT, the same on each machine."
            )
        shared |= {"MASTER_ADDR": ranks.master_addr, "MASTER_PORT": str(ranks.master_port or DEFAULT_PORT)}
        return shared, None
    host = ranks.master_addr or "127.0.0.1"
    store = dist.TCPStore(host, ranks.master_port or 0, is_master=True, wait_for_workers=False)
    shared |= {"MASTER_ADDR": host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return shared, store


def _spawned(
    local_rank: int,
    run_rank: Callable[[Sequence[str]], None],
    argv: list[str],
    env: dict[str, str],
    first_rank: int,
    folder: str,
) -> None:
    end_by_interrupts()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR2])
    os.environ.update(env, RANK=str(first_rank + local_rank), LOCAL_RANK=str(local_rank))
    os.environ[ERROR_FILE_VARIABLE] = str(Path(folder) / f"{local_rank}.json")
    threading.Thread(target=_stop_with_launcher, daemon=True).start()
    run_rank(argv)


def _stop_with_launcher() -> None:
    """Send this rank SIGTERM once the launching process is gone, however it went: see `ending.die_with_launcher`.

    The parent of a spawned rank is the server that forked it. Where the kernel watches over parents (Linux), that one
    ends with the launching process, and this is only another way to know.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "ranks are started by multiprocessing"
    launcher.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _forward_signals(pids: Callable[[], list[int | None]]) -> None:
    """Pass a stop on to the ranks, which decide; a terminal's Ctrl-C reaches them by itself, too, and they take both
    for one (`stop`). To the end of this process: once the ranks are gone, it has only to clean up and to say why."""

    def pass_on(number: int, frame: object) -> None:
        for pid in pids():
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(pid, number)  # type: ignore[arg-type]

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
