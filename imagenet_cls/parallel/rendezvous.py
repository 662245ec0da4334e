"""Where the ranks of a run meet: an address and a port, or a file.

Owns the finding of that place, the wait until it is there, the roll call, and the words for a meeting that failed.
Refuses to start a process group. Called by `parallel.group` and `ranks`.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel.environment import RankInfo, name_ranks

if TYPE_CHECKING:  # the launching process pays for torch later
    from torch.distributed import Store

# Between two looks whether the first machine is there.
_PAUSE_SEC = 0.2
# Rank 0 counts who is there, and the others wait this much longer for what it found; it stays so long to be heard.
_VERDICT_SEC = 2.0


@dataclass(frozen=True)
class Rendezvous:
    """Either an address and a port, or a file."""

    host: str = ""
    port: int = 0
    file: Path | None = None

    def __str__(self) -> str:
        return str(self.file or f"{self.host}:{self.port}")


def find_rendezvous(env: Mapping[str, str], init_method: str, rank_info: RankInfo) -> Rendezvous:
    """Where the ranks meet, by a checked `parallel.init_method` or, with `env://`, by the environment.

    Raises UsageError where MASTER_ADDR or MASTER_PORT is missing, or the latter is no port.
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


def check_rendezvous_file(path: Path, oldest_sec: float | None) -> None:
    """Raise UsageError for a meeting file that can't be made, ResourceError for one that an earlier run left.

    That run's ranks are in it, and those of this one would wait for them. oldest_sec: the most seconds that this run's
    own ranks can have been there already; None where it can't be told.
    """
    if path.is_dir() or not path.parent.is_dir():
        wrong = "that is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(
            f"the ranks can't meet in {path}: {wrong}.\n"
            "Name a file that is not there yet, in a folder that is (parallel.init_method)."
        )
    if oldest_sec is None or not path.exists():
        return
    found = path.stat()
    if found.st_size and time.time() - found.st_mtime >= oldest_sec:
        raise ResourceError(
            f"the ranks can't meet in {path}: a run that was killed has left it.\n"
            "Remove that file (parallel.init_method), and start again."
        )


def wait_for_machine(meeting: Rendezvous, timeout_sec: float, is_server: bool) -> None:
    """Wait until the meeting's machine answers; at once where ranks meet in a file. Raises OSError with the reason.

    is_server: this process is the one that will listen there, so a machine that refuses is there, too. torch's own
    store waits as well, but tells in dozens of lines, and without the reason, of a host that can't be reached.
    """
    if meeting.file is not None:
        return
    end = time.monotonic() + timeout_sec
    while True:
        try:
            left = max(_PAUSE_SEC, end - time.monotonic())
            socket.create_connection((meeting.host, meeting.port), timeout=left).close()
            return
        except OSError as error:
            if is_server and isinstance(error, ConnectionRefusedError):
                return
            if time.monotonic() + _PAUSE_SEC >= end:
                raise
        time.sleep(_PAUSE_SEC)


def open_store(meeting: Rendezvous, rank_info: RankInfo, timeout_sec: float) -> "Store":
    """torch's store at the meeting's place, without a wait for anybody but its server, which rank 0 is unless a
    launching process serves it. Raises what torch raises where the place is taken or silent.

    torch's own way to it (`init_method`) waits for all ranks at once, and can't tell who did not come.
    """
    import torch.distributed as dist

    if meeting.file is not None:
        return dist.FileStore(str(meeting.file), rank_info.world_size)
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (
        os.environ.get("MASTER_ADDR"),
        os.environ.get("MASTER_PORT"),
    ) == (meeting.host, str(meeting.port))
    store = dist.TCPStore(
        meeting.host, meeting.port, is_master=rank_info.is_main and not served,
        timeout=timedelta(seconds=timeout_sec), wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip
    # A launcher's store outlives the ranks that it starts again, with all that they left in it. Where rank 0 serves, it
    # is new each time, and the launchers of several machines may have counted different numbers of restarts.
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store) if served else store


def wait_for_all_ranks(store: "Store", rank_info: RankInfo, timeout_sec: float) -> None:
    """Wait until every rank is at the store. Raises TimeoutError, on every rank, with the ranks that did not come.

    Rank 0 counts and tells the others, so that all say the same; where it is missing itself, each counts. Raises what
    torch raises where the store is gone.
    """
    prefix = "roll call"
    keys = [f"{prefix}/rank {rank}" for rank in range(rank_info.world_size)]
    wait = timedelta(seconds=timeout_sec)
    store.set(keys[rank_info.rank], "here")
    absent: list[int] = []
    try:
        if rank_info.is_main:
            store.wait(keys, wait)
        else:
            store.wait([f"{prefix}/absent"], wait + timedelta(seconds=_VERDICT_SEC))
            absent = json.loads(store.get(f"{prefix}/absent"))
    except RuntimeError as error:  # torch's DistStoreError, but a file's store raises the plain one
        if "timeout" not in str(error).lower():
            raise
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if rank_info.is_main:
        store.set(f"{prefix}/absent", json.dumps(absent))
    if absent:
        if rank_info.is_main:
            time.sleep(_VERDICT_SEC)  # the store may go with this process
        raise TimeoutError(f"{name_ranks(absent)} of {rank_info.world_size} did not come")


def rendezvous_error(error: Exception, meeting: Rendezvous, rank_info: RankInfo, timeout_sec: float) -> ResourceError:
    """What a rank says that could not meet the others."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        text = "that port is taken, by another program or by another rank 0"
    elif text.startswith("wait timeout"):  # the rest names keys in torch's store
        text = "another rank did not come, or was given another number of ranks"
    elif isinstance(error, OSError) and error.strerror:
        text = f"no answer from there: {error.strerror}"
    return ResourceError(
        f"rank {rank_info.rank} of {rank_info.world_size} could not meet the others at {meeting} in "
        f"{timeout_sec:g} s:\n"
        f"{text}\n"
        "Check that every rank was started, once, that all name the same address and port, and that the port is free."
    )
