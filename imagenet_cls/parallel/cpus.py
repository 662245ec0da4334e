"""The CPUs of a rank, from CPU affinity, cgroup quotas and SLURM. Imports no torch."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from imagenet_cls.parallel.environment import RankInfo, tasks_here


def cpu_threads(processes: int = 1) -> int:
    """CPU threads of each of some processes on this machine: their CPUs, rounded down, at least
    one.
    """
    return threads_of_rank(RankInfo(local_world_size=processes))


def threads_of_rank(rank_info: RankInfo) -> int:
    """CPU threads of a rank: its CPUs, rounded down, at least one."""
    return max(1, int(cpus_per_rank(rank_info)))


def cpus_per_rank(rank_info: RankInfo) -> float:
    """The CPUs of this rank: its share of CPU affinity, cgroup quota and SLURM's number, whichever
    is least.
    """
    if hasattr(os, "sched_getaffinity"):
        affinity = len(os.sched_getaffinity(0))
    else:  # macOS has no such function
        affinity = os.cpu_count() or 1
    cpus = min(affinity, cgroup_cpus())
    ranks = rank_info.local_world_size
    step = os.environ if "SLURM_STEP_ID" in os.environ else {}
    per_task = step.get("SLURM_CPUS_PER_TASK", "")
    per_gpu = step.get("SLURM_CPUS_PER_GPU", "")
    if per_task.isdigit() or per_gpu.isdigit():
        node = int(step.get("SLURM_NODEID", "0"))
        tasks = tasks_here(step.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
        is_task = rank_info.launcher == "slurm" or tasks > 1  # each rank is a task
        if not per_task.isdigit():
            gpus = int(step.get("SLURM_GPUS_ON_NODE") or ranks)
            return min(cpus if is_task else cpus / ranks, int(per_gpu) * gpus / ranks)
        cpus = min(cpus, int(per_task))
        if is_task:
            return cpus
    return cpus / ranks


def cgroup_cpus(root: Path = Path("/")) -> float:
    """The smallest quota of this process's cgroups and their parents (`docker run --cpus`);
    infinity without one.
    """
    quotas = [math.inf]
    for version, folder in _cgroup_folders(root):
        files = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        with suppress(OSError):  # the root of all cgroups has no cpu.max
            quota, period = " ".join((folder / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
    return min(quotas)


def _cgroup_folders(root: Path) -> Iterator[tuple[int, Path]]:
    """(version 1 or 2, folder) of each cgroup of this process that may limit CPUs, and of its
    parents.
    """
    # In a container without a cgroup namespace, /proc has paths of the host, and /sys/fs/cgroup is
    # the container's.
    with suppress(OSError):  # no cgroups: macOS
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            version = 2
            mount = root / "sys/fs/cgroup"
            if controllers != "":
                if "cpu" not in controllers.split(","):
                    continue
                version = 1
                mount /= "cpu"
            group = Path(path.lstrip("/"))
            for level in (group, *group.parents):
                yield version, mount / level
