"""Rank information from the environment of any launcher; network interface; CPUs of a rank. Imports no torch."""

import fcntl
import math
import os
import re
import socket
import struct
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from imagenet_cls.errors import UsageError, command_line

LAUNCHERS = ("auto", "none", "pytorch", "spawn", "slurm", "mpi")


@dataclass(frozen=True)
class RankInfo:
    """This process among the ranks of a run. local_rank: on this machine; it selects the GPU.

    launched: started by our launching process, which has checked the config and prints errors.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launcher: str = "none"
    launched: bool = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 3`; at most eight."""
    listing = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listing}"


# For each launcher: the variables that hold rank, local rank, world size and ranks on this machine.
_PYTORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# The step's, not the job's: a shell in an allocation is a step of one task in a job of many.
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
_PMI = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")  # MPICH's and Intel's mpirun
_MPI = (_OPEN_MPI, _PMI)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY_OTHER_MACHINE = (
    "192.0.2.1"  # reserved for documentation (RFC 5737), so its route is the default route
)

LAUNCHED_VARIABLE = "IMAGENET_CLS_LAUNCHED"  # set by our launching process for its ranks


def find_rank_info(env: Mapping[str, str], launcher: str = "auto") -> RankInfo | None:
    """Rank information from the environment, or None if no launcher has started this process as a rank.

    launcher: `auto` reads torch's variables, then MPI's, then SLURM's, since mpirun in a batch job may start helpers by
    srun; `none` reads none; any other is required. The script of `sbatch`, which has SLURM_PROCID, is not a rank, nor
    is a step of one task, such as a shell, unless with `--launcher slurm`. RANK without LOCAL_RANK is the number of a
    pod if the launcher is `pytorch` or there is a single pod. Raises UsageError.
    """
    if launcher == "none":
        return None
    only_pod = (env.get("RANK"), env.get("WORLD_SIZE")) == ("0", "1")
    if "RANK" in env and "LOCAL_RANK" not in env and (launcher == "pytorch" or only_pod):
        return None
    if "RANK" in env:  # the most explicit
        return _read(env, _PYTORCH, "pytorch" if launcher == "auto" else launcher)
    if launcher == "spawn":  # its ranks have torch's variables
        launcher = "auto"
    if launcher in ("auto", "mpi"):
        for names in _MPI:
            # srun (--mpi=pmi2) sets PMI_RANK, but no local rank by that name.
            if names[0] in env and (names[1] in env or launcher == "mpi"):
                return _read(env, names, "mpi")
    if "SLURM_STEP_ID" in env and (
        launcher == "slurm" or (launcher == "auto" and env.get(_SLURM[2], "1") != "1")
    ):
        return _read(env, _SLURM, "slurm")
    if launcher in ("slurm", "mpi"):
        variable, starter = (
            ("SLURM_STEP_ID", "srun") if launcher == "slurm" else (_OPEN_MPI[0], "mpirun")
        )
        raise UsageError(
            f"--launcher {launcher}: {variable} is not set, so this process was not started as a rank.\n"
            f"Start it with `{starter} ... {command_line('train')} CONFIG`, or leave --launcher out."
        )
    return None


def _read(env: Mapping[str, str], names: tuple[str, str, str, str], launcher: str) -> RankInfo:
    def number(name: str, default: int | None = None) -> int:
        text = env.get(name, "not set" if default is None else str(default))
        if not text.isdigit():
            raise UsageError(
                f"{name} is {text}; it must be a whole number.\n"
                "Started by hand, each process needs RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.\n"
                "In a pod of Kubernetes, use scripts/dist_train.sh, or --launcher pytorch --gpus N."
            )
        return int(text)

    rank, world_size = number(names[0]), number(names[2])
    local_rank = number(names[1], rank if world_size == 1 else None)
    if names is _SLURM:
        local_world_size = (
            tasks_here(env.get(names[3], ""), int(env.get("SLURM_NODEID", "0"))) or local_rank + 1
        )
    else:
        all_here = env.get("MASTER_ADDR") in _LOOPBACK  # started by hand, without a count
        local_world_size = number(
            names[3], world_size if all_here else min(world_size, local_rank + 1)
        )
    if rank >= world_size:
        raise UsageError(
            f"{names[0]}={rank} with {names[2]}={world_size}: ranks count from 0 to {names[2]} - 1.\n"
            "Give each process its own rank below the world size."
        )
    return RankInfo(
        rank, local_rank, world_size, local_world_size, launcher, LAUNCHED_VARIABLE in env
    )


def machine_options(env: Mapping[str, str]) -> dict[str, str]:
    """Options of `--launcher pytorch` (nodes, node_rank, ...) from the environment of a Kubernetes pod.

    Kubeflow's training operator sets RANK, the number of the pod, and WORLD_SIZE: the number of pods up to version 1.6,
    since 1.7 multiplied by `nprocPerNode`. Since 1.7 it also sets variables that torchrun reads (PET_...); Kubeflow
    Trainer 2 sets only those. An elastic job has PET_RDZV_ENDPOINT and a range in PET_NNODES; its pods need no number.
    """
    if "LOCAL_RANK" in env:  # of a rank
        return {}
    pods = (
        {"nodes": env["WORLD_SIZE"], "node_rank": env["RANK"]}
        if {"WORLD_SIZE", "RANK"} <= env.keys()
        else {}
    )
    host, _, port = env.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    found = {
        "nodes": env.get("PET_NNODES") or pods.get("nodes"),
        "node_rank": env.get("PET_NODE_RANK") or pods.get("node_rank"),
        "master_addr": host or env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR"),
        "master_port": port or env.get("PET_MASTER_PORT") or env.get("MASTER_PORT"),
        "max_restarts": env.get("PET_MAX_RESTARTS"),
    }
    if ":" in (found["nodes"] or ""):
        del found["node_rank"]
    return {name: value for name, value in found.items() if value}


def tasks_here(tasks_per_node: str, node: int) -> int:
    """Tasks of a SLURM step on machine `node`: `4(x2),1` means 4, 4 and 1. 0 if unknown."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else 0


def complete_master_address(env: MutableMapping[str, str], rank_info: RankInfo) -> None:
    """Set MASTER_ADDR (the first host) and MASTER_PORT for SLURM's or MPI's ranks if missing. Raises UsageError."""
    if rank_info.launcher not in ("slurm", "mpi"):
        return
    env.setdefault("MASTER_PORT", str(port_of_job(env, rank_info.launcher)))
    hosts = env.get("SLURM_JOB_NODELIST", "")
    if rank_info.launcher == "slurm":
        env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST") or hosts))
    elif rank_info.local_world_size == rank_info.world_size:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
    elif hosts:
        env.setdefault("MASTER_ADDR", first_host(hosts))
    elif "MASTER_ADDR" not in env:
        raise UsageError(
            f"mpirun started {rank_info.world_size} ranks on several machines, and MASTER_ADDR is not set.\n"
            "Set it to the host of rank 0, on all ranks: mpirun -x MASTER_ADDR=HOST ... (Open MPI), -genv (MPICH)."
        )


def port_of_job(env: Mapping[str, str], launcher: str) -> int:
    """A port for the id of the job, and of SLURM's step: 20000 to 31999, below Linux's ephemeral ports."""
    if launcher == "slurm":
        return (
            20000
            + (int(env.get("SLURM_JOB_ID", "0")) + 4001 * int(env.get("SLURM_STEP_ID", "0")))
            % 12000
        )
    ids = (
        "OMPI_MCA_ess_base_jobid",
        "PMIX_NAMESPACE",
        "SLURM_JOB_ID",
        "PBS_JOBID",
        "LSB_JOBID",
        "JOB_ID",
    )
    job = next((env[name] for name in ids if env.get(name)), "")
    return 20000 + zlib.crc32(job.encode()) % 12000


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: `gpu[003-007,9],cpu1` -> `gpu003`; "" gives the loopback address."""
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])+", node_list)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group()) if match else "127.0.0.1"


def choose_interface(
    env: MutableMapping[str, str], master_addr: str, several_machines: bool
) -> None:
    """Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface towards the master, unless the user has.

    By default gloo uses the address of the host's name, which is often loopback. The master's route to its own name may
    be loopback, too: with several machines, it uses the interface of the default route.
    """
    interface = interface_towards(master_addr)
    if interface == "lo" and several_machines and master_addr not in _LOOPBACK:
        interface = interface_towards(_ANY_OTHER_MACHINE)
    if interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface != "lo":  # on one machine nccl uses shared memory and NVLink
            env.setdefault("NCCL_SOCKET_IFNAME", interface)


def interface_towards(host: str) -> str | None:
    """The interface of the route to `host`, or None if there is no route (IPv4)."""
    own_address = _source_address(host)
    if own_address is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(reply[20:24]) == own_address:
                return name
    return None


def address_towards(master_addr: str) -> str:
    """This machine's address on the route to the master; on the master, `master_addr`."""
    own_address = _source_address(master_addr)
    return master_addr if own_address is None or own_address.startswith("127.") else own_address


def _source_address(host: str) -> str | None:
    """This machine's address on the route to `host`, found with an unsent datagram (IPv4)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def cpu_threads(rank_info: RankInfo) -> int:
    """CPU threads of a rank: its CPUs, rounded down, at least one."""
    return max(1, int(cpus_per_rank(rank_info)))


def cpus_per_rank(rank_info: RankInfo) -> float:
    """The CPUs of this rank: its share of CPU affinity, cgroup quota and SLURM's number, whichever is least."""
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )  # macOS
    cpus = min(affinity, cgroup_cpus())
    task_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "") if "SLURM_STEP_ID" in os.environ else ""
    if task_cpus.isdigit():
        cpus = min(cpus, int(task_cpus))
        tasks = tasks_here(
            os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""),
            int(os.environ.get("SLURM_NODEID", "0")),
        )
        if rank_info.launcher == "slurm" or tasks > 1:  # each rank is a task
            return cpus
    return cpus / rank_info.local_world_size


def cgroup_cpus(root: Path = Path("/")) -> float:
    """The smallest quota of this process's cgroups and their parents (`docker run --cpus`); infinity without one."""
    quotas = [math.inf]
    for version, folder in cgroup_folders("cpu", root):
        files = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        with suppress(OSError):  # the root of all cgroups has no cpu.max
            quota, period = " ".join((folder / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
    return min(quotas)


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """(version 1 or 2, folder) of each cgroup of this process for a controller, and of its parents."""
    # In a container without a cgroup namespace, /proc has paths of the host, and /sys/fs/cgroup is the container's.
    with suppress(OSError):  # no cgroups: macOS
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group = Path(path.lstrip("/"))
            if controllers == "":
                yield from (
                    (2, root / "sys/fs/cgroup" / level) for level in (group, *group.parents)
                )
            elif controller in controllers.split(","):
                yield from (
                    (1, root / "sys/fs/cgroup" / controller / level)
                    for level in (group, *group.parents)
                )
