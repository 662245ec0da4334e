"""The ranks of a run as one group: device, backend, rendezvous, and process groups.

The main process group (nccl or gloo) reduces gradients. A gloo group on the CPU carries control messages: stop
requests, rank 0's results, checkpoint state.
"""

import contextlib
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from imagenet_cls.errors import UsageError, UserError
from imagenet_cls.parallel.environment import RankInfo, address_towards, choose_interface, complete_master_address
from imagenet_cls.parallel.exit import abort_rank
from imagenet_cls.parallel.rendezvous import (
    check_rendezvous_file,
    find_rendezvous,
    open_store,
    rendezvous_error,
    wait_for_all_ranks,
    wait_until_reachable,
)

T = TypeVar("T")

# nccl's watchdog aborts a process whose collective times out and names no rank. So its timeout is longer than those of
# the control group and the heartbeat, which name the rank.
_NCCL_EXTRA = timedelta(seconds=10)
# A rendezvous has several steps, each with the timeout. After two timeouts and this it has failed.
_RENDEZVOUS_EXTRA_SEC = 10.0


@dataclass(frozen=True)
class Group:
    """One rank's view of all ranks.

    control: the gloo group; None for a single rank. rendezvous_file: the file of a file:// rendezvous, else None.
    address: this machine's, as other ranks reach it. heartbeat: see `guards.heartbeat.start_heartbeat`.
    """

    rank_info: RankInfo
    device: torch.device
    control: Any = None
    rendezvous_file: Path | None = None
    address: str = "127.0.0.1"
    heartbeat: Any = None

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def world_size(self) -> int:
        return self.rank_info.world_size

    @property
    def is_main(self) -> bool:
        return self.rank_info.is_main


def choose_device(device: str, rank_info: RankInfo, device_ids: Sequence[int] | None = None) -> torch.device:
    """The device of this rank; with `auto` and `cuda`, each rank of a machine gets its own GPU (`gpu_index`).

    Raises UsageError for a GPU that is missing, or one fixed GPU for several ranks.
    """
    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise UsageError(
            f"device={device}, but torch {torch.__version__} sees no GPU here.\nUse device=cpu or device=auto."
        )
    return torch.device("cuda", gpu_index(device, rank_info, gpus, device_ids))


def gpu_index(device: str, rank_info: RankInfo, gpus: int, device_ids: Sequence[int] | None = None) -> int:
    """The GPU of a rank among the `gpus` visible ones: `device_ids[local_rank]`, by default the local rank.

    Raises UsageError if there is none for it.
    """
    local_rank = rank_info.local_rank
    if rank_info.world_size > 1 and ":" in device:
        raise UsageError(
            f"device={device} with {rank_info.world_size} ranks: each rank needs its own GPU.\nUse device=cuda."
        )
    if device_ids is not None and local_rank >= len(device_ids):
        raise UsageError(
            f"rank {rank_info.rank} (local rank {local_rank}) has no GPU: parallel.device_ids has {len(device_ids)}.\n"
            "Start as many ranks on this machine as it has GPUs, or add GPUs to it."
        )
    index = int(device.partition(":")[2] or (local_rank if device_ids is None else device_ids[local_rank]))
    if rank_info.launcher in ("slurm", "mpi") and gpus == 1 and rank_info.local_world_size > 1:
        index = 0  # each task sees only its own GPU (--gpus-per-task)
    if index >= gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UsageError(
            f"rank {rank_info.rank} (local rank {local_rank}) needs GPU {index}, but {gpus} are visible here"
            + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else "")
            + f".\nStart at most {gpus} ranks on this machine, or use device=cpu."
        )
    return index


def check_backend(backend: str, launcher: str) -> None:
    """Raise UsageError for a backend that torch lacks, that needs missing GPUs, or that the launcher does not support.

    MPI numbers the ranks that mpirun or srun starts; each rank of torchrun or spawn would be alone.
    """
    if backend != "auto" and not dist.is_backend_available(backend):
        raise UsageError(
            f"parallel.backend={backend}: torch {torch.__version__} was built without it.\n"
            "Use parallel.backend=auto (nccl on GPUs, gloo on CPUs), also under mpirun."
        )
    if backend == "nccl" and torch.cuda.device_count() == 0:
        raise UsageError(
            f"parallel.backend=nccl needs GPUs, and torch {torch.__version__} sees none here.\n"
            "Use parallel.backend=auto (nccl on GPUs, gloo on CPUs)."
        )
    if backend == "mpi" and launcher in ("spawn", "pytorch"):
        raise UsageError(
            f"parallel.backend=mpi does not work with --launcher {launcher}.\n"
            "Start ranks with `mpirun -np N python tools/train.py CONFIG`, or use parallel.backend=auto."
        )


def init_group(
    rank_info: RankInfo, device: torch.device, mode: str, backend: str, init_method: str, timeout_sec: float
) -> Group:
    """Rendezvous with the other ranks. A single rank needs none, and gets a process group only if `mode` is `ddp`.

    backend: `auto` (nccl on GPUs, gloo on CPUs), `nccl`, `gloo` or `mpi`. timeout_sec: longest wait for another rank,
    here and in every later collective.

    Raises UsageError for a wrong MASTER_ADDR, MASTER_PORT or backend, ResourceError if the rendezvous fails.
    """
    if rank_info.world_size > 1 or mode == "ddp":
        check_backend(backend, rank_info.launcher)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Plain `mpi` would make a group without a store, in which no gloo group can be made.
    full_names = {"auto": "nccl" if device.type == "cuda" else "gloo", "mpi": "cpu:mpi,cuda:mpi"}
    backend = full_names.get(backend, backend)
    if rank_info.world_size == 1:
        if mode == "ddp" and not dist.is_initialized():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return Group(rank_info, device)
    complete_master_address(os.environ, rank_info)
    if rank_info.launched and init_method.startswith("tcp:"):
        init_method = "env://"  # the launching processes use that address; the ranks have another port
    rendezvous = find_rendezvous(os.environ, init_method, rank_info)
    try:
        wait_until_reachable(rendezvous, timeout_sec, rank_info.is_main)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
        raise rendezvous_error(error, rendezvous, rank_info, timeout_sec) from error
    several_machines = rank_info.local_world_size < rank_info.world_size
    # With a file, the machine of rank 0 is unknown.
    master = rendezvous.host or (socket.gethostname() if several_machines else "127.0.0.1")
    if rendezvous.file is None or not several_machines:
        choose_interface(os.environ, master, several_machines)
    timeout = timedelta(seconds=timeout_sec)
    if rendezvous.file is not None:
        check_rendezvous_file(rendezvous.file, timeout_sec if rank_info.is_main else None)
    # torch has no timeout for a server that accepts connections and does not answer, and for a file with other
    # contents.
    no_answer = rendezvous_error(TimeoutError("the program there does not answer"), rendezvous, rank_info, timeout_sec)
    watchdog = Timer(2 * timeout_sec + _RENDEZVOUS_EXTRA_SEC, abort_rank, (rank_info.launched, no_answer))
    watchdog.daemon = True
    watchdog.start()
    try:
        store = open_store(rendezvous, rank_info, timeout_sec)
        wait_for_all_ranks(store, rank_info, timeout_sec)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank_info.rank, world_size=rank_info.world_size,
            timeout=timeout + (_NCCL_EXTRA if backend == "nccl" else timedelta()),
            device_id=device if backend == "nccl" else None,
        )  # fmt: skip
        # Separate even if gloo reduces the gradients: collectives in flight on one group need the same order on every
        # rank, and a stop request may come between any two.
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError, TimeoutError) as error:
        raise rendezvous_error(error, rendezvous, rank_info, timeout_sec) from error
    finally:
        watchdog.cancel()
    return Group(rank_info, device, control, rendezvous.file, address_towards(master))


def destroy_group(group: Group) -> None:
    """Wait for all ranks at the end of a run or at a stop, then destroy the process groups.

    Rank 0 may still be saving, and a launcher ends all ranks once one has exited with a code other than 0.
    """
    if group.control is not None:
        with contextlib.suppress(RuntimeError):
            dist.barrier(group=group.control)
            dist.destroy_process_group()
        if group.rendezvous_file is not None and group.is_main:
            group.rendezvous_file.unlink(missing_ok=True)


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective failed because another rank has exited or is late."""
    if isinstance(error, dist.DistError):
        return True
    pattern = r"gloo|nccl|connection (was )?(closed|reset)|broken pipe|timed out waiting|socket"
    return isinstance(error, RuntimeError) and re.search(pattern, str(error), re.IGNORECASE) is not None


def run_on_main(group: Group, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on every rank, or raise its UserError on every rank.

    The result is pickled and broadcast over the control group. Any other exception is a bug: it ends rank 0, and with
    it the others.
    """
    if group.control is None:
        return action()
    outcome: list[Any] = [None, None]
    if group.is_main:
        try:
            outcome = [action(), None]
        except UserError as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome, src=0, group=group.control)
    if outcome[1] is not None:
        raise reported_by_main(outcome[1], group)
    return outcome[0]


def reported_by_main(error: UserError, group: Group) -> UserError:
    """Mark an error that every rank raises, so that only rank 0 prints it."""
    error.reported_by_main = not group.is_main
    return error
