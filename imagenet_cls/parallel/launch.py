"""The ranks that are to be started on this machine: how many, where they meet, and what can be refused before.

Starts nothing: `spawn` and `torchrun` do. Refuses to check configs. Called by `ranks` in the launching process.
"""

import os
import socket
from dataclasses import dataclass

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE, cpu_threads

# Where several machines meet, unless the user names another port: torch's own default.
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Ranks:
    """What is to be started.

    gpus: processes on this machine. timeout_sec: longest wait for other machines. nodes: machines; `1:4` for an elastic
    job (pytorch). node_rank: which of them this is. by_file: the ranks meet in a file (parallel.init_method), so nobody
    needs an address. A port that is not given is a free one on one machine, and `DEFAULT_PORT` on several.
    """

    launcher: str
    gpus: int
    timeout_sec: float
    nodes: str = "1"
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0
    by_file: bool = False


def variables(ranks: Ranks) -> dict[str, str]:
    """What each rank is to find in its environment before it imports anything."""
    # The number of threads changes the last bits of a result, so it is always set, not only by one of the launchers.
    threads = os.environ.get("OMP_NUM_THREADS", str(cpu_threads(ranks.gpus)))
    return {LAUNCHED_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": threads}


def check_gpu_count(gpus: int, device: str) -> None:
    """Raise UsageError for more ranks than this machine has GPUs. Ranks on the CPU may be as many as one likes."""
    import torch

    present = torch.cuda.device_count()
    if device != "cpu" and 0 < present < gpus:
        raise UsageError(
            f"{gpus} ranks were asked for, but this machine shows {present} GPUs.\n"
            f"Ask for at most {present}, check CUDA_VISIBLE_DEVICES, or use device=cpu for ranks on the CPU."
        )


def check_port(ranks: Ranks) -> None:
    """Raise ResourceError where this machine can't listen on the port that it is to: taken, or not allowed."""
    if ranks.master_port is None or ranks.node_rank != 0 or ":" in ranks.nodes:  # an elastic job's agents may share it
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a run that has just ended leaves is none
        try:
            probe.bind(("", ranks.master_port))
        except OSError as error:
            raise ResourceError(
                f"the ranks can't meet on port {ranks.master_port} of this machine: {error.strerror}\n"
                "Name another (MASTER_PORT, --master-port, parallel.init_method). On one machine, leave it out: a free "
                "one is found."
            ) from error
