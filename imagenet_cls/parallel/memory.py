"""Memory of this process: its peak, and how much it can have."""

import contextlib
import os
import resource
import sys
from pathlib import Path

import torch

from imagenet_cls.parallel.cpus import cgroup_folders


def peak_memory_bytes() -> int:
    """The most bytes since `reset_peak_memory`: of the CUDA allocator on this process's GPU, else
    resident.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # On Linux, the peak of getrusage may belong to the process that started this one.
    peak = _proc_bytes("proc/self/status", "VmHWM")
    if peak:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory() -> None:
    """Start `peak_memory_bytes` again. Has no effect on the resident peak on other systems than
    Linux.
    """
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def memory_limit_bytes(root: Path = Path("/")) -> float:
    """The most bytes that this process can have resident now: its own, and what system and cgroups
    have available.

    File cache that can be dropped counts as available. On other systems than Linux: all memory.
    root: the folder in which `proc` and `sys` are.
    """
    free = [float(_proc_bytes("proc/meminfo", "MemAvailable", root))]
    if free == [0]:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for version, folder in cgroup_folders("memory", root):
        if version == 1:
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_name = "total_inactive_file"
        else:
            limit_file, usage_file = "memory.max", "memory.current"
            cache_name = "inactive_file"
        # the root of all cgroups has no memory.max; `max`: no limit
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())
            used = int((folder / usage_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free.append(limit - used + int(stat[cache_name]))
    return _proc_bytes("proc/self/status", "VmRSS", root) + min(free)


def _proc_bytes(file: str, field: str, root: Path = Path("/")) -> int:
    """The bytes of a field of a file in /proc, which has KiB; 0 where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return 1024 * int((root / file).read_text().partition(f"{field}:")[2].split()[0])
    return 0
