"""Rendezvous and process groups of the ranks.

The default process group for gradients, and a gloo group on the CPU for all else.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel.devices import start_gpu
from imagenet_cls.parallel.environment import RankInfo, complete_master_address, name_ranks
from imagenet_cls.parallel.exit import abort_rank
from imagenet_cls.parallel.network import choose_interface
from imagenet_cls.text import command_line, first_line

# Texts of gloo, nccl and the system for a connection that another rank has ended.
_LOST_CONNECTION = "connection (was )?(closed|reset|refused|timed out)|broken pipe|no route to host"
# nccl's texts for failures of its own. Its other errors name a remote process or a timeout.
_NCCL_FAILURE = "unhandled (cuda|system) error|internal error|invalid (argument|usage)"
_RETRY_SEC = 0.2
# If ranks are missing, rank 0 serves the store for this much longer, so that the other ranks can
# read which ones are missing.
_SERVE_SEC = 2.0
_RENDEZVOUS_EXTRA_SEC = 10.0  # a rendezvous fails after two timeouts and this time
# nccl's watchdog ends a process without an error of ours. So its timeout is longer than that of the
# CPU group.
_NCCL_EXTRA = timedelta(seconds=10)


@dataclass(frozen=True)
class RankContext:
    """This rank, its device, and its connections to the other ranks.

    torch's default process group has no attribute here. cpu_group: the gloo group; None for a
    single rank. rendezvous_file: the file of a `file://` rendezvous.
    """

    rank_info: RankInfo
    device: torch.device
    cpu_group: Any = None
    rendezvous_file: Path | None = None

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        return self.rank_info.world_size

    @property
    def is_main(self) -> bool:
        return self.rank_info.is_main


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet: at an address and a port, or at a file.

    served: whether torchrun's agent serves torch's store there; otherwise rank 0 does.
    """

    host: str = ""
    port: int = 0
    file: Path | None = None
    served: bool = False

    def __str__(self) -> str:
        return str(self.file or f"{self.host}:{self.port}")


def check_backend(backend: str, launcher: str) -> None:
    """Raise UsageError for a backend that torch lacks, that needs GPUs, or that the launcher does
    not support.
    """
    if backend != "auto" and not dist.is_backend_available(backend):
        problem = f"torch {torch.__version__} was built without it"
    elif backend == "nccl" and torch.cuda.device_count() == 0:
        problem = f"torch {torch.__version__} sees no GPU here"
    elif backend == "mpi" and launcher in ("spawn", "pytorch"):
        problem = f"its ranks are started by mpirun, not by --launcher {launcher}"
    else:
        return
    raise UsageError(
        f"parallel.backend={backend}: {problem}.",
        "Use parallel.backend=auto (nccl on GPUs, gloo on CPUs), also under mpirun.",
    )


def init_process_groups(
    rank_info: RankInfo,
    device: torch.device,
    mode: str,
    backend: str,
    init_method: str,
    timeout_sec: float,
) -> RankContext:
    """Rendezvous with the other ranks. A single rank needs none, and gets a process group only if
    `mode` is `ddp`.

    backend: `auto` (nccl on GPUs, gloo on CPUs), `nccl`, `gloo` or `mpi`. timeout_sec: longest wait
    for another rank, here and in collectives. Sets variables in `os.environ` that are not set: see
    `complete_master_address` and `choose_interface`. Raises UsageError for a wrong MASTER_ADDR,
    MASTER_PORT or backend, ResourceError if the rendezvous fails.
    """
    if rank_info.world_size > 1 or mode == "ddp":
        check_backend(backend, rank_info.launcher)
    if device.type == "cuda":
        start_gpu(device)
    # Plain `mpi` would make a group without a store, in which no gloo group can be made.
    full_names = {"auto": "nccl" if device.type == "cuda" else "gloo", "mpi": "cpu:mpi,cuda:mpi"}
    backend = full_names.get(backend, backend)
    if rank_info.world_size == 1:
        # `imagenet_cls.train` may be called again, and a group of one rank is not destroyed.
        if mode == "ddp" and not dist.is_initialized():
            bound_to = bound_device(backend, device)
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound_to
            )
        return RankContext(rank_info, device)
    complete_master_address(os.environ, rank_info)
    if rank_info.launched and init_method.startswith("tcp:"):
        # the launching processes use that address; the ranks have another port
        init_method = "env://"
    rendezvous = find_rendezvous(os.environ, init_method, rank_info)
    several_machines = rank_info.local_world_size < rank_info.world_size
    if rendezvous.file is not None and rank_info.is_main:
        check_rendezvous_file(rendezvous.file, timeout_sec)
    # With a file, the machine of rank 0 is unknown.
    master = rendezvous.host or (socket.gethostname() if several_machines else "127.0.0.1")
    timeout = timedelta(seconds=timeout_sec)
    # torch has no timeout for a server that does not answer, and for a file with other contents.
    no_answer = rendezvous_error(
        TimeoutError("the program there does not answer"), rendezvous, rank_info, timeout_sec
    )
    watchdog = Timer(2 * timeout_sec + _RENDEZVOUS_EXTRA_SEC, abort_rank, (rank_info, no_answer))
    watchdog.daemon = True
    try:
        wait_until_reachable(rendezvous, timeout_sec, rank_info.is_main)
        choose_interface(os.environ, master, several_machines)
        watchdog.start()
        store = open_store(rendezvous, rank_info, timeout_sec)
        wait_for_all_ranks(store, rank_info, timeout_sec)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            timeout=timeout + (_NCCL_EXTRA if backend == "nccl" else timedelta()),
            device_id=bound_device(backend, device),
        )
        # Separate even if gloo reduces the gradients: a stop request may come between any two
        # collectives.
        cpu_group = dist.new_group(backend="gloo", timeout=timeout)
    # UnicodeError, for a bad host name, too
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        failed = nccl_error(error, rank_info.rank)  # with a device_id, nccl connects here
        raise failed or rendezvous_error(error, rendezvous, rank_info, timeout_sec) from error
    finally:
        watchdog.cancel()
    return RankContext(rank_info, device, cpu_group, rendezvous.file)


def bound_device(backend: str, device: torch.device) -> torch.device | None:
    """The `device_id` of a process group. Without it, torch guesses a GPU from the rank."""
    return device if backend == "nccl" else None


def name_flight_recorder_files(env: MutableMapping[str, str], logs: Path) -> None:
    """Have nccl's process group write its last collectives to `nccl_trace_rank<r>` in the folder
    `logs` after a timeout, unless a variable names a file.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        env.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{logs.absolute()}/nccl_trace_rank")


def find_rendezvous(env: Mapping[str, str], init_method: str, rank_info: RankInfo) -> Rendezvous:
    """The rendezvous that `parallel.init_method` names, or with `env://` the environment. Raises
    UsageError.
    """
    if init_method.startswith("file:"):
        return Rendezvous(file=Path(init_method.removeprefix("file://")))
    if init_method != "env://":
        host, _, port = init_method.removeprefix("tcp://").rpartition(":")
        return Rendezvous(host.strip("[]"), int(port))
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(
            f"Rank {rank_info.rank} of {rank_info.world_size} can't find the others: MASTER_ADDR "
            f"is {host!r}, MASTER_PORT is {port!r}.",
            "Set both to the first machine's address and a free port of it, or start the ranks by "
            "--gpus N.",
        )
    return Rendezvous(
        host.strip("[]"), int(port), served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def check_rendezvous_file(path: Path, max_age_sec: float) -> None:
    """Raise UsageError for a file that can't be made, ResourceError for one that is older than
    max_age_sec.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"parallel.init_method: can't make {path}.", "Name a new file in an existing folder."
        )
    if path.exists() and path.stat().st_size and time.time() - path.stat().st_mtime >= max_age_sec:
        raise ResourceError(
            f"Rendezvous failed in {path}: a killed run has left this file.",
            "Remove that file (parallel.init_method), and start again.",
        )


def wait_until_reachable(rendezvous: Rendezvous, timeout_sec: float, is_server: bool) -> None:
    """Wait until the rendezvous's machine answers. Raises OSError with the reason, which torch's
    store does not name.

    is_server: this process will listen there, so a refused connection is enough.
    """
    if rendezvous.file is not None:
        return
    end = time.monotonic() + timeout_sec
    while True:
        try:
            left = max(_RETRY_SEC, end - time.monotonic())
            socket.create_connection((rendezvous.host, rendezvous.port), timeout=left).close()
            return
        except OSError as error:
            if is_server and isinstance(error, ConnectionRefusedError):
                return
            if time.monotonic() + _RETRY_SEC >= end:
                raise
        time.sleep(_RETRY_SEC)


def open_store(rendezvous: Rendezvous, rank_info: RankInfo, timeout_sec: float) -> dist.Store:
    """torch's store at the rendezvous, served by rank 0 unless a launching process serves it. Waits
    for the server.
    """
    if rendezvous.file is not None:
        return dist.FileStore(str(rendezvous.file), rank_info.world_size)
    store = dist.TCPStore(
        rendezvous.host,
        rendezvous.port,
        is_master=rank_info.is_main and not rendezvous.served,
        timeout=timedelta(seconds=timeout_sec),
        wait_for_workers=False,
        multi_tenant=True,
    )
    # A launcher's store outlives ranks that it restarts, with all their keys. Rank 0's store is new
    # each time, and the launchers of several machines may have counted different numbers of
    # restarts.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start {restarts}", store) if rendezvous.served else store


def wait_for_all_ranks(store: dist.Store, rank_info: RankInfo, timeout_sec: float) -> None:
    """Wait until every rank has reached the store. Raises TimeoutError with the missing ranks."""
    keys = [f"arrival/rank {rank}" for rank in range(rank_info.world_size)]
    store.set(keys[rank_info.rank], "here")
    try:
        store.wait(keys, timedelta(seconds=timeout_sec))
    except RuntimeError as error:  # torch's DistStoreError, or a plain one from a file's store
        if "timeout" not in str(error).lower():
            raise
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        time.sleep(_SERVE_SEC if rank_info.is_main else 0.0)
        raise TimeoutError(f"missing: {name_ranks(missing)} of {rank_info.world_size}") from None


def rendezvous_error(
    error: Exception, rendezvous: Rendezvous, rank_info: RankInfo, timeout_sec: float
) -> ResourceError:
    """The error of a rank whose rendezvous failed."""
    return ResourceError(
        f"Rank {rank_info.rank} of {rank_info.world_size}: rendezvous at {rendezvous} failed "
        f"(timeout {timeout_sec:g} s):\n{first_line(error)[:200]}",
        "Check that every rank was started, once, that all name the same address and port, and "
        "that the port is free.",
    )


def nccl_error(error: BaseException, rank: int) -> ResourceError | None:
    """The error of a rank on which nccl itself has failed; None for other errors and a lost
    rank.
    """
    text = str(error)
    is_of_nccl = isinstance(error, RuntimeError) and "nccl" in text.lower()
    is_lost = re.search(_LOST_CONNECTION, text, re.IGNORECASE)
    if not is_of_nccl or is_lost or not re.search(_NCCL_FAILURE, text, re.IGNORECASE):
        return None
    lines = re.split("last error:", text, flags=re.IGNORECASE)[-1].strip().splitlines()
    reason = lines[0] if lines else first_line(error)
    return ResourceError(
        f"Rank {rank}: nccl failed: {reason[:300]}",
        "Frequent causes are a full /dev/shm, two ranks on one GPU, and an old driver. "
        f"Set NCCL_DEBUG=INFO for more, and run `{command_line('check-dist')}`, which checks the "
        "ranks.",
    )


def destroy_process_groups(context: RankContext) -> None:
    """Wait for all other ranks, and leave the process groups."""
    if context.cpu_group is None:
        return
    # Rank 0 may be saving, and a launcher ends all ranks once one has exited with an error code, as
    # after a stop.
    with contextlib.suppress(RuntimeError):
        dist.barrier(group=context.cpu_group)
        dist.destroy_process_group()
    if context.rendezvous_file is not None and context.is_main:
        context.rendezvous_file.unlink(missing_ok=True)


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective failed because another rank has exited or is late."""
    if isinstance(error, dist.DistError):
        return True
    pattern = f"gloo|nccl|{_LOST_CONNECTION}|timed out waiting|socket"
    return (
        isinstance(error, RuntimeError)
        and re.search(pattern, str(error), re.IGNORECASE) is not None
    )
