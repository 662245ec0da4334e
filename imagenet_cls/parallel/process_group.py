"""The ranks of a run as one group: how they meet, what they share, how they end.

Owns torch.distributed's process groups: the main one (nccl or gloo) for gradients, and a gloo side group on the CPU
for control: stop requests, rank 0's verdicts, state. Starts the heartbeat that tells who is gone. Refuses to know what
is computed. Called by `engine` and `cli`.
"""

import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from imagenet_cls.errors import ResourceError, UsageError, UserError
from imagenet_cls.guards.heartbeat import Heartbeat
from imagenet_cls.interrupts import ignore_interrupts
from imagenet_cls.parallel.environment import RankInfo, address_towards, choose_interface, complete_master_address
from imagenet_cls.parallel.exit import write_error_file
from imagenet_cls.parallel.rendezvous import (
    check_rendezvous_file,
    find_rendezvous,
    open_store,
    rendezvous_error,
    wait_for_all_ranks,
    wait_for_machine,
)

T = TypeVar("T")

# nccl's own watchdog aborts a process whose collective is late, and names nobody: the control group and the heartbeat,
# which end a rank in order, shall be first.
_NCCL_EXTRA = timedelta(seconds=10)

# Rendezvous has several steps, each with the timeout, of which usually one waits. It has failed after two timeouts and
# this.
_MEETING_EXTRA_SEC = 10.0


@dataclass(frozen=True)
class Group:
    """One rank's view of all ranks. `control` and `heartbeat` are None where there is one rank only.

    meeting_file: where the ranks met in a file, that file.
    """

    rank_info: RankInfo
    device: torch.device
    control: Any = None
    meeting_file: Path | None = None
    heartbeat: Heartbeat | None = None

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
    """The device of this rank: `auto` and `cuda` give each rank of a machine a GPU of its own, see `gpu_index`.

    Raises UsageError for a GPU that is not there, or one certain GPU for several ranks.
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
    """Which of the `gpus` that are visible a rank takes: the one with its local rank's number, or that place of
    `device_ids`. Raises UsageError where there is none for it.
    """
    if rank_info.world_size > 1 and ":" in device:
        raise UsageError(
            f"device={device} with {rank_info.world_size} ranks: each rank needs its own GPU.\nUse device=cuda."
        )
    if device_ids is not None and rank_info.local_rank >= len(device_ids):
        raise UsageError(
            f"rank {rank_info.rank} has no GPU: parallel.device_ids names {len(device_ids)}, its local rank is "
            f"{rank_info.local_rank}.\n"
            "Start as many ranks on this machine as it names, or name more."
        )
    choices = device_ids or range(gpus + rank_info.local_rank + 1)
    index = int(device.partition(":")[2] or choices[rank_info.local_rank])
    if rank_info.launcher in ("slurm", "mpi") and gpus == 1 and rank_info.local_world_size > 1:
        index = 0  # each task was given a GPU of its own and sees no other (--gpus-per-task)
    if index >= gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UsageError(
            f"rank {rank_info.rank} (local rank {rank_info.local_rank}) wants GPU {index}, but {gpus} are visible here"
            + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else "")
            + f".\nStart at most {gpus} ranks on this machine, or use device=cpu."
        )
    return index


def check_backend(backend: str, launcher: str) -> None:
    """Raise UsageError for a transport that torch was built without, that needs GPUs where there are none, or that
    ranks of this launcher can't use.

    MPI numbers the ranks that mpirun (or srun) starts; those of torchrun and spawn would each be alone in a world of
    one.
    """
    if backend != "auto" and not dist.is_backend_available(backend):
        raise UsageError(
            f"parallel.backend={backend}: torch {torch.__version__} was built without it.\n"
            "Use parallel.backend=auto (nccl on GPUs, gloo on CPUs), which serves under mpirun, too."
        )
    if backend == "nccl" and torch.cuda.device_count() == 0:
        raise UsageError(
            f"parallel.backend=nccl joins GPUs, and torch {torch.__version__} sees none here.\n"
            "Use parallel.backend=auto (nccl on GPUs, gloo on CPUs)."
        )
    if backend == "mpi" and launcher in ("spawn", "pytorch"):
        raise UsageError(
            f"parallel.backend=mpi: ranks of --launcher {launcher} can't talk over MPI.\n"
            "Start them with `mpirun -np N python tools/train.py CONFIG`, or use parallel.backend=auto."
        )


def init_group(
    rank_info: RankInfo, device: torch.device, mode: str, backend: str, init_method: str, timeout_sec: float
) -> Group:
    """Meet the other ranks. One rank alone meets nobody, and gets a process group only where `mode` is `ddp`.

    backend: `auto` (nccl on GPUs, gloo on CPUs), `nccl`, `gloo` or `mpi`. timeout_sec: longest wait for another rank,
    here and in every later collective.

    Raises UsageError where MASTER_ADDR or MASTER_PORT is missing or wrong, or `check_backend` refuses, ResourceError
    where the ranks do not meet.
    """
    if rank_info.world_size > 1 or mode == "ddp":
        check_backend(backend, rank_info.launcher)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Plain `mpi` would make a group without a store, on which no control group over gloo can be made.
    own_names = {"auto": "nccl" if device.type == "cuda" else "gloo", "mpi": "cpu:mpi,cuda:mpi"}
    backend = own_names.get(backend, backend)
    if rank_info.world_size == 1:
        if mode == "ddp" and not dist.is_initialized():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return Group(rank_info, device)
    complete_master_address(os.environ, rank_info)
    if rank_info.launched and init_method.startswith("tcp:"):
        init_method = "env://"  # that address is where our launching processes meet; they found one for the ranks
    meeting = find_rendezvous(os.environ, init_method, rank_info)
    try:
        wait_for_machine(meeting, timeout_sec, rank_info.is_main)
    except (OSError, UnicodeError) as error:  # the latter for what can't be a host's name
        raise rendezvous_error(error, meeting, rank_info, timeout_sec) from error
    several_machines = rank_info.local_world_size < rank_info.world_size
    # With a file, which of several machines has rank 0 is not known.
    master = meeting.host or (socket.gethostname() if several_machines else "127.0.0.1")
    if not (meeting.file and several_machines):
        choose_interface(os.environ, master, several_machines)
    timeout = timedelta(seconds=timeout_sec)
    if meeting.file is not None:
        check_rendezvous_file(meeting.file, timeout_sec if rank_info.is_main else None)
    heartbeat = Heartbeat(rank_info.rank, address_towards(master), timeout_sec)
    members: list[Any] = [None] * rank_info.world_size
    # torch waits forever where another program listens and says nothing, and in a file that holds something else.
    never = rendezvous_error(TimeoutError("whatever is there does not answer"), meeting, rank_info, timeout_sec)
    watchdog = Timer(2 * timeout_sec + _MEETING_EXTRA_SEC, give_up, (rank_info.launched, never))
    watchdog.daemon = True
    watchdog.start()
    try:
        store = open_store(meeting, rank_info, timeout_sec)
        wait_for_all_ranks(store, rank_info, timeout_sec)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank_info.rank, world_size=rank_info.world_size,
            timeout=timeout + (_NCCL_EXTRA if backend == "nccl" else timedelta()),
            device_id=device if backend == "nccl" else None,
        )  # fmt: skip
        # A group of its own also where gloo carries the gradients: two collectives in flight on one group must be
        # issued in the same order on every rank, and a stop request may come between any two.
        control: Any = dist.new_group(backend="gloo", timeout=timeout)
        dist.all_gather_object(members, heartbeat.me, group=control)
    except (dist.DistError, RuntimeError, ValueError, TimeoutError) as error:
        raise rendezvous_error(error, meeting, rank_info, timeout_sec) from error
    finally:
        watchdog.cancel()
    heartbeat.start(members, partial(give_up, rank_info.launched))
    return Group(rank_info, device, control, meeting.file, heartbeat)


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception is a collective that failed because another rank is gone or late: not this one's fault."""
    if isinstance(error, dist.DistError):
        return True
    pattern = r"gloo|nccl|connection (was )?(closed|reset)|broken pipe|timed out waiting|socket"
    return isinstance(error, RuntimeError) and re.search(pattern, str(error), re.IGNORECASE) is not None


def run_on_main(group: Group, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and give every rank its result, or raise on every rank the user error that it raised.

    The result travels pickled between our own processes, over the control group. Whatever else goes wrong on rank 0
    is a bug: it ends rank 0, and with it the others.
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
    """An error that every rank raises alike, marked so that it is shown once."""
    error.reported_by_main = not group.is_main
    return error


def tell(text: str, code: int, launched: bool, told_by_another: bool = False) -> None:
    """A rank's last words: into its log, and to our launching process, which shows those of the first, or the screen.

    told_by_another: another rank of this machine says the same; a foreign launcher may end it once this one has gone.
    """
    log = logging.getLogger("imagenet_cls")
    if log.hasHandlers():  # without any, Python would print it
        log.error("this rank ends with exit code %d: %s", code, text)
    write_error_file(text, code)
    if launched:
        return
    if told_by_another:
        time.sleep(1.0)
    else:
        print(text, file=sys.stderr, flush=True)


def give_up(launched: bool, reason: ResourceError) -> None:
    """End this process for a rank that is gone, whatever the main thread waits for. Never returns."""
    tell(str(reason), reason.exit_code, launched, reason.reported_by_main)
    leave(None, reason.exit_code, together=False)


def leave(group: Group | None, code: int, together: bool) -> None:
    """End this rank's process with an exit code. Never returns.

    together: all ranks get here, at an end or a stop that they agreed on, so wait for them: rank 0 may still be saving,
    and a launcher ends all ranks once one has left with a code other than 0.

    A rank that falls off the end of its script while gloo's threads still run aborts with exit code 134 now and then.
    So take the groups down, flush, and skip the interpreter's own clean-up.
    """
    ignore_interrupts()
    heartbeat = None if group is None else group.heartbeat
    if group is not None and group.control is not None and together:
        if heartbeat is not None:
            heartbeat.stop_judging()
        with contextlib.suppress(RuntimeError):
            dist.barrier(group=group.control)
            dist.destroy_process_group()
        if group.meeting_file is not None and group.is_main:
            group.meeting_file.unlink(missing_ok=True)
    if heartbeat is not None:
        heartbeat.close(failed=not together)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
