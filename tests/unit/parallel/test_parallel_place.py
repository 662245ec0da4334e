"""Who am I: from each launcher's variables, without torch."""

import os
import subprocess
import sys
from typing import Any

import pytest

from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.place import (
    Place,
    choose_interface,
    complete_master_address,
    cpu_threads,
    find_place,
    first_host,
    free_port,
    interface_towards,
)

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_ID": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


def numbers(place: Place | None) -> tuple[int, int, int, int] | None:
    return place and (place.rank, place.local_rank, place.world_size, place.local_world_size)


@pytest.mark.parametrize(
    ("env", "launcher", "expected"),
    [
        ({}, "auto", None),
        (TORCHRUN, "auto", (5, 1, 8, 4)),
        (TORCHRUN, "none", None),
        (SLURM, "auto", (3, 1, 4, 2)),
        (SLURM, "mpi", UsageError),
        (OPEN_MPI, "auto", (2, 0, 4, 2)),
        (OPEN_MPI, "slurm", UsageError),
        ({**SLURM, **OPEN_MPI, **TORCHRUN}, "auto", (5, 1, 8, 4)),  # the most explicit
        ({**SLURM, **OPEN_MPI}, "mpi", (2, 0, 4, 2)),
        ({key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}, "auto", None),  # sbatch's own script
        (
            {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            "auto",
            None,
        ),  # an interactive step
        ({"RANK": "0", "WORLD_SIZE": "1"}, "auto", (0, 0, 1, 1)),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "auto", (1, 1, 2, 2)),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "auto", UsageError),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "auto", UsageError),  # which GPU?
        ({"RANK": "0"}, "auto", UsageError),
        ({"RANK": "one", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "auto", UsageError),
        ({"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "auto", UsageError),
    ],
)
def test_places(env: dict[str, str], launcher: str, expected: Any) -> None:
    if expected is UsageError:
        with pytest.raises(UsageError) as error:
            find_place(env, launcher)
        assert str(error.value).count("\n") == 1  # what, and what to do
    else:
        assert numbers(find_place(env, launcher)) == expected


def test_a_master_is_found_where_the_launcher_names_none() -> None:
    env = {**SLURM, "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "gpu[003-007,9],cpu1"}
    complete_master_address(env, "slurm")
    assert env["MASTER_ADDR"] == "gpu003" and 20000 <= int(env["MASTER_PORT"]) < 40000
    other = {**SLURM, "SLURM_JOB_ID": "4712", "SLURM_STEP_NODELIST": "gpu1"}
    complete_master_address(other, "slurm")
    assert other["MASTER_PORT"] != env["MASTER_PORT"]  # two jobs on one host do not meet
    given = {"MASTER_ADDR": "here", "MASTER_PORT": "1"}
    complete_master_address(given, "mpi")
    assert given == {"MASTER_ADDR": "here", "MASTER_PORT": "1"}
    by_torchrun: dict[str, str] = {}
    complete_master_address(by_torchrun, "pytorch")
    assert by_torchrun == {}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[003-007,9],cpu1", "gpu003"), ("n1,n2", "n1"), ("n1", "n1"), ("r[1-2]n", "r1n"), ("", "127.0.0.1")],
)
def test_first_hosts(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_the_interface_that_leads_to_the_master() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") is None
    env: dict[str, str] = {}
    assert choose_interface(env, "127.0.0.1") == "lo" and env == {"GLOO_SOCKET_IFNAME": "lo"}
    theirs = {"GLOO_SOCKET_IFNAME": "ib0"}
    choose_interface(theirs, "127.0.0.1")
    assert theirs["GLOO_SOCKET_IFNAME"] == "ib0"


def test_ports_and_threads() -> None:
    assert 1024 <= free_port() < 65536
    cores = len(os.sched_getaffinity(0))
    assert cpu_threads(1) == cores and cpu_threads(cores) == 1 and cpu_threads(10 * cores) == 1


def test_asking_costs_no_torch() -> None:
    script = "import sys, imagenet_cls.parallel.place; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0
