"""The rendezvous of the ranks: its address or file, the wait for all ranks, and the error if one is missing."""

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.errors import ResourceError, UsageError, first_line
from imagenet_cls.parallel.environment import RankInfo, name_ranks

if TYPE_CHECKING:  # the launching process imports torch later
    from torch.distributed import Store

_RETRY_SEC = 0.2
# The other ranks wait this much longer for rank 0's list of missing ranks, and rank 0 stays as long to serve it.
_LIST_SEC = 2.0


@dataclass(frozen=True)
class Rendezvous:
    """Either an address and a port, or a file."""

    host: str = ""
    port: int = 0
    file: Path | None = None

    def __str__(self) -> str:
        return str(self.file or f"{self.host}:{self.port}")


def find_rendezvous(env: Mapping[str, str], init_method: str, rank_info: RankInfo) -> Rendezvous:
    """The rendezvous named by a checked `parallel.init_method`, or with `env://` by the environment.

    Raises UsageError if MASTER_ADDR or MASTER_PORT is missing or not valid.
    """
    if init_method.startswith("file:"):
        return Rendezvous(file=Path(init_method.removeprefix("file://")))
    if init_method != "env://":
        host, _, port = init_method.removeprefix("tcp://").rpartition(":")
        return Rendezvous(host.strip("[]"), int(port))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise UsageError(
            f"rank {rank_info.rank} of {rank_info.world_size} can't find the others: {' and '.join(missing)} not set.\n"
            "Set both to the first machine's address and a free port of it, or start with scripts/dist_train.sh."
        )
    port = env["MASTER_PORT"]
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(
            f"MASTER_PORT is {port!r}, which is not a port: a whole number from 1 to 65535.\n"
            "Set it to a free port of the first machine, the same for all ranks."
        )
    return Rendezvous(env["MASTER_ADDR"].strip("[]"), int(port))


def check_rendezvous_file(path: Path, max_age_sec: float | None) -> None:
    """Raise UsageError for a file that can't be made, ResourceError for one that an earlier run left.

    Ranks would wait for those of the earlier run. max_age_sec: since when this run's own ranks may have written the
    file; None if unknown.
    """
    if path.is_dir() or not path.parent.is_dir():
        wrong = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(
            f"rendezvous failed in {path}: {wrong}.\nName a new file in an existing folder (parallel.init_method)."
        )
    if max_age_sec is None or not path.exists():
        return
    found = path.stat()
    if found.st_size and time.time() - found.st_mtime >= max_age_sec:
        raise ResourceError(
            f"rendezvous failed in {path}: a killed run has left this file.\n"
            "Remove that file (parallel.init_method), and start again."
        )


def wait_until_reachable(rendezvous: Rendezvous, timeout_sec: float, is_server: bool) -> None:
    """Wait until the rendezvous's machine answers. Raises OSError with the reason, which torch's store does not name.

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


def open_store(rendezvous: Rendezvous, rank_info: RankInfo, timeout_sec: float) -> "Store":
    """torch's store at the rendezvous, served by rank 0 unless a launching process serves it.

    Waits for the server only: torch's `init_method` waits for all ranks and can't name a missing one.
    """
    import torch.distributed as dist

    if rendezvous.file is not None:
        return dist.FileStore(str(rendezvous.file), rank_info.world_size)
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (
        os.environ.get("MASTER_ADDR"),
        os.environ.get("MASTER_PORT"),
    ) == (rendezvous.host, str(rendezvous.port))
    store = dist.TCPStore(
        rendezvous.host, rendezvous.port, is_master=rank_info.is_main and not served,
        timeout=timedelta(seconds=timeout_sec), wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip
    # A launcher's store outlives ranks that it restarts, with all their keys. Rank 0's store is new each time, and the
    # launchers of several machines may have counted different numbers of restarts.
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store) if served else store


def wait_for_all_ranks(store: "Store", rank_info: RankInfo, timeout_sec: float) -> None:
    """Wait until every rank has reached the store. Raises TimeoutError with the missing ranks, the same on every rank.

    Rank 0 makes the list; if rank 0 is missing, each rank makes its own.
    """
    prefix = "arrival"
    keys = [f"{prefix}/rank {rank}" for rank in range(rank_info.world_size)]
    wait = timedelta(seconds=timeout_sec)
    store.set(keys[rank_info.rank], "here")
    missing: list[int] = []
    try:
        if rank_info.is_main:
            store.wait(keys, wait)
        else:
            store.wait([f"{prefix}/missing"], wait + timedelta(seconds=_LIST_SEC))
            missing = json.loads(store.get(f"{prefix}/missing"))
    except RuntimeError as error:  # torch's DistStoreError, or a plain one from a file's store
        if "timeout" not in str(error).lower():
            raise
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if rank_info.is_main:
        store.set(f"{prefix}/missing", json.dumps(missing))
    if missing:
        if rank_info.is_main:
            time.sleep(_LIST_SEC)  # the store may end with this process
        raise TimeoutError(f"missing: {name_ranks(missing)} of {rank_info.world_size}")


def rendezvous_error(
    error: Exception, rendezvous: Rendezvous, rank_info: RankInfo, timeout_sec: float
) -> ResourceError:
    """The error of a rank whose rendezvous failed."""
    text = first_line(error)[:200]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        text = "the port is taken, by another program or another rank 0"
    elif text.startswith("wait timeout"):  # followed by keys of torch's store
        text = "another rank is missing, or has another number of ranks"
    elif isinstance(error, OSError) and error.strerror:
        text = f"no answer: {error.strerror}"
    return ResourceError(
        f"rank {rank_info.rank} of {rank_info.world_size}: rendezvous at {rendezvous} failed "
        f"(timeout {timeout_sec:g} s):\n{text}\n"
        "Check that every rank was started, once, that all name the same address and port, and that the port is free."
    )
