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
        "--nodes 0",
        "--node-rank -1",
        "--master-port 65536",
    ],
)
def test_invalid_number_is_a_usage_error_that_names_it(words: str) -> None:
    with pytest.raises(UsageError, match=words.split()[0]):
        train_parser().parse_args(words.split())


def test_numbers_at_their_limits_are_accepted() -> None:
    words = ["--nproc_per_node=1", "--node-rank=0", "--master-port=65535"]
    found = train_parser().parse_args(words)
    assert (found.gpus, found.node_rank, found.master_port) == (1, 0, 65535)


@pytest.mark.parametrize(
    ("launcher", "nodes", "node_rank"),
    [("spawn", "1", "1"), ("pytorch", "2", "2")],
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


def test_rendezvous_file_that_ranks_can_not_use_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rendezvous"
    file.write_bytes(b"addresses")
    with pytest.raises(ResourceError):
        configure_agent(1, 1, 0, "host0", None, f"file://{file}", 30.0)
    configure_agent(1, 2, 0, "host0", None, f"file://{file}", 30.0)  # another machine's


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
