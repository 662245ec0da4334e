"""Out-of-memory errors of torch, with the batch sizes and what to change; peak and available memory."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from imagenet_cls.errors import ResourceError, out_of_memory_line
from imagenet_cls.parallel.environment import cgroup_folders

_GIB = 2.0**30


@contextlib.contextmanager
def explain_out_of_memory(sizes: str = "") -> Iterator[None]:
    """Replace a RuntimeError by a ResourceError where memory ran out. sizes: of the batches, for the message."""
    try:
        yield
    except RuntimeError as error:
        detail = out_of_memory_line(error)
        if detail is None:
            raise
        on_host = "DefaultCPUAllocator" in detail
        if on_host or not torch.cuda.is_initialized():
            where, total = "this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            peak = peak_resident_bytes()
        else:
            index = torch.cuda.current_device()
            where, total = f"cuda:{index}", torch.cuda.get_device_properties(index).total_memory
            peak = torch.cuda.max_memory_allocated()
        batches = f"{sizes}, " if sizes else ""
        raise ResourceError(
            f"out of memory on {where}: {batches}peak {peak / _GIB:.2f} of {total / _GIB:.2f} GiB\n"
            f"{detail.rpartition('DefaultCPUAllocator: ')[2][:200]}\n"
            "Try a smaller train.micro_batch_size (the global batch stays) or eval.batch_size, "
            "train.grad_checkpointing=true, train.precision=bf16, or smaller images."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch raised this error because the memory of a GPU or of the host ran out."""
    return out_of_memory_line(error) is not None


def peak_memory_bytes() -> int:
    """The most bytes since `reset_peak_memory`: of the CUDA allocator on this process's GPU, else resident."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most resident bytes of this process since `reset_peak_memory`."""
    # The peak of getrusage may be that of the process that started this one.
    return _kib("proc/self/status", "VmHWM") or resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory() -> None:
    """Start `peak_memory_bytes` again. Has no effect on the resident peak on other systems than Linux."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory_limit_bytes(root: Path = Path("/")) -> float:
    """The most bytes that this process can have resident now: its own, and what system and cgroups have available.

    File cache that can be dropped counts as available. On other systems than Linux: all memory. root: of the files.
    """
    free = [float(_kib("proc/meminfo", "MemAvailable", root))]
    if free == [0]:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for version, folder in cgroup_folders("memory", root):
        names = [
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("memory.max", "memory.current"),
        ][version - 1]
        with contextlib.suppress(
            OSError, ValueError
        ):  # the root of all cgroups has no memory.max; `max`: no limit
            limit, used = (int((folder / name).read_text()) for name in names)
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free.append(
                limit - used + int(stat["total_inactive_file" if version == 1 else "inactive_file"])
            )
    return _kib("proc/self/status", "VmRSS", root) + min(free)


def _kib(file: str, field: str, root: Path = Path("/")) -> int:
    """The bytes of a field in KiB of a file in /proc; 0 where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return 1024 * int((root / file).read_text().partition(f"{field}:")[2].split()[0])
    return 0
