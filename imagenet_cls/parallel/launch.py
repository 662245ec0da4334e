"""Starting ranks on this machine: by torch.multiprocessing (spawn), or by torchrun's elastic agent (pytorch).

Owns the processes of the ranks: their environment, the first failing rank's exit code and its message, signals.
Refuses to check configs: `cli` has done that before it calls `start_ranks`. The ranks run the same command line
again.
"""

import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel.place import LAUNCHED_VARIABLE, address_towards, cpu_threads

# torchrun's own variable: the file that a failing rank leaves its message in.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

# Also torchrun's: how often it may start the ranks again.
_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
_STOPPED_FILE = "stopped"

# Where several machines meet, unless the user names another port: torch's own default.
DEFAULT_PORT = 29500

# How long a rank that was asked to stop may take to save before it is killed; and once one has failed, how long the
# others may take to end by themselves, and then, by SIGTERM, again.
_PATIENCE_WITH_STOP_SEC = 300
_PATIENCE_AFTER_FAILURE_SEC = 3.0

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Ranks:
    """What is to be started.

    gpus: processes on this machine. nodes: machines; `1:4` for an elastic job (pytorch). node_rank: which of them this
    is. by_file: the ranks meet in a file (parallel.init_method), so nobody needs an address. A port that is not given
    is a free one on one machine, and `DEFAULT_PORT` on several.
    """

    launcher: str
    gpus: int
    nodes: str = "1"
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0
    by_file: bool = False


def start_ranks(ranks: Ranks, script: str, argv: Sequence[str], run_rank: Callable[[Sequence[str]], None]) -> int:
    """Start the ranks of this machine, wait for them, and return the exit code that a shell should see.

    script, argv: the command line that each rank runs (pytorch). run_rank: the function that does the same from inside
    Python (spawn); it must be importable and end its process itself.

    The code is the one of the rank that failed first, and its message is printed here, once.
    """
    os.environ[LAUNCHED_VARIABLE] = str(os.getpid())
    # The number of threads changes the last bits of a result, so it is always set, not only by one of the launchers.
    os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(ranks.gpus)))
    if ranks.launcher == "spawn":
        return _spawn(ranks, argv, run_rank)
    return _torchrun(ranks, script, argv)


def refuse_too_many_ranks(gpus: int, device: str) -> None:
    """Raise UsageError for more ranks than this machine has GPUs. Ranks on the CPU may be as many as one likes."""
    import torch

    present = torch.cuda.device_count()
    if device != "cpu" and 0 < present < gpus:
        raise UsageError(
            f"{gpus} ranks were asked for, but this machine shows {present} GPUs.\n"
            f"Ask for at most {present}, check CUDA_VISIBLE_DEVICES, or use device=cpu for ranks on the CPU."
        )


def refuse_taken_port(ranks: Ranks) -> None:
    """Raise ResourceError where this machine can't listen on the port that it is to: taken, or not allowed."""
    if ranks.master_port is None or ranks.node_rank != 0 or ":" in ranks.nodes:  # an elastic job's agents may share it
        return
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # what a run that has just ended leaves is no hindrance
        try:
            probe.bind(("", ranks.master_port))
        except OSError as error:
            raise ResourceError(
                f"the ranks can't meet on port {ranks.master_port} of this machine: {error.strerror}\n"
                "Name another (MASTER_PORT, --master-port, parallel.init_method). On one machine, leave it out: a free "
                "one is found."
            ) from error


def die_with_launcher() -> None:
    """In a rank that our launching process started: ask for SIGTERM when that process is gone, however it went.

    A launcher that was killed can't end its ranks, and they would go on unseen. On SIGTERM a training rank saves. To be
    called first in a rank, from its main thread; does nothing elsewhere. Linux only: other systems keep ranks of
    torchrun's agent, though not spawned ones (`_stop_with_launcher`).
    """
    launcher = os.environ.get(LAUNCHED_VARIABLE)
    if launcher is None or not signal_when_parent_dies(signal.SIGTERM):
        return
    try:
        os.kill(int(launcher), 0)
    except ProcessLookupError:  # it was gone before the kernel knew of our wish
        os._exit(128 + signal.SIGTERM)


def signal_when_parent_dies(number: signal.Signals) -> bool:
    """Ask the kernel for a signal once this process's parent is gone: the thread of it, that is, that started us.

    Returns whether it can (Linux).
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0


def write_error_file(message: str, exit_code: int) -> None:
    """Leave this rank's message where the process that started it looks for it (in torchrun's own format)."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path:
        extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
        record = {"message": {"message": message, "errorCode": exit_code, "extraInfo": extra}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(record))


def code_after_stop(code: int) -> int:
    """What a rank that was stopped as asked ends with: the exit code of that, unless it would be started again for it.

    torchrun's agent starts ranks again (--max-restarts) that end with anything but 0. So this one ends with 0 then, and
    leaves the code in a file for our launching process.
    """
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if LAUNCHED_VARIABLE not in os.environ or os.environ.get(_RESTARTS_VARIABLE, "0") == "0" or not error_file:
        return code
    Path(error_file).with_name(_STOPPED_FILE).write_text(str(code))
    return 0


def _exit_code(code: int) -> int:
    """A shell's exit code for a process's: 128 + n for one that signal n ended."""
    return 128 - code if code < 0 else code


def _report(rank: int, code: int, error_file: Path | None) -> None:
    """Print the failing rank's message, or what can be said of a rank that left none."""
    if code - 128 in (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM):
        return  # stopped as asked, and rank 0 has said so
    message = ""
    if error_file is not None and error_file.is_file():
        with contextlib.suppress(ValueError, KeyError):
            message = json.loads(error_file.read_text())["message"]["message"]
    if not message and code < 0:
        name = signal.Signals(-code).name
        hint = "the kernel may have run out of memory (see `dmesg`)" if -code == signal.SIGKILL else "somebody sent it"
        message = (
            f"rank {rank} was killed by {name}: {hint}; the other ranks were ended.\n"
            "Go on with the same command and --resume."
        )
    elif not message:
        message = (
            f"rank {rank} ended with exit code {code} and left no message; see logs/rank{rank}.log in the run folder."
        )
    print(message, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------- spawn


def _spawn(ranks: Ranks, argv: Sequence[str], run_rank: Callable[[Sequence[str]], None]) -> int:
    import torch.multiprocessing as mp

    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    shared, _store = _meeting_place(ranks)  # the store lives as long as this function
    with tempfile.TemporaryDirectory(prefix="imagenet-cls-") as folder:
        first_rank = ranks.node_rank * ranks.gpus
        arguments = (run_rank, list(argv), shared, first_rank, folder)
        # One server imports torch once and forks the ranks, before anything in it has touched a GPU.
        mp.set_forkserver_preload(["torch", "torchvision", "timm", "imagenet_cls.cli"])
        context = mp.start_processes(_spawned, arguments, ranks.gpus, join=False, start_method="forkserver")
        forward = _forward_signals(lambda: [p.pid for p in context.processes])
        try:
            while not context.join(timeout=1.0, grace_period=_PATIENCE_AFTER_FAILURE_SEC):
                pass
        except mp.ProcessExitedException as failure:
            _report(first_rank + failure.error_index, failure.exit_code, Path(folder) / f"{failure.error_index}.json")
            return _exit_code(failure.exit_code)
        finally:
            forward()
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
    os.environ.update(env, RANK=str(first_rank + local_rank), LOCAL_RANK=str(local_rank))
    os.environ[ERROR_FILE_VARIABLE] = str(Path(folder) / f"{local_rank}.json")
    threading.Thread(target=_stop_with_launcher, daemon=True).start()
    run_rank(argv)


def _stop_with_launcher() -> None:
    """Send this rank SIGTERM once the launching process is gone, however it went: see `die_with_launcher`.

    The kernel watches over parents only, and the parent of a spawned rank is the server that forked it, which lives as
    long as its ranks do.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "ranks are started by multiprocessing"
    launcher.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _forward_signals(pids: Callable[[], list[int | None]]) -> Callable[[], None]:
    """Pass a stop on to the ranks, which decide; a terminal's Ctrl-C reaches them by itself. Returns the undo."""

    def pass_on(number: int, frame: object) -> None:
        if number != signal.SIGINT:
            for pid in pids():
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(pid, number)  # type: ignore[arg-type]

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}

    def undo() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    return undo


# ---------------------------------------------------------------------------------------------- torchrun


def _torchrun(ranks: Ranks, script: str, argv: Sequence[str]) -> int:
    """torch.distributed.run, called as a function: as a program it turns every exit code into 1, in 44 lines."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_PATIENCE_WITH_STOP_SEC))
    # What the other ranks are granted once one has failed. There is no option for it, only this default, of 30 s: too
    # long for ranks that wait for one that is gone.
    PContext.close.__defaults__ = (None, int(2 * _PATIENCE_AFTER_FAILURE_SEC))
    passed_on = "SIGTERM,SIGINT,SIGQUIT,SIGUSR2"
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup torchrun would listen to it all the same
        passed_on += ",SIGHUP"
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", passed_on)
    meeting = _meeting_words(ranks)
    words = [f"--nproc-per-node={ranks.gpus}", f"--nnodes={ranks.nodes}", f"--max-restarts={ranks.max_restarts}"]
    # Where ranks leave their messages. A folder of torchrun's own would stay behind.
    with tempfile.TemporaryDirectory(prefix="imagenet-cls-", ignore_cleanup_errors=True) as folder:
        try:
            torchrun.run(torchrun.parse_args([*words, *meeting, f"--log-dir={folder}", script, *argv]))
            return max((int(file.read_text()) for file in Path(folder).rglob(_STOPPED_FILE)), default=0)
        except ChildFailedError as failure:
            rank, first = failure.get_first_failure()
            _report(rank, first.exitcode, Path(first.error_file) if first.error_file else None)
            return _exit_code(first.exitcode)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        except (OSError, DistError, RendezvousError) as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise ResourceError(
                f"could not start {ranks.gpus} ranks ({' '.join(meeting)}): {reason}\n"
                "Check the address, the port and the limits, and that every machine was started."
            ) from error


def _meeting_words(ranks: Ranks) -> list[str]:
    """torchrun's options for where its agents, one on each machine, meet.

    Where ranks may be started again, agents meet by c10d and each round of ranks at a port of its own: torch 2.15 keeps
    the store of the round before otherwise, and with it addresses of ranks that are dead. Which machine has rank 0 is
    open then, so the run folder must be on a disk that all share.
    """
    restarts = ":" in ranks.nodes or ranks.max_restarts > 0
    if restarts:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    master = ranks.master_addr or "127.0.0.1"
    if ranks.nodes == "1" and ranks.master_port is None:  # the agent takes a free port and holds it
        return ["--standalone", "--local-addr=127.0.0.1"]
    port = ranks.master_port or DEFAULT_PORT
    if restarts:
        endpoint = ["--rdzv-backend=c10d", f"--rdzv-endpoint={master}:{port}", "--rdzv-id=imagenet-cls"]
        return [*endpoint, f"--local-addr={address_towards(master)}"]
    if ranks.nodes != "1" and ranks.master_addr is None:
        raise UsageError(
            f"{ranks.nodes} machines need one address to meet at, and none was given.\n"
            "On each, set MASTER_ADDR (--master-addr) to the first machine's address, and NODE_RANK to 0, 1, ..."
        )
    return [f"--node-rank={ranks.node_rank}", f"--master-addr={master}", f"--master-port={port}"]
