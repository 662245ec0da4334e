"""The options of every command that runs on ranks: what can't be carried out is refused before any rank is started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DEMO, REPOSITORY, TRAIN, environment

from imagenet_cls.commands.distributed import build_launch
from imagenet_cls.commands.program import main
from imagenet_cls.commands.train import train_command, train_parser
from imagenet_cls.config.schema import ParallelConfig
from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel.environment import LAUNCHED_VARIABLE
from imagenet_cls.parallel.exit import ERROR_FILE_VARIABLE


@pytest.mark.parametrize(
    "words",
    [
        ["--gpus", "0"],
        ["--gpus", "two"],
        ["--nodes", "0"],
        ["--nodes", "4:1"],
        ["--node-rank", "-1"],
        ["--master-port", "0"],
        ["--master-port", "65536"],
        ["--master-port", "http"],
        ["--max-restarts", "-1"],
    ],
)
def test_a_number_that_can_not_be_meant(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        train_parser().parse_args(words)
    told = capsys.readouterr().err
    assert left.value.code == 2 and words[0] in told and repr(words[1]) in told and len(told.splitlines()) == 2


def test_numbers_at_their_limits() -> None:
    words = ["--gpus=1", "--nodes=2:2", "--node-rank=0", "--master-port=65535", "--max-restarts=0"]
    found = train_parser().parse_args(words)
    values = (found.gpus, found.nodes, found.node_rank, found.master_port, found.max_restarts)
    assert values == (1, "2:2", 0, 65535, 0)


@pytest.mark.parametrize("launcher", ["spawn", "pytorch"])
@pytest.mark.parametrize(("nodes", "node_rank"), [("1", "1"), ("2", "2"), ("1:4", "4")])
def test_a_machine_that_is_none(launcher: str, nodes: str, node_rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise all machines would wait for the one that is missing."""
    words = [DEMO, "device=cpu", "--launcher", launcher, "--nodes", nodes, "--node-rank", node_rank]
    assert main(train_command, [*words, "--master-addr", "127.0.0.1"]) == 2
    told = capsys.readouterr().err
    assert f"--node-rank {node_rank} with --nodes {nodes}" in told and len(told.splitlines()) <= 3


@pytest.mark.parametrize("words", [["--gpus", "2"], ["--nodes", "2"]])
def test_without_a_launcher_no_ranks_are_started(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(train_command, [DEMO, "--launcher", "none", *words]) == 2
    assert f"{' '.join(words)} with --launcher none" in capsys.readouterr().err


def test_several_machines_are_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """--nodes alone must not train on this machine by itself; here it ends for want of an address."""
    assert main(train_command, [DEMO, "device=cpu", "--nodes", "2"]) == 2
    assert "needs an address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("init_method", "address"),
    [("env://", ("host0", 1)), ("tcp://host1:2", ("host1", 2)), ("tcp://[fd00::1]:2", ("fd00::1", 2))],
)
def test_an_address_in_the_config_goes_first(init_method: str, address: tuple[str, int]) -> None:
    arguments = train_parser().parse_args(["--master-addr", "host0", "--master-port", "1"])
    ranks = build_launch(arguments, ParallelConfig(init_method=init_method), "pytorch")
    assert (ranks.master_addr, ranks.master_port) == address and not ranks.rendezvous_file


def test_a_file_is_refused_that_ranks_of_one_machine_or_restarted_ones_can_not_use(tmp_path: Path) -> None:
    file = tmp_path / "meeting"
    file.write_bytes(b"addresses")
    there, new = (ParallelConfig(init_method=f"file://{path}") for path in (file, tmp_path / "new"))
    with pytest.raises(ResourceError, match="has left this file"):
        build_launch(train_parser().parse_args([]), there, "spawn")
    build_launch(train_parser().parse_args(["--nodes", "2"]), there, "spawn")  # another machine's
    with pytest.raises(UsageError, match="restarted can't use a file"):
        build_launch(train_parser().parse_args(["--max-restarts", "1"]), new, "pytorch")


def test_a_started_rank_that_can_not_find_its_place_leaves_its_words_to_the_launcher(tmp_path: Path) -> None:
    """Or they would be on the screen once for each rank."""
    place = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", LAUNCHED_VARIABLE: str(os.getpid())}
    env = environment(**place, **{ERROR_FILE_VARIABLE: str(tmp_path / "error.json")})
    rank = subprocess.run([sys.executable, TRAIN, DEMO], env=env, cwd=REPOSITORY, capture_output=True, text=True)
    assert (rank.returncode, rank.stderr) == (2, "")
    assert "RANK=2 with WORLD_SIZE=2" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


# Prints what is asked for at the exit, and what only a whole tear-down would come to.
PROGRAM = """
import atexit, concurrent.futures, sys
from imagenet_cls.commands.program import main
class Last:
    def __del__(self):
        print("taken down")
kept = Last()
def command(words):
    concurrent.futures.ThreadPoolExecutor(1).submit(int)  # whose thread stays, idle
    atexit.register(print, "asked for")
    if "interrupt" in words:
        raise KeyboardInterrupt
    return 7
sys.exit(main(command))
"""


@pytest.mark.parametrize(
    ("options", "words", "code", "told"),
    [
        ([], [], 7, ["asked for"]),
        ([], ["interrupt"], 130, ["asked for"]),
        (["-m", "cProfile"], [], 0, ["asked for"]),
    ],
    ids=["an end", "a Ctrl-C", "under a profiler"],
)
def test_a_program_does_at_its_end_what_was_asked_for_and_no_more(
    tmp_path: Path, options: list[str], words: list[str], code: int, told: list[str]
) -> None:
    """It runs the exit functions and frees no modules. A profiler still writes its report."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = environment(PYTHONPATH=str(REPOSITORY))
    command = [sys.executable, *options, str(script), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in told] == told and done.stderr == ""
    if options:
        assert any("function calls" in line for line in lines)
    else:
        assert (done.returncode, lines) == (code, told)
