"""Start the ranks of this machine and wait for them: torchrun's agent (`pytorch`) or torch.multiprocessing (`spawn`).

Stop signals work alike for both. The launching process raises SignalException for the first one, forwards it to the
ranks, which save, and waits for them. A second Ctrl-C is forwarded, too, and ends ranks without saving; a third ends
the launching process, and the kernel kills the ranks with it.
"""

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from imagenet_cls.errors import ResourceError, UsageError, first_line
from imagenet_cls.interrupts import end_by_interrupts
from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE, address_towards, cpu_threads
from imagenet_cls.parallel.exit import (
    ERROR_FILE_VARIABLE,
    SECOND_INTERRUPT_SEC,
    STOP_SIGNALS,
    STOPPED_FILE,
    read_error_file,
    report_failure,
)

# The rendezvous of several machines uses this port unless the user names another: torch's default.
DEFAULT_PORT = 29500
# Time for ranks to save after a stop signal, and for the other ranks to exit after one has failed.
_STOP_TIMEOUT_SEC = 300
_FAILURE_GRACE_SEC = 3.0

RunRank = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Launch:
    """The ranks to start.

    gpus: ranks on this machine. timeout_sec: longest wait for other machines. nodes: machines; `1:4` for an elastic job
    (pytorch). node_rank: this machine's number. rendezvous_file: the rendezvous uses a file (parallel.init_method), so
    no address is needed. master_port: None for a free port on one machine, `DEFAULT_PORT` on several.
    """

    launcher: str
    gpus: int
    timeout_sec: float
    nodes: str = "1"
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0
    rendezvous_file: bool = False


def check_gpu_count(gpus: int, device: str) -> None:
    """Raise UsageError for more ranks than GPUs on this machine. Any number of ranks may share the CPU."""
    import torch

    present = torch.cuda.device_count()
    if device != "cpu" and 0 < present < gpus:
        raise UsageError(
            f"{gpus} ranks were requested, but this machine shows {present} GPUs.\n"
            f"Request at most {present}, check CUDA_VISIBLE_DEVICES, or use device=cpu."
        )


def check_port(launch: Launch) -> None:
    """Raise ResourceError if this machine has to listen on a port that is taken or not permitted."""
    if launch.master_port is None or launch.node_rank != 0 or ":" in launch.nodes:  # elastic agents may share a port
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does after a run that has just ended
        try:
            probe.bind(("", launch.master_port))
        except OSError as error:
            raise ResourceError(
                f"rendezvous failed on port {launch.master_port} of this machine: {error.strerror}\n"
                "Name another (MASTER_PORT, --master-port, parallel.init_method), or, on one machine, none."
            ) from error


def launch_ranks(launch: Launch, script: str, argv: Sequence[str], run_rank: RunRank) -> int:
    """Start the ranks, wait for them, and return the exit code for the shell: that of the rank that failed first.

    Its message is printed here, once. The ranks execute the same command: `script` with `argv` under torchrun's agent,
    `run_rank(argv)` if spawned.
    """
    import torch.multiprocessing as mp
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="imagenet-cls-", ignore_cleanup_errors=True) as folder:
        try:
            handler = _SignalHandler()
            for number in STOP_SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, handler)
            if launch.launcher == "spawn":
                _run_spawned(launch, argv, run_rank, Path(folder))
            else:
                _run_torchrun(launch, script, argv, folder)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            return report_failure(rank, failure.exitcode, Path(failure.error_file))
        except mp.ProcessExitedException as failed:
            rank = launch.node_rank * launch.gpus + failed.error_index
            return report_failure(rank, failed.exit_code, Path(folder, f"{failed.error_index}.json"))
        except SignalException as stop:
            for file in sorted(Path(folder).rglob("*.json")):  # a rank that failed to save
                message, code = read_error_file(file)
                if message:
                    return report_failure(0, code, file)
            return 128 + int(stop.sigval)
        return max((int(file.read_text()) for file in Path(folder).rglob(STOPPED_FILE)), default=0)


def _set_rank_environment(launch: Launch) -> None:
    """Set what all ranks inherit. The number of threads, which changes last bits, does not depend on the launcher."""
    os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(launch.gpus)))
    os.environ[LAUNCHED_VARIABLE] = str(os.getpid())


class _SignalHandler:
    """Raises SignalException for the first signal and the second Ctrl-C; a third Ctrl-C ends this process.

    Other signals after the first are ignored: schedulers repeat SIGTERM.
    """

    def __init__(self) -> None:
        self._times: list[float] = []  # of the first signal and of each Ctrl-C after it

    def __call__(self, number: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        now = time.monotonic()
        if self._times and (number != signal.SIGINT or now - self._times[-1] < SECOND_INTERRUPT_SEC):
            return
        self._times.append(now)
        if len(self._times) > 2:
            os._exit(128 + signal.SIGINT)
        raise SignalException(f"signal {number}", signal.Signals(number))


def _run_spawned(launch: Launch, argv: Sequence[str], run_rank: RunRank, folder: Path) -> None:
    """Start the ranks by torch.multiprocessing. Raises ProcessExitedException or SignalException."""
    import torch.multiprocessing as mp
    from torch.distributed.elastic.multiprocessing import SignalException

    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    _store = _serve_store(launch)  # for as long as the ranks run
    _set_rank_environment(launch)
    arguments = (run_rank, list(argv), launch.node_rank * launch.gpus, folder)
    # Ranks inherit the blocked signals and unblock them once they have handlers. The start of multiprocessing's tracker
    # unblocks some, so it comes first.
    with _working_directory_off_path():
        resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with _working_directory_off_path():
            context = mp.start_processes(_run_spawned_rank, arguments, launch.gpus, join=False, start_method="spawn")
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            while not context.join(timeout=1.0, grace_period=_FAILURE_GRACE_SEC):
                pass
        except SignalException as stop:
            _stop_spawned(context.processes, stop.sigval)
            raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def _working_directory_off_path() -> Iterator[None]:
    """Processes started inside import torch before anything that the user's working directory holds (a `queue.py`)."""
    path, safe_path = sys.path.copy(), os.environ.get("PYTHONSAFEPATH")
    sys.path[:] = [entry for entry in path if entry not in ("", str(Path.cwd()))]
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        sys.path[:] = path
        if safe_path is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = safe_path


def _stop_spawned(processes: Sequence[BaseProcess], number: int) -> None:
    """Forward a signal to the ranks and wait until they have saved; forward a second Ctrl-C, too."""
    from torch.distributed.elastic.multiprocessing import SignalException

    end = time.monotonic() + _STOP_TIMEOUT_SEC
    try:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    except SignalException as second:
        _stop_spawned(processes, second.sigval)
    for process in processes:
        process.kill()


def _run_spawned_rank(local_rank: int, run_rank: RunRank, argv: list[str], first_rank: int, folder: Path) -> None:
    os.setsid()  # a terminal's Ctrl-C reaches the launching process only, which forwards it
    end_by_interrupts()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ |= {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
    os.environ[ERROR_FILE_VARIABLE] = str(folder / f"{local_rank}.json")
    run_rank(argv)


def _serve_store(launch: Launch) -> object:
    """Set the environment that spawned ranks share; returns the store that this process serves, if it does.

    On one machine the launching process serves the ranks' store, as torchrun's agent does. It holds the port from the
    moment it is chosen, so two jobs that start at once can't share one.
    """
    import torch.distributed as dist

    if not launch.nodes.isdigit():
        raise UsageError(f"--nodes {launch.nodes}: an elastic number of machines needs --launcher pytorch.")
    nodes = int(launch.nodes)
    if nodes > 1 and launch.master_addr is None and not launch.rendezvous_file:
        raise UsageError(
            "--launcher spawn on several machines needs an address for the rendezvous.\n"
            "Add parallel.init_method=tcp://FIRST_MACHINE:PORT, the same on each machine."
        )
    os.environ |= {"WORLD_SIZE": str(launch.gpus * nodes), "LOCAL_WORLD_SIZE": str(launch.gpus)}
    if launch.rendezvous_file:
        return None
    if nodes > 1:
        assert launch.master_addr is not None
        os.environ |= {"MASTER_ADDR": launch.master_addr, "MASTER_PORT": str(launch.master_port or DEFAULT_PORT)}
        return None
    host = launch.master_addr or "127.0.0.1"
    store = dist.TCPStore(host, launch.master_port or 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return store


def _run_torchrun(launch: Launch, script: str, argv: Sequence[str], folder: str) -> None:
    """Start the ranks by torchrun's agent, called as a function: as a program it turns every exit code into 1.

    Raises ChildFailedError or SignalException, or ResourceError if the rendezvous of the agents fails.
    """
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.rendezvous import RendezvousError

    for name in logging.root.manager.loggerDict:  # each of torch's modules sets its own level
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous = _torchrun_rendezvous(launch)
    options = [f"--nproc-per-node={launch.gpus}", f"--nnodes={launch.nodes}", f"--max-restarts={launch.max_restarts}"]
    _set_rank_environment(launch)
    # No signal is left to torchrun, whose handler raises for each one, also during the clean-up.
    options += [f"--log-dir={folder}", f"--shutdown-timeout={_STOP_TIMEOUT_SEC}", "--signals-to-handle="]
    try:
        torchrun.run(torchrun.parse_args([*options, *rendezvous, script, *argv]))
    except (OSError, DistError, RendezvousError) as error:
        raise ResourceError(
            f"could not start {launch.gpus} ranks ({' '.join(rendezvous)}): {first_line(error)[:200]}\n"
            "Check the address, the port and the limits, and that every machine was started."
        ) from error


def _torchrun_rendezvous(launch: Launch) -> list[str]:
    """torchrun's options for the rendezvous of its agents, one on each machine.

    With restarts, agents use the c10d rendezvous and each round of ranks at a new port: otherwise torch 2.15 keeps the
    store of the previous round, and with it addresses of ranks that have exited. Any machine may then get rank 0, so
    the run folder must be on a shared disk.
    """
    restarts = ":" in launch.nodes or launch.max_restarts > 0
    if restarts:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    master = launch.master_addr or "127.0.0.1"
    if launch.nodes == "1" and launch.master_port is None:  # the agent takes a free port and holds it
        return ["--standalone", "--local-addr=127.0.0.1"]
    port = launch.master_port or DEFAULT_PORT
    if restarts:
        endpoint = ["--rdzv-backend=c10d", f"--rdzv-endpoint={master}:{port}", "--rdzv-id=imagenet-cls"]
        return [*endpoint, f"--local-addr={address_towards(master)}"]
    if launch.nodes != "1" and launch.master_addr is None:
        raise UsageError(
            f"{launch.nodes} machines need an address for their rendezvous.\n"
            "On each, set MASTER_ADDR (--master-addr) to the first machine's address, and NODE_RANK to 0, 1, ..."
        )
    if launch.nodes != "1":  # torch waits silently
        print(f"node {launch.node_rank} of {launch.nodes}: rendezvous at {master}:{port}", flush=True)
    timeout = f"--rdzv-conf=timeout={math.ceil(launch.timeout_sec)}"
    return [f"--node-rank={launch.node_rank}", f"--master-addr={master}", f"--master-port={port}", timeout]
