"""Every launcher: two ranks reproduce the run of one, write one run folder, and print once."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

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
    train_here,
    wait_for,
)

STEPS = 4
Command = tuple[list[str], dict[str, str]]
Done = list[subprocess.CompletedProcess[str]]
TORCH_LAUNCH = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"]


def words_for(digits: Path, folder: Path, **changes: object) -> list[str]:
    return arguments(digits, folder, train__max_steps=STEPS, log__tensorboard="true", **changes)


@pytest.fixture(scope="module")
def one_rank(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train_here(words_for(digits, folder))
    return folder


def run_together(commands: list[Command], timeout_sec: float = 240) -> Done:
    """Commands that need each other, all at once; none outlives this function."""
    started = [
        subprocess.Popen(
            words, env=environment(**env), cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for words, env in commands
    ]
    done: Done = []
    watchdog = threading.Timer(timeout_sec, lambda: [process.kill() for process in started])
    watchdog.start()
    try:
        for process in started:
            out, err = process.communicate()
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        watchdog.cancel()
        for process in started:
            process.kill()
    return done


def assert_agrees(one_rank: Path, folders: list[Path], done: Done) -> None:
    """The run in the first folder, of two ranks, is that of one rank; the other folders hold logs and nothing else."""
    assert [process.returncode for process in done] == [0] * len(done), "\n".join(process.stderr for process in done)
    assert losses(folders[0]) == pytest.approx(losses(one_rank), rel=1e-4)
    assert len(losses(folders[0])) == STEPS
    assert [evaluation["images"] for evaluation in evaluations(folders[0])] == [359]
    assert [path.name for path in (folders[0] / "checkpoints").iterdir()] == [f"step-{STEPS:07d}"]
    assert len(list((folders[0] / "tensorboard").glob("events*"))) == 1
    logs = [path.name for folder in folders for path in (folder / "logs").iterdir()]
    assert sorted(logs) == ["rank0.log", "rank1.log"]
    for other in folders[1:]:
        assert [path.name for path in other.iterdir()] == ["logs"]
    output = "".join(process.stdout for process in done)
    assert output.count("run folder") == output.count("done\n") == 1, "only rank 0 speaks"
    seen = re.findall(r"^(?!.*\b(?:warn|nohup)).+$", "".join(process.stderr for process in done), re.M | re.I)
    assert not seen or "torch.distributed.launch" in str(done[0].args), seen


# ----------------------------------------------------------------------------------------------- torch's


@pytest.mark.nightly
def test_torch_distributed_launch_under_nohup(one_rank: Path, digits: Path, tmp_path: Path) -> None:
    """It passes --local-rank=N; the terminal closes (SIGHUP), and the run goes on."""
    words = words_for(digits, tmp_path / "run")
    env = environment(PET_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGQUIT")
    process = subprocess.Popen(
        ["nohup", *TORCH_LAUNCH, TRAIN, *words], env=env, cwd=REPOSITORY, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        log = tmp_path / "run" / "logs" / "rank1.log"
        wait_for(lambda: log.exists() or process.poll() is not None, "the ranks to meet")
        os.killpg(process.pid, signal.SIGHUP)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    assert_agrees(one_rank, [tmp_path / "run"], [done])


@pytest.mark.nightly
def test_torch_distributed_launch_with_use_env(one_rank: Path, digits: Path, tmp_path: Path) -> None:
    options = ["--use_env", "--nnodes", "1", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    command = [*TORCH_LAUNCH, *options, "--master_port", free_port(), TRAIN, *words_for(digits, tmp_path / "run")]
    assert_agrees(one_rank, [tmp_path / "run"], run_together([(command, {})]))


def test_by_hand(one_rank: Path, digits: Path, tmp_path: Path) -> None:
    """One process started for each rank; the local rank also as old launchers passed it."""
    words = words_for(digits, tmp_path / "run")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    commands = [
        ([sys.executable, TRAIN, f"--local_rank={rank}", *words], {"RANK": rank, "LOCAL_RANK": rank, **shared})
        for rank in ("0", "1")
    ]
    assert_agrees(one_rank, [tmp_path / "run"], run_together(commands))


# ------------------------------------------------------------------------------------------ several nodes


@pytest.mark.nightly
def test_spawn_on_two_nodes(one_rank: Path, digits: Path, tmp_path: Path) -> None:
    """Each in a folder of its own; the second finds the first by parallel.init_method."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    meeting = f"tcp://127.0.0.1:{free_port()}"
    commands: list[Command] = [
        (
            [sys.executable, TRAIN, *words_for(digits, folder, parallel__init_method=meeting), "--launcher", "spawn",
             "--gpus", "1", "--nodes", "2", "--node-rank", str(node)],
            {},
        )
        for node, folder in enumerate(folders)
    ]  # fmt: skip
    assert_agrees(one_rank, folders, run_together(commands))


def test_dist_train_on_two_nodes(one_rank: Path, digits: Path, tmp_path: Path) -> None:
    folders, port = [tmp_path / "node0", tmp_path / "node1"], free_port()
    commands: list[Command] = []
    for node, folder in enumerate(folders):
        config, *rest = words_for(digits, folder)
        env = {"NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        commands.append((["bash", DIST_TRAIN, config, "1", *rest], env))
    assert_agrees(one_rank, folders, run_together(commands))


def test_a_machine_that_nobody_joins_says_where_it_waits_and_ends(digits: Path, tmp_path: Path) -> None:
    """As where NODE_RANK was forgotten on the second one, or the first was never started."""
    config, *rest = arguments(digits, tmp_path / "run", parallel__timeout_sec=3)
    port = str(free_port())
    done = run(["bash", DIST_TRAIN, config, "1", *rest], NNODES="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.stdout == f"node 0 of 2: rendezvous at 127.0.0.1:{port}\n"
    assert done.returncode == 5 and "1/2 clients joined" in done.stderr and len(done.stderr.splitlines()) <= 3
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_an_elastic_job_takes_who_comes_and_restarts(one_rank: Path, digits: Path, tmp_path: Path) -> None:
    """Two machines of one to two; on one of them the rank is killed: all start again, and go on by themselves, though
    either machine may have rank 0 then."""
    folder, port = tmp_path / "run", free_port()
    config, *rest = words_for(digits, folder)
    env = {"NNODES": "1:2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MAX_RESTARTS": "1"}
    command: Command = (["bash", DIST_TRAIN, config, "1", *rest], env)
    killed: list[int] = []

    def kill_rank_one() -> None:
        log = folder / "logs" / "rank1.log"
        wait_for(lambda: log.exists() and "process" in log.read_text(), "the ranks to meet")
        killed.append(int(re.findall(r"process (\d+)", log.read_text())[-1]))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_rank_one)
    killer.start()
    done = run_together([command, command])
    killer.join()
    assert [process.returncode for process in done] == [0, 0], "\n".join(process.stderr for process in done)
    assert killed and losses(folder) == pytest.approx(losses(one_rank), rel=1e-4)
    assert (folder / "logs" / "rank1.log").read_text().count("rank 1 of 2") == 2, "it was started twice"


# --------------------------------------------------------------------------------------- ports and files


def test_a_given_port_that_is_taken_is_named(digits: Path, tmp_path: Path) -> None:
    words = words_for(digits, tmp_path / "run")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        done = run_together([
            (["bash", DIST_TRAIN, words[0], "2", *words[1:]], {"MASTER_PORT": port}),
            ([sys.executable, TRAIN, *words, "--gpus", "2", "--master-port", port], {}),
        ])  # fmt: skip
    for process in done:
        assert (process.returncode, process.stdout) == (5, "")
        assert f"port {port}" in process.stderr and len(process.stderr.splitlines()) <= 3
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_two_jobs_at_once_and_one_of_them_meets_in_a_file(one_rank: Path, digits: Path, tmp_path: Path) -> None:
    """Nobody names a port. The file goes away with the run, so that the next one may have it."""
    store = tmp_path / "meeting"
    config, *rest = words_for(digits, tmp_path / "a")
    commands: list[Command] = [(["bash", DIST_TRAIN, config, "2", *rest], {})]
    words = words_for(digits, tmp_path / "b", parallel__init_method=f"file://{store}")
    commands.append(([sys.executable, TRAIN, *words, "--gpus", "2"], {}))
    for name, process in zip("ab", run_together(commands), strict=True):
        assert_agrees(one_rank, [tmp_path / name], [process])
    assert not store.exists()


# ------------------------------------------------------------------------------------------ MPI and SLURM


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_mpirun(one_rank: Path, digits: Path, tmp_path: Path) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    command += [sys.executable, TRAIN, *words_for(digits, tmp_path / "run")]
    assert_agrees(one_rank, [tmp_path / "run"], run_together([(command, {})]))


@pytest.mark.nightly
def test_slurm_train_on_two_machines(one_rank: Path, digits: Path, tmp_path: Path, slurm: dict[str, str]) -> None:
    script = str(REPOSITORY / "scripts" / "slurm_train.sh")
    env = slurm | {"GPUS": "2", "GPUS_PER_NODE": "1", "CPUS_PER_TASK": "1", "SRUN_ARGS": "--quiet --time=5"}
    command = ["bash", script, "main", "tests", *words_for(digits, tmp_path / "run")]
    assert_agrees(one_rank, [tmp_path / "run"], run_together([(command, env)]))
    told = (tmp_path / "run" / "logs" / "rank1.log").read_text()
    assert "rank 1 of 2 on cpu" in told


@pytest.mark.nightly
def test_srun_inside_a_batch_job(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Two tasks on one machine. In the batch script itself, which has SLURM's variables too, nothing is a rank."""
    find = "import os; from imagenet_cls.parallel.environment import find_rank_info as f; assert f(os.environ) is None"
    script, output = tmp_path / "job.sh", tmp_path / "output.txt"
    check = REPOSITORY / "tools" / "check_dist.py"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --ntasks=2 --nodes=1 --output={output}\nset -e\n"
        f"'{sys.executable}' -c '{find}'\nsrun '{sys.executable}' '{check}' device=cpu\n"
    )
    batch = run_together([(["sbatch", "--wait", str(script)], slurm)])[0]
    assert batch.returncode == 0, output.read_text()
    rows = [line.split()[:3] for line in output.read_text().splitlines()]
    assert rows[1:3] == [["0", "0", "2"], ["1", "1", "2"]], "rank, local rank, world size"
