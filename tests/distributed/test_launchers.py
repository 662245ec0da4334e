"""Every launcher: two ranks reproduce the run of one, write one run folder, and print once."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    DIST_TRAIN,
    REPOSITORY,
    TRAIN,
    arguments,
    environment,
    evaluations,
    free_port,
    losses,
    run,
    steps_done,
    train_here,
    wait_for,
)

STEPS = 4
Command = tuple[list[str], dict[str, str]]
Done = list[subprocess.CompletedProcess[str]]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TORCH_LAUNCH = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"]


def words_for(digits: Path, folder: Path, **changes: object) -> list[str]:
    return arguments(
        digits, folder, **({"train__max_steps": STEPS, "log__tensorboard": "true"} | changes)
    )


@pytest.fixture(scope="module")
def one_rank(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train_here(words_for(digits, folder))
    return folder


def run_together(commands: list[Command]) -> Done:
    """Commands that need each other, all at once; none outlives this function."""
    with ThreadPoolExecutor(len(commands)) as threads:
        return list(threads.map(lambda command: run(command[0], **command[1]), commands))


def assert_agrees(one_rank: Path, folders: list[Path], done: Done) -> None:
    """The run in the first folder, of two ranks, is that of one rank; the other folders hold logs
    and nothing else.
    """
    assert [process.returncode for process in done] == [0] * len(done), "\n".join(
        process.stderr for process in done
    )
    assert losses(folders[0]) == pytest.approx(losses(one_rank), rel=1e-4)
    assert [evaluation["images"] for evaluation in evaluations(folders[0])] == [359]
    assert [path.name for path in (folders[0] / "checkpoints").glob("step-*")] == [
        f"step-{STEPS:07d}"
    ]
    assert len(list((folders[0] / "tensorboard").glob("events*"))) == 1
    logs = [path.name for folder in folders for path in (folder / "logs").iterdir()]
    assert sorted(logs) == ["rank0.log", "rank1.log"]
    for other in folders[1:]:
        assert [path.name for path in other.iterdir()] == ["logs"]
    output = "".join(process.stdout for process in done)
    assert output.count("run folder") == output.count("done\n") == 1, "only rank 0 prints"
    seen = re.findall(r"^(?!.*\bwarn).+$", "".join(process.stderr for process in done), re.M | re.I)
    assert not seen or "torch.distributed.launch" in str(done[0].args), seen


# ---- torch's


@pytest.mark.nightly
def test_torch_distributed_launch_agrees_with_one_rank(
    one_rank: Path, digits: Path, tmp_path: Path
) -> None:
    """It passes --local-rank=N."""
    words = [*TORCH_LAUNCH, TRAIN, *words_for(digits, tmp_path / "run")]
    assert_agrees(one_rank, [tmp_path / "run"], run_together([(words, {})]))


def test_two_spawned_ranks_agree_with_one_rank(
    one_rank: Path, digits: Path, tmp_path: Path
) -> None:
    """With a network that a module under `imports` registers, and a module of the working directory
    named `queue`.
    """
    (tmp_path / "queue.py").write_text("raise RuntimeError('not the library')\n")
    registered = {"model__name": "helpers_registered", "imports": "[registered]"}
    words = words_for(digits, tmp_path / "run", **registered)
    done = run([sys.executable, TRAIN, *words, "--gpus", "2"], cwd=tmp_path)
    assert_agrees(one_rank, [tmp_path / "run"], [done])


def test_ranks_started_by_hand_agree_with_one_rank(
    one_rank: Path, digits: Path, tmp_path: Path
) -> None:
    """One process started for each rank, each with a run folder of its own; the local rank also as
    old launchers passed it.
    """
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    commands = [
        (
            [sys.executable, TRAIN, f"--local_rank={rank}", *words_for(digits, tmp_path / rank)],
            {"RANK": rank, "LOCAL_RANK": rank, **shared},
        )
        for rank in "01"
    ]
    assert_agrees(one_rank, [tmp_path / "0", tmp_path / "1"], run_together(commands))


# ---- several nodes


# The environment of `dist_train.sh` or torchrun on machine N of two, whose first has a port P.
MACHINES = {
    "script": {"NNODES": "2", "NODE_RANK": "N", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "P"},
    # torchrun in pods with one GPU each: the variables of Kubeflow's training operator
    "torchrun": {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "P",
        "WORLD_SIZE": "2",
        "RANK": "N",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "P",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "N",
        "PET_NPROC_PER_NODE": "1",
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["spawn", *MACHINES])
def test_two_machines_agree_with_one_rank(
    one_rank: Path, digits: Path, tmp_path: Path, launcher: str
) -> None:
    """Each has a run folder of its own."""
    folders, port = [tmp_path / "0", tmp_path / "1"], free_port()
    commands: list[Command] = []
    for node, folder in zip("01", folders, strict=True):
        config, *rest = words_for(digits, folder)
        if launcher == "spawn":
            rest.append(f"parallel.init_method=tcp://127.0.0.1:{port}")
            options = ["--launcher", "spawn", "--gpus", "1", "--nodes", "2", "--node-rank", node]
            commands.append(([sys.executable, TRAIN, config, *rest, *options], {}))
            continue
        env = {
            name: re.sub(r"\bP$", port, re.sub("^N$", node, value))
            for name, value in MACHINES[launcher].items()
        }
        command = ["bash", DIST_TRAIN, config, "1"]
        if launcher == "torchrun":
            command = [*TORCHRUN, TRAIN, config]
        commands.append(([*command, *rest], env))
    assert_agrees(one_rank, folders, run_together(commands))


SSH = """#!/bin/sh
case "$2 $3" in
    "127.0.0.1 "*NODE_RANK=0*MASTER_ADDR=127.0.0.1*) ;;
    "127.0.0.2 "*NODE_RANK=1*MASTER_ADDR=127.0.0.1*) ;;
    *) exit 99 ;;
esac
cd / && exec sh -c "$3"
"""


def test_ssh_train_agrees_with_one_rank_and_passes_the_exit_code(
    one_rank: Path, digits: Path, tmp_path: Path
) -> None:
    """With a program in place of ssh that starts the command here. A relative run folder is below
    this folder.
    """
    ssh, script = tmp_path / "bin" / "ssh", str(REPOSITORY / "scripts" / "ssh_train.sh")
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    env = {
        "PATH": f"{ssh.parent}:{os.environ['PATH']}",
        "HOSTS": "127.0.0.1\n127.0.0.2",  # as `scontrol show hostnames` prints them
        "MASTER_PORT": free_port(),
    }
    config, *rest = words_for(digits, Path("a run"))
    for words, code in ((rest, 0), (["optimizer.lr=many"], 2)):
        done = run(["bash", script, config, "1", *words], cwd=tmp_path, **env)
        assert done.returncode == code, done.stderr
        assert done.stdout.count("done\n") == (code == 0), "only rank 0 prints"
    assert losses(tmp_path / "a run") == pytest.approx(losses(one_rank), rel=1e-4)


def test_node_without_the_other_exits_5(digits: Path, tmp_path: Path) -> None:
    config, *rest = arguments(digits, tmp_path / "run", parallel__timeout_sec=3)
    port = str(free_port())
    done = run(
        ["bash", DIST_TRAIN, config, "1", *rest],
        NNODES="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    assert done.stdout == f"node 0 of 2: rendezvous at 127.0.0.1:{port}\n"
    assert done.returncode == 5 and "1/2 clients joined" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_elastic_job_with_a_third_machine_for_a_while(digits: Path, tmp_path: Path) -> None:
    """torchrun restarts the ranks when it joins, and when it is lost. With SyncBN the losses are
    those of one rank all the time.
    """
    common: dict[str, Any] = {
        "optimizer__lr": 0.003,
        "train__global_batch_size": 64,
        "train__max_steps": 90,
        "train__epochs": 5,
        "checkpoint__every_steps": 5,
        "parallel__sync_bn": "true",
    }
    folder, port = tmp_path / "run", free_port()
    agents: list[subprocess.Popen[bytes]] = []
    # imports of the third may take long
    paused = f"{{dropout: 0.0, pause_sec: 2.0, pause_until: {tmp_path}/hurry}}"
    config, *rest = arguments(digits, folder, "noisy", **common, model__kwargs=paused)
    elastic = ["--nnodes=2:3", "--max-restarts=1", "--rdzv-conf=last_call_timeout=5"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", OMP_NUM_THREADS="1")

    def start_agent() -> subprocess.Popen[bytes]:
        command = [*TORCHRUN, *elastic, *meeting, TRAIN, config, *rest, "--resume"]
        return subprocess.Popen(command, env=env, cwd=REPOSITORY)

    def starts(ranks: int) -> int:
        log = folder / "logs" / "rank1.log"
        return log.read_text().count(f"rank 1 of {ranks} on") if log.exists() else 0

    def wait(condition: Callable[[], bool], what: str) -> None:
        wait_for(lambda: condition() or any(agent.poll() is not None for agent in agents), what)
        assert condition(), what

    try:
        agents += [start_agent(), start_agent()]
        wait(lambda: steps_done(folder) >= 5, "five steps of two ranks")
        agents.append(start_agent())
        wait(lambda: starts(3) == 1, "three ranks")
        before = steps_done(folder)
        wait(lambda: steps_done(folder) >= before + 7, "seven steps of three ranks")
        lost = agents.pop()
        for pid in (
            *Path(f"/proc/{lost.pid}/task/{lost.pid}/children").read_text().split(),
            str(lost.pid),
        ):
            os.kill(int(pid), signal.SIGKILL)
        wait(lambda: starts(2) == 2, "two ranks again")
        (tmp_path / "hurry").touch()
        assert [agent.wait(240) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    train_here(
        arguments(digits, tmp_path / "one", "noisy", **common, model__kwargs="{dropout: 0.0}")
    )
    assert (
        losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
        and len(losses(folder)) == 90
    )


# ---- ports and files


def test_port_in_use_exits_5_and_is_named(digits: Path, tmp_path: Path) -> None:
    words = words_for(digits, tmp_path / "run")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        done = run_together(
            [
                (["bash", DIST_TRAIN, words[0], "2", *words[1:]], {"MASTER_PORT": port}),
                ([sys.executable, TRAIN, *words, "--gpus", "2", "--master-port", port], {}),
            ]
        )
    for process in done:
        assert (process.returncode, process.stdout) == (5, "")
        assert port in process.stderr
    assert not (tmp_path / "run").exists()


# ---- MPI and SLURM


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_mpirun_agrees_with_one_rank(one_rank: Path, digits: Path, tmp_path: Path) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    command += [sys.executable, TRAIN, *words_for(digits, tmp_path / "run")]
    assert_agrees(one_rank, [tmp_path / "run"], run_together([(command, {})]))


@pytest.mark.nightly
def test_slurm_train_agrees_with_one_rank(
    one_rank: Path, digits: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    script = str(REPOSITORY / "scripts" / "slurm_train.sh")
    env = slurm | {
        "GPUS": "2",
        "GPUS_PER_NODE": "1",
        "CPUS_PER_TASK": "1",
        "SRUN_ARGS": "--quiet --time=5",
    }
    command = ["bash", script, "main", "tests", *words_for(digits, tmp_path / "run")]
    assert_agrees(one_rank, [tmp_path / "run"], run_together([(command, env)]))


@pytest.mark.nightly
def test_batch_file_of_the_docs_agrees_with_one_rank(
    one_rank: Path, digits: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    text = (REPOSITORY / "docs" / "launchers.md").read_text()
    file = re.findall(r"```bash\n(#!/usr/bin/env bash\n#SBATCH.*?)```", text, re.DOTALL)[0]
    file = re.sub(r"(--(?:ntasks-per-node|gpus-per-node|cpus-per-task))=8", r"\1=1", file).replace(
        "24:00:00", "5"
    )
    command = shlex.join([sys.executable, TRAIN, *words_for(digits, tmp_path / "run")])
    assert file.count("python tools/train.py configs/resnet50.yaml ") == 1
    file = file.replace("python tools/train.py configs/resnet50.yaml", command)
    (tmp_path / "job.sh").write_text(file)
    output = tmp_path / "output.txt"
    (done,) = run_together(
        [(["sbatch", "--wait", f"--output={output}", str(tmp_path / "job.sh")], slurm)]
    )
    assert done.returncode == 0, output.read_text()
    assert losses(tmp_path / "run") == pytest.approx(losses(one_rank), rel=1e-4)
