"""The options of every command that runs on ranks, checked before any rank starts; the end of a
process.
"""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import DEMO, REPOSITORY, fails, python_path, run, write_files

from imagenet_cls.commands import distributed
from imagenet_cls.commands.train import train_command, train_parser
from imagenet_cls.config.load import load_config
from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel import cpus
from imagenet_cls.parallel.cpus import cgroup_cpus
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.launch import configure_agent


@pytest.mark.parametrize(
    "words",
    [
        "--gpus 0",
        "--gpus two",
        "--gpus 9223372036854775808",
        "--nodes 4:1",
        "--node-rank -1",
        "--master-port 65536",
        "--max-restarts -1",
    ],
)
def test_invalid_number_is_a_usage_error_that_names_it(words: str) -> None:
    with pytest.raises(UsageError, match=words.split()[0]):
        train_parser().parse_args(words.split())


def test_numbers_at_their_limits_are_accepted() -> None:
    words = ["--nproc_per_node=1", "--node-rank=0", "--master-port=65535", "--max-restarts=0"]
    found = train_parser().parse_args(words)
    values = (found.gpus, found.node_rank, found.master_port, found.max_restarts)
    assert values == (1, 0, 65535, 0)


@pytest.mark.parametrize(
    ("launcher", "nodes", "node_rank"),
    [("spawn", "1", "1"), ("pytorch", "2", "2"), ("pytorch", "1:4", "4")],
)
def test_node_rank_beyond_the_machines_exits_2(launcher: str, nodes: str, node_rank: str) -> None:
    """Otherwise all machines would wait for the one that is missing."""
    words = ["--launcher", launcher, "--nodes", nodes, "--node-rank", node_rank]
    err = fails(2, train_command, DEMO, "device=cpu", *words, "--master-addr", "127.0.0.1")
    assert "--node-rank" in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--launcher none --gpus 2", "--gpus 2"),
        ("--launcher none --nodes 2", "--nodes 2"),
        # must not train on this machine by itself; here it ends, since it has no address
        ("--nodes 2", "MASTER_ADDR"),
    ],
)
def test_several_ranks_that_nothing_starts_exit_2(words: str, named: str, tmp_path: Path) -> None:
    argv = [DEMO, "device=cpu", "--work-dir", tmp_path, *words.split()]
    assert named in fails(2, train_command, *argv)


def endpoint(nodes: str = "1", max_restarts: int = 0, init_method: str = "env://") -> str:
    config = configure_agent(1, nodes, 0, "host0", None, max_restarts, init_method, 30.0)
    return config.rdzv_endpoint


def test_rendezvous_file_that_ranks_can_not_use_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rendezvous"
    file.write_bytes(b"addresses")
    with pytest.raises(ResourceError):
        endpoint(init_method=f"file://{file}")
    endpoint("2", init_method=f"file://{file}")  # another machine's
    with pytest.raises(UsageError):
        endpoint(max_restarts=1, init_method=f"file://{tmp_path / 'new'}")


def test_elastic_job_uses_the_seconds_in_pet_rdzv_conf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=7, join_timeout=90,is_host=true")
    options = configure_agent(1, "1:2", 0, "host0", None, 0, "env://", 30.0).rdzv_configs
    assert options | {"last_call_timeout": "7", "join_timeout": "90", "is_host": "true"} == options
    for wrong in ("join_timeout=soon", "join_timeout=0", "join_timeout"):
        monkeypatch.setenv("PET_RDZV_CONF", wrong)
        with pytest.raises(UsageError, match="PET_RDZV_CONF"):
            endpoint("1:2")


# Prints at the exit, and if the interpreter is finalized.
PROGRAM = """
import atexit, concurrent.futures, sys, torch  # without torch, the exit is sys.exit
from imagenet_cls.commands.cli import main
class Last:
    def __del__(self):
        print("finalized")
kept = Last()
def command(words):
    concurrent.futures.ThreadPoolExecutor(1).submit(int)  # an idle thread remains
    atexit.register(print, "exit function")
    return 7
main(command)
"""


def test_command_ends_with_exit_functions_and_without_finalization(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run([sys.executable, script], PYTHONPATH=python_path(REPOSITORY))
    assert (done.returncode, done.stdout, done.stderr) == (7, "exit function\n", "")
    (tmp_path / "torch.py").touch()  # to import this one under a profiler takes no time
    profiled = run([sys.executable, "-m", "cProfile", script], PYTHONPATH=python_path(REPOSITORY))
    assert profiled.returncode == 0 and "exit function\n" in profiled.stdout
    assert "function calls" in profiled.stdout


def test_single_process_uses_no_more_threads_than_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `docker run --cpus=3` on a machine of 64 CPUs."""
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}
    write_files(tmp_path, files)
    for module in (distributed, cpus):
        monkeypatch.setattr(module, "cgroup_cpus", partial(cgroup_cpus, tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # restored after the test
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    try:
        distributed.prepare_process(load_config(None), RankInfo())
        assert torch.get_num_threads() == 3 and os.environ["OMP_NUM_THREADS"] == "3"
        monkeypatch.setenv("OMP_NUM_THREADS", "2,1")  # by level of nested parallelism
        distributed.prepare_process(load_config(None), RankInfo())
    finally:
        torch.set_num_threads(before)
