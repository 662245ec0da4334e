"""The device of a rank, and the GPUs of DataParallel in one process."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.text import command_line, first_line


def choose_device(
    device: str, rank_info: RankInfo, device_ids: Sequence[int] | None = None
) -> torch.device:
    """The device of this rank; with `auto` and `cuda`, each rank of a machine gets its own GPU.
    Raises UsageError.
    """
    if device == "mps":
        if not torch.backends.mps.is_available():
            raise UsageError(
                f"device=mps: torch {torch.__version__} has no mps device here.", "Use device=cpu."
            )
        if rank_info.world_size > 1:
            raise UsageError(
                f"device=mps with {rank_info.world_size} ranks: mps has one device.",
                "Use one rank.",
            )
        return torch.device("mps")
    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise UsageError(
            f"device={device}, but torch {torch.__version__} sees no GPU here.",
            "Use device=cpu or device=auto.",
        )
    return torch.device("cuda", gpu_index(device, rank_info, gpus, device_ids))


def gpu_index(
    device: str, rank_info: RankInfo, gpus: int, device_ids: Sequence[int] | None = None
) -> int:
    """The GPU of a rank among the `gpus` visible ones: `device_ids[local_rank]`, by default the
    local rank.
    """
    local_rank = rank_info.local_rank
    who = f"rank {rank_info.rank} (local rank {local_rank})"
    if rank_info.world_size > 1 and ":" in device:
        raise UsageError(
            f"device={device} with {rank_info.world_size} ranks: each rank needs its own GPU.",
            "Use device=cuda.",
        )
    if device_ids is not None and local_rank >= len(device_ids):
        raise UsageError(
            f"{who} has no GPU: parallel.device_ids has {len(device_ids)}.",
            "Start as many ranks on this machine as it has GPUs, or add GPUs to it.",
        )
    index = int(
        device.partition(":")[2] or (local_rank if device_ids is None else device_ids[local_rank])
    )
    # Each task of SLURM may see only its own GPU (--gpus-per-task), and so may the ranks of another
    # launcher that starts them through a script.
    set_by_user = "CUDA_VISIBLE_DEVICES" in os.environ and not rank_info.launched
    sees_own = rank_info.launcher in ("slurm", "mpi") or set_by_user
    if sees_own and gpus == 1 and rank_info.local_world_size > 1:
        index = 0
    if index >= gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UsageError(
            f"{who} needs GPU {index}, but {gpus} are visible here (CUDA_VISIBLE_DEVICES: "
            f"{visible}).",
            f"Start at most {gpus} ranks on this machine, or use device=cpu.",
        )
    return index


def start_gpu(device: torch.device) -> None:
    """Make a GPU the current device of this process. Raises ResourceError if CUDA can't start."""
    with explain_start_errors(device):
        torch.cuda.set_device(device)
        torch.ones(1, device=device)  # runs a kernel, which torch may lack for an old GPU


@contextmanager
def explain_start_errors(device: torch.device) -> Iterator[None]:
    """Turn the error of the first use of a GPU into a ResourceError.

    Such errors come late: GPUs are counted without CUDA, also where it can't start.
    """
    try:
        yield
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        raise ResourceError(
            f"torch {torch.__version__} can't use {device}:\n{first_line(error)[:200]}",
            "Look for other processes on it (nvidia-smi), install a driver and a torch that fit "
            "the GPU (pytorch.org, Get Started), or use device=cpu.",
        ) from error


@dataclass(frozen=True)
class Devices:
    """The devices of a process. all: the first has the parameters, the logits and the loss. note:
    for the user.
    """

    all: tuple[torch.device, ...]
    note: str = ""


def choose_devices(device: str, ids: Sequence[int] | None, visible: int) -> Devices:
    """The devices of a DataParallel run: the GPUs `ids` of the `visible` ones, by default all. With
    fewer than two visible GPUs the model runs on one device. Raises UsageError.
    """
    if device == "cpu" or visible == 0:
        note = "parallel.mode=dp: no GPU is used, so the model runs on the CPU"
        return Devices((torch.device("cpu"),), note)
    chosen = list(range(visible)) if ids is None else list(ids)
    if absent := sorted(index for index in chosen if index >= visible):
        raise UsageError(
            f"parallel.device_ids names GPU {', '.join(map(str, absent))}, but the number of "
            f"visible GPUs is {visible}.",
            "Number GPUs from 0 in the order of CUDA_VISIBLE_DEVICES.",
        )
    if len(chosen) == 1:
        note = f"parallel.mode=dp: the model runs on one GPU, {chosen[0]}"
    else:
        note = (
            f"parallel.mode=dp: DataParallel on GPUs {chosen} of one process. "
            "DistributedDataParallel is faster: leave parallel.mode at auto and start with "
            f"`{command_line('train')} CONFIG --gpus {len(chosen)}`"
        )
    return Devices(tuple(torch.device("cuda", index) for index in chosen), note)
