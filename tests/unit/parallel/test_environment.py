"""Rank information from each launcher's variables, without torch."""

import contextlib
import math
import os
import shutil
import subprocess
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers import write_files

from imagenet_cls.commands.distributed import parse_rank_arguments
from imagenet_cls.commands.train import train_parser
from imagenet_cls.errors import UsageError
from imagenet_cls.parallel import cpus, network
from imagenet_cls.parallel.cpus import cgroup_cpus, cpu_threads, cpus_per_rank
from imagenet_cls.parallel.environment import (
    LAUNCHED_VARIABLE,
    RankInfo,
    complete_master_address,
    find_rank_info,
    first_host,
)
from imagenet_cls.parallel.network import address_towards, choose_interface

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
}
# A shell on an allocation of four tasks (salloc, srun --pty): a step of one.
SHELL = {
    **SLURM,
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "984285185",
}
# MPICH's and Intel's
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
JOBS = [str(job) for job in range(4711, 4721)]
BY_HAND = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "launcher", "expected"),
    [
        ({}, "auto", None),
        (TORCHRUN, "auto", (5, 1, 8, 4)),
        (TORCHRUN, "none", None),
        (SLURM, "auto", (3, 1, 4, 2)),
        (SLURM, "mpi", UsageError),
        (OPEN_MPI, "auto", (2, 0, 4, 2)),
        ({**SLURM, **OPEN_MPI, **TORCHRUN}, "auto", (5, 1, 8, 4)),  # the most explicit
        # sbatch's own script
        ({key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}, "auto", None),
        (SHELL, "auto", None),
        (SHELL, "slurm", (0, 0, 1, 1)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, "auto", (3, 1, 4, 1)),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, "auto", (3, 1, 4, 2)),  # srun --mpi=pmi2
        ({**SHELL, **OPEN_MPI}, "auto", (2, 0, 4, 2)),  # mpirun in a job starts its helpers by srun
        (PMI, "auto", (3, 1, 4, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpi", UsageError),  # which GPU?
        (BY_HAND, "auto", (0, 0, 2, 1)),
        ({**BY_HAND, "MASTER_ADDR": "127.0.0.1"}, "auto", (0, 0, 2, 2)),  # all on this machine
        ({"RANK": "0", "WORLD_SIZE": "1"}, "auto", None),  # a pod, or one process started by hand
        ({"RANK": "1", "WORLD_SIZE": "1"}, "auto", UsageError),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "pytorch", None),  # a pod, which starts its ranks
        (SLURM, "spawn", None),  # one task for each machine, which starts the ranks of its GPUs
        ({"RANK": "0", "WORLD_SIZE": "2"}, "auto", UsageError),  # which GPU?
        ({"RANK": "\N{SUPERSCRIPT TWO}", "WORLD_SIZE": "4"}, "auto", UsageError),
    ],
)
def test_find_rank_info_for_each_launcher(
    env: dict[str, str], launcher: str, expected: Any
) -> None:
    if expected is UsageError:
        with pytest.raises(UsageError):
            find_rank_info(env, launcher)
    else:
        found = find_rank_info(env, launcher)
        assert (found and astuple(found)[:4]) == expected


def test_find_rank_info_of_a_spawned_rank_names_spawn() -> None:
    assert [find_rank_info(TORCHRUN, launcher).launcher for launcher in ("auto", "spawn")] == [
        "pytorch",
        "spawn",
    ]


@pytest.mark.parametrize(
    ("env", "words", "is_error"),
    [
        (TORCHRUN, ["--gpus", "4"], True),
        (TORCHRUN, ["--gpus", "4", "--nodes", "2"], False),  # the ranks that there are
        ({**TORCHRUN, LAUNCHED_VARIABLE: "1"}, ["--gpus", "4"], False),  # one of ours
        (SLURM, ["--gpus", "8"], True),
        (OPEN_MPI, [], False),
    ],
)
def test_options_that_ask_for_other_ranks_than_the_launcher_are_an_error(
    env: dict[str, str], words: list[str], is_error: bool
) -> None:
    with (
        patch.dict(os.environ, env, clear=True),
        pytest.raises(UsageError) if is_error else contextlib.nullcontext(),
    ):
        assert parse_rank_arguments(train_parser(), ["demo", *words])[1] is not None


def completed(env: dict[str, str]) -> dict[str, str]:
    rank_info, env = find_rank_info(env), dict(env)
    complete_master_address(env, rank_info)
    return env


@pytest.mark.parametrize(
    ("env", "address"),
    [
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[003-007,9],cpu1"}, "gpu003"),
        ({**OPEN_MPI, "SLURM_JOB_NODELIST": "gpu[003-007]"}, "gpu003"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),  # on one machine
        ({**PMI, "MASTER_ADDR": "here"}, "here"),
    ],
)
def test_complete_master_address_without_master_addr_uses_the_first_host(
    env: dict[str, str], address: str
) -> None:
    found = completed(env)
    assert found["MASTER_ADDR"] == address and 20000 <= int(found["MASTER_PORT"]) < 32000
    assert completed(env | {"MASTER_PORT": "1"})["MASTER_PORT"] == "1"


def test_complete_master_address_leaves_torchs_alone_and_needs_mpis() -> None:
    assert completed(TORCHRUN) == TORCHRUN
    with pytest.raises(UsageError):
        completed(PMI)


def test_ports_differ_between_jobs_and_agree_between_ranks() -> None:
    jobs = [SLURM | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in JOBS for step in "012"]
    for job in ("984285185", "984350721"):
        jobs.append(OPEN_MPI | {"MASTER_ADDR": "here", "OMPI_MCA_ess_base_jobid": job})
    ports = [completed(job)["MASTER_PORT"] for job in jobs]
    assert len(set(ports)) == len(jobs)
    rank0 = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "OMPI_COMM_WORLD_RANK": "0"}
    assert [completed(job | rank0)["MASTER_PORT"] for job in jobs] == ports


def test_first_host_of_a_slurm_node_list() -> None:
    for nodes, host in {
        "rack[1-2]node[03-04],x": "rack1node03",
        "10.0.0.[5-6]": "10.0.0.5",
        "": "127.0.0.1",
    }.items():
        assert first_host(nodes) == host


def chosen(master_addr: str, several_machines: bool, **env: str) -> dict[str, str]:
    choose_interface(env, master_addr, several_machines)
    return env


def test_choose_interface_towards_the_master_keeps_the_users_choice() -> None:
    loopback, own = {"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "ib0"}
    assert chosen("127.0.0.1", several_machines=True) == loopback
    assert chosen("127.0.0.1", several_machines=False, **own) == own
    assert chosen("no.such.host.invalid", several_machines=True) == {}


def test_nccl_gets_the_exact_name_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interface_towards", lambda _: "ens1")
    expected = {"GLOO_SOCKET_IFNAME": "ens1", "NCCL_SOCKET_IFNAME": "=ens1"}
    assert chosen("10.0.0.1", several_machines=True) == expected


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip (Debian: iproute2)")
def test_choose_interface_for_a_master_named_loopback_uses_the_default_route() -> None:
    """In Debian's /etc/hosts the machine's own name is 127.0.1.1."""
    assert chosen("127.0.1.1", several_machines=False)["GLOO_SOCKET_IFNAME"] == "lo"
    routes = subprocess.check_output(["ip", "-4", "route", "show", "default"], text=True).split()
    default = routes[routes.index("dev") + 1] if routes else None
    assert chosen("127.0.1.1", several_machines=True).get("GLOO_SOCKET_IFNAME") == default
    assert address_towards("127.0.1.1") == "127.0.1.1"
    assert default is None or not address_towards("192.0.2.200").startswith("127.")


def test_cpu_threads_are_whole_cpus_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: 4.5)
    assert (cpu_threads(1), cpu_threads(2), cpu_threads(8)) == (4, 2, 1)
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    assert cpu_threads(1) >= 1


CONTAINER_V1 = "9:name=systemd:/\n4:cpu,cpuacct:/docker/4711\n3:cpuset:/docker/4711\n"


@pytest.mark.parametrize(
    ("own_cgroups", "files", "expected"),
    [
        (None, {}, math.inf),  # no cgroups
        ("0::/\n", {}, math.inf),  # the root has no cpu.max
        ("0::/\n", {"cpu.max": "750000 100000\n"}, 7.5),  # a container
        # the upper one limits
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "400000 100000\n"}, 2.0),
        ("0::/a\n", {"a/cpu.max": "max 100000\n", "other/cpu.max": "100000 100000\n"}, math.inf),
        (
            CONTAINER_V1,
            {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        (
            CONTAINER_V1,
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            math.inf,
        ),
        (
            "1:cpu:/a\n0::/\n",  # both versions
            {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
    ],
)
def test_cgroup_cpus_is_the_smallest_quota(
    tmp_path: Path, own_cgroups: str | None, files: dict[str, str], expected: float
) -> None:
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    if own_cgroups is not None:
        texts["proc/self/cgroup"] = own_cgroups
    write_files(tmp_path, texts)
    assert cgroup_cpus(tmp_path) == expected


STEP = {"SLURM_STEP_ID": "0"}
PER_TASK = {"SLURM_CPUS_PER_TASK": "6"}
EIGHT_TASKS = {**STEP, **PER_TASK, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
PER_GPU = {**STEP, "SLURM_CPUS_PER_GPU": "8"}
# A step with one task on each machine.
ONE_TASK = {**PER_GPU, "SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@pytest.mark.parametrize(
    ("env", "cpus_here", "ranks", "launcher", "expected"),
    [
        ({}, 12, 8, "pytorch", 1.5),
        (PER_TASK, 12, 1, "pytorch", 12),  # of the job, not of a step
        (STEP | PER_TASK, 12, 8, "slurm", 6),  # each rank is a task
        (STEP | PER_TASK, 12, 3, "pytorch", 2),  # three ranks in one task
        (EIGHT_TASKS, 12, 8, "pytorch", 6),  # tasks that set RANK
        # SLURM may bind each task to its own CPUs, which no other rank shares
        (PER_GPU, 8, 4, "slurm", 8),
        (ONE_TASK, 64, 1, "slurm", 32),
        (ONE_TASK, 8, 1, "slurm", 8),
        (ONE_TASK, 64, 4, "pytorch", 8),
        (ONE_TASK, 8, 4, "pytorch", 2),
    ],
)
def test_cpus_per_rank_in_a_step_of_slurm(
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    cpus_here: int,
    ranks: int,
    launcher: str,
    expected: float,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus_here))
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: math.inf)
    with patch.dict(os.environ, env, clear=True):
        assert cpus_per_rank(RankInfo(0, 0, ranks, ranks, launcher)) == expected
