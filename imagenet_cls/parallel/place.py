"""Who am I: rank, local rank and world size, from whatever launcher started this process.

Owns the reading of launchers' environment variables, the choice of device, and the network interface that leads to
the master. Refuses to start or contact anything. Imports no torch, so that a launching process can ask before it pays
for that import. Called by `cli` (am I a rank, or do I have to start ranks?) and `parallel.group`.
"""

import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from imagenet_cls.errors import UsageError

LAUNCHERS = ("auto", "none", "pytorch", "spawn", "slurm", "mpi")


@dataclass(frozen=True)
class Place:
    """One process among the ranks of a run.

    rank: 0..world_size-1 over all machines. local_rank: 0..local_world_size-1 on this machine; it picks the GPU.
    launched: our own launching process started this rank; it has made the checks and it shows the errors.
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


# For each launcher: the variables that hold rank, local rank, world size and ranks on this machine.
_PYTORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_PMI = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")
_FAMILIES = {"pytorch": [_PYTORCH], "slurm": [_SLURM], "mpi": [_OPEN_MPI, _PMI]}

# Set by our launching process for the ranks that it starts.
LAUNCHED_VARIABLE = "IMAGENET_CLS_LAUNCHED"


def find_place(env: Mapping[str, str], launcher: str = "auto") -> Place | None:
    """This process's place among the ranks, or None where no launcher has started it as a rank.

    launcher: `auto` looks for torch's variables, then SLURM's, then MPI's; `none` looks for nothing; any other insists.
    A SLURM allocation alone is not a rank (`sbatch` sets SLURM_PROCID for the batch script, too): a job step counts.

    Raises UsageError for variables that contradict each other, or that a forced launcher (slurm, mpi) did not set.
    """
    if launcher == "none":
        return None
    if env.get("RANK") is not None:  # whatever we were started for, these variables are the most explicit
        return _read(env, _PYTORCH, "pytorch" if launcher in ("auto", "pytorch") else launcher)
    if launcher in ("auto", "slurm") and "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        return _read(env, _SLURM, "slurm")
    if launcher in ("auto", "mpi"):
        for names in _FAMILIES["mpi"]:
            if names[0] in env:
                return _read(env, names, "mpi")
    if launcher in ("slurm", "mpi"):
        firsts = [family[0] for family in _FAMILIES[launcher]]
        starter = {"slurm": "srun", "mpi": "mpirun"}[launcher]
        raise UsageError(
            f"--launcher {launcher}: {' or '.join(firsts)} is not set, so nothing started this process as a rank.\n"
            f"Start it with `{starter} ... python tools/train.py CONFIG`, or leave --launcher out."
        )
    return None


def _read(env: Mapping[str, str], names: tuple[str, str, str, str], launcher: str) -> Place:
    def number(name: str, default: int | None) -> int:
        text = env.get(name)
        if text is None and default is not None:
            return default
        digits = re.match(r"\d+", text or "")  # SLURM writes `4(x2)` for four tasks on each of two machines
        if digits is None:
            raise UsageError(
                f"{names[0]} is set to {env[names[0]]!r}, but {name} is {text!r}, which is not a whole number.\n"
                f"Started by hand, each process needs RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
            )
        return int(digits.group())

    rank, world_size = number(names[0], None), number(names[2], None)
    local_rank = number(names[1], rank if world_size == 1 else None)
    local_world_size = number(names[3], min(world_size, local_rank + 1))
    if not 0 <= rank < world_size or local_rank < 0:
        raise UsageError(
            f"{names[0]}={rank} with {names[2]}={world_size}: ranks count from 0 to {names[2]} - 1.\n"
            "Give each process its own rank below the world size."
        )
    return Place(rank, local_rank, world_size, local_world_size, launcher, env.get(LAUNCHED_VARIABLE) is not None)


def complete_master_address(env: MutableMapping[str, str], launcher: str) -> None:
    """Set MASTER_ADDR and MASTER_PORT where SLURM or MPI started the ranks and the user gave none.

    SLURM: the first host of the node list. MPI: this machine (for several, set MASTER_ADDR). The port comes from the
    job's id, so that two jobs on one host do not meet.
    """
    if launcher not in ("slurm", "mpi"):
        return
    job = env.get("SLURM_JOB_ID") or env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE") or "0"
    job_number = int.from_bytes(job.encode()[-8:], "little")
    env.setdefault("MASTER_PORT", str(20000 + job_number % 20000))
    if launcher == "slurm":
        env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or ""))
    env.setdefault("MASTER_ADDR", "127.0.0.1")


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: `gpu[003-007,9],cpu1` -> `gpu003`; "" gives the loopback address."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", node_list)
    return "".join(part or "" for part in match.groups()) if match else "127.0.0.1"


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def choose_interface(env: MutableMapping[str, str], master_addr: str) -> str | None:
    """Name the network interface that leads to the master, for gloo and nccl, unless the user has.

    Without it gloo takes the address that the host's own name resolves to, which is often loopback, and then two
    machines wait for each other until the timeout. Returns the interface, or None where it could not be found out.
    """
    interface = interface_towards(master_addr)
    if interface is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface != "lo":  # on one machine nccl finds shared memory and NVLink by itself
            env.setdefault("NCCL_SOCKET_IFNAME", interface)
    return interface


def interface_towards(host: str) -> str | None:
    """The interface that packets to `host` leave by: asks the routing table with an unsent datagram (IPv4)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            own_address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                except OSError:
                    continue  # an interface without an IPv4 address
                if socket.inet_ntoa(reply[20:24]) == own_address:
                    # The master's own address, asked on the master, is routed over loopback but belongs to a card.
                    return name
    except OSError:
        return None
    return None


def cpu_threads(local_world_size: int) -> int:
    """Threads for each rank on this machine: an equal share of the cores that this process may use, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)
