"""Rank information from the environment of any launcher. Imports no torch."""

import re
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from imagenet_cls.errors import UsageError
from imagenet_cls.text import command_line

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

    @property
    def is_single_process(self) -> bool:
        """Whether there is one rank, and our launching process has not started it."""
        return self.world_size == 1 and not self.launched


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 3`; at most eight."""
    listing = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listing}"


class Variables(NamedTuple):
    """The environment variables in which a launcher states the rank of a process."""

    rank: str
    local_rank: str
    world_size: str
    local_world_size: str


_PYTORCH = Variables("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# The step's, not the job's: a shell in an allocation is a step of one task in a job of many.
_SLURM = Variables(
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"
)
_OPEN_MPI = Variables(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# of MPICH's and Intel's mpirun
_PMI = Variables("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")

LOOPBACK = ("127.0.0.1", "localhost", "::1")

LAUNCHED_VARIABLE = "IMAGENET_CLS_LAUNCHED"  # set by our launching process for its ranks


def find_rank_info(env: Mapping[str, str], launcher: str = "auto") -> RankInfo | None:
    """Rank information from the environment, or None if no launcher has started this process as a
    rank.

    launcher: `auto` reads torch's variables, then MPI's, then SLURM's, since mpirun in a batch job
    may start helpers by srun; `none` reads none; `spawn` and `pytorch` read torch's; `mpi` and
    `slurm` are required. The script of `sbatch`, which has SLURM_PROCID, is not a rank, nor is a
    step of one task, such as a shell, unless `--launcher slurm` is given. RANK without LOCAL_RANK
    is the number of a pod if the launcher is `pytorch` or there is a single pod. Raises UsageError.
    """
    if launcher == "none":
        return None
    only_pod = (env.get("RANK"), env.get("WORLD_SIZE")) == ("0", "1")
    if "RANK" in env and "LOCAL_RANK" not in env and (launcher == "pytorch" or only_pod):
        return None
    if "RANK" in env:  # the most explicit
        return _read(env, _PYTORCH, "pytorch" if launcher == "auto" else launcher)
    if launcher == "spawn":  # its ranks have torch's variables; here they are to be started
        return None
    if launcher in ("auto", "mpi"):
        for names in (_OPEN_MPI, _PMI):
            # srun (--mpi=pmi2) sets PMI_RANK, but no local rank by that name.
            if names.rank in env and (names.local_rank in env or launcher == "mpi"):
                return _read(env, names, "mpi")
    has_tasks = env.get(_SLURM.world_size, "1") != "1"
    if "SLURM_STEP_ID" in env and (launcher == "slurm" or (launcher == "auto" and has_tasks)):
        return _read(env, _SLURM, "slurm")
    if launcher in ("slurm", "mpi"):
        variable = _OPEN_MPI.rank
        starter = "mpirun"
        if launcher == "slurm":
            variable = "SLURM_STEP_ID"
            starter = "srun"
        raise UsageError(
            f"--launcher {launcher}: {variable} is not set, so this process was not started as a "
            "rank.",
            f"Start it with `{starter} ... {command_line('train')} CONFIG`, or leave --launcher "
            "out.",
        )
    return None


def _read(env: Mapping[str, str], names: Variables, launcher: str) -> RankInfo:
    def number(name: str, default: int | None = None) -> int:
        text = env.get(name, "not set" if default is None else str(default))
        if not text.isdecimal():
            raise UsageError(
                f"{name} is {text or 'empty'}; it must be a whole number.",
                f"For one process unset {names.rank}, or use --launcher none. Of several, each "
                "needs RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.\n"
                "In a pod of Kubernetes, start it with torchrun: see docs/launchers.md.",
            )
        return int(text)

    rank = number(names.rank)
    world_size = number(names.world_size)
    local_rank = number(names.local_rank, rank if world_size == 1 else None)
    if names == _SLURM:
        tasks = tasks_here(env.get(names.local_world_size, ""), int(env.get("SLURM_NODEID", "0")))
        local_world_size = tasks or local_rank + 1
    else:
        default = min(world_size, local_rank + 1)
        if env.get("MASTER_ADDR") in LOOPBACK:  # started by hand, without a count
            default = world_size
        local_world_size = number(names.local_world_size, default)
    if rank >= world_size:
        raise UsageError(
            f"{names.rank}={rank} with {names.world_size}={world_size}: ranks count from 0 to "
            f"{names.world_size} - 1.",
            "Give each process its own rank below the world size.",
        )
    return RankInfo(
        rank, local_rank, world_size, local_world_size, launcher, LAUNCHED_VARIABLE in env
    )


def tasks_here(tasks_per_node: str, node: int) -> int:
    """Tasks of a SLURM step on machine `node`: `4(x2),1` means 4, 4 and 1. 0 if unknown."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else 0


def complete_master_address(env: MutableMapping[str, str], rank_info: RankInfo) -> None:
    """Set MASTER_ADDR (the first host) and MASTER_PORT for SLURM's or MPI's ranks if missing.
    Raises UsageError.
    """
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
            f"mpirun started {rank_info.world_size} ranks on several machines, and MASTER_ADDR is "
            "not set.",
            "Set it to the host of rank 0, on all ranks: mpirun -x MASTER_ADDR=HOST ... (Open "
            "MPI), -genv (MPICH).",
        )


def port_of_job(env: Mapping[str, str], launcher: str) -> int:
    """A port for the id of the job, and of SLURM's step: 20000 to 31999, below Linux's ephemeral
    ports.
    """
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
    """The first host of a SLURM node list: `gpu[003-007,9],cpu1` -> `gpu003`; "" gives the loopback
    address.
    """
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])+", node_list)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group()) if match else "127.0.0.1"
