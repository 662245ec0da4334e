"""Signals to a run with a launcher, a killed launcher, a killed rank: what is saved, and that no
process remains.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    DIST_TRAIN,
    REPOSITORY,
    TRAIN,
    arguments,
    environment,
    pids_by_rank,
    steps_done,
    wait_for,
)
from same_run import assert_same_run, words_for

ByRanks = Callable[[int], Path]
NIGHTLY = pytest.mark.nightly

# In the environment of all processes of a run, including data workers and torch's helpers.
MARK = "TESTS_MARK"

# Long enough for a signal to end it.
EPOCHS, STEPS_PER_EPOCH = 40, 11


def command_for(launcher: str, digits: Path, folder: Path, **kwargs: Any) -> list[str]:
    """kwargs: of `helpers.noisy`."""
    network = {f"model__kwargs__{name}": value for name, value in kwargs.items()}
    config, *rest = arguments(
        digits,
        folder,
        "noisy",
        **network,
        data__num_workers=1,
        train__epochs=EPOCHS,
        checkpoint__every_epochs="null",
    )
    return {
        "alone": [sys.executable, TRAIN, config, *rest],
        "spawn": [sys.executable, TRAIN, config, *rest, "--gpus", "2"],
        "dist_train.sh": ["bash", DIST_TRAIN, config, "2", *rest],
    }[launcher]


@contextmanager
def watched(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in this folder, in a process group of its own. None of its processes outlives the
    context.
    """
    with subprocess.Popen(
        command,
        env=environment(**{MARK: str(folder)}),
        cwd=REPOSITORY,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            for pid in processes_of(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def started(
    launcher: str,
    digits: Path,
    folder: Path,
    prefix: Sequence[str] = (),
    pause_sec: float = 0.05,
    **kwargs: Any,
) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """(launching process, process ids by rank) once the first step is done."""
    with watched(
        [*prefix, *command_for(launcher, digits, folder, pause_sec=pause_sec, **kwargs)], folder
    ) as process:
        wait_for(lambda: steps_done(folder) >= 1 or process.poll() is not None, "the first step")
        pids = pids_by_rank(folder)
        assert process.poll() is None, process.communicate()[1]
        yield process, pids


def processes_of(folder: Path) -> list[int]:
    """Every process of the run in this folder, whoever started it. A zombie has no environment and
    is none.
    """
    mark, found = f"{MARK}={folder}".encode(), []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def importing_torch(run: Path) -> int:
    """Number of the run's processes that have loaded torch's library. A rank has set its handler of
    Ctrl-C by then: earlier, Python would print a KeyboardInterrupt.
    """
    found = 0
    for pid in processes_of(run):
        with contextlib.suppress(OSError):
            found += "/libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return found


def assert_ends(process: subprocess.Popen[str], folder: Path, code: int) -> str:
    """All processes of the run end, the launching process with this code. Returns its errors."""
    _, errors = process.communicate(timeout=240)
    wait_for(lambda: not processes_of(folder), "the run's processes to end")
    own_lines = re.findall(r"^(?![WE]\d{4} ).+", errors, re.MULTILINE)  # not those of torchrun
    assert process.returncode == code and len(own_lines) <= 3, errors
    return errors


def assert_saved(folder: Path) -> None:
    """The last step that was done is in a checkpoint, and it was not the last of the run."""
    assert steps_done(folder) < EPOCHS * STEPS_PER_EPOCH
    saved = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert f"step-{steps_done(folder):07d}" in saved, (folder / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize(
    ("launcher", "number", "asked"),
    [
        ("spawn", signal.SIGINT, "the process group"),
        *(
            pytest.param(*case, marks=NIGHTLY)
            for case in (
                ("alone", signal.SIGINT, "the process group"),
                ("dist_train.sh", signal.SIGINT, "the process group"),
                ("dist_train.sh", signal.SIGTERM, "rank 1"),
                ("dist_train.sh", signal.SIGUSR2, "the launcher"),
                ("spawn", signal.SIGINT, "the launcher"),
                ("spawn", signal.SIGHUP, "the launcher"),
            )
        ),
    ],
)
def test_stop_signal_saves_without_a_restart(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    number: signal.Signals,
    asked: str,
) -> None:
    folder = tmp_path / "run"
    with started(launcher, digits, folder) as (process, pids):
        if asked == "the process group":
            os.killpg(process.pid, number)
        else:
            os.kill(pids[1] if asked == "rank 1" else process.pid, number)
        errors = assert_ends(process, folder, 128 + number)
    assert number.name in errors
    assert (folder / "logs" / "rank0.log").read_text().count("rank 0 of") == 1, "started once"
    assert_saved(folder)


@pytest.mark.nightly
def test_ctrl_c_during_imports_of_spawned_ranks_exits_130(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with watched(command_for("spawn", digits, folder), folder) as process:
        wait_for(lambda: importing_torch(folder) == 3, "the launching process and two ranks")
        os.killpg(process.pid, signal.SIGINT)
        assert_ends(process, folder, 130)
    assert not folder.exists()


# `train.py`, but the launching process receives SIGTERM when it has started the first rank.
STOPPED_WHILE_STARTING = """
import os, signal
from multiprocessing.context import SpawnProcess
from imagenet_cls.commands import cli
from imagenet_cls.commands.train import train_command

def start_and_stop(process):
    start(process)
    os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    start, SpawnProcess.start = SpawnProcess.start, start_and_stop
    cli.main(train_command)
"""


@pytest.mark.nightly
def test_sigterm_between_the_starts_of_two_ranks_ends_the_first_silently(
    digits: Path, tmp_path: Path
) -> None:
    """torch has no record of the rank yet. The rank would fail where it opens the semaphore of
    both.
    """
    folder, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(STOPPED_WHILE_STARTING)
    command = command_for("spawn", digits, folder)
    with watched([command[0], str(script), *command[2:]], folder) as process:
        assert assert_ends(process, folder, 143) == ""
    assert not folder.exists()


@pytest.mark.nightly
def test_second_ctrl_c_ends_without_saving(digits: Path, tmp_path: Path) -> None:
    """The second step never ends: the first Ctrl-C waits for it, the second does not."""
    folder = tmp_path / "run"
    with started(
        "spawn",
        digits,
        folder,
        pause_sec=3600,
        pause_after=3,  # the first step, and the two forwards of rebuild_ddp_buckets
        pause_marker=tmp_path / "pauses",
    ) as (process, _):
        # the first step has made its last check
        wait_for((tmp_path / "pauses").exists, "the second step")
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.7)
        assert process.poll() is None, "it completes the step"
        while process.poll() is None:  # repeated signals do not interrupt the clean-up
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.005)
        assert_ends(process, folder, 130)
    assert not list((folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("dist_train.sh", marks=NIGHTLY)])
def test_ranks_of_a_killed_launcher_save_and_end(
    digits: Path, tmp_path: Path, launcher: str
) -> None:
    folder = tmp_path / "run"
    with started(launcher, digits, folder) as (process, _):
        process.kill()
        wait_for(lambda: not processes_of(folder), "the ranks to end")
    assert_saved(folder)


@pytest.mark.parametrize(
    ("launcher", "stuck"),
    [
        ("spawn", False),
        pytest.param("dist_train.sh", False, marks=NIGHTLY),
        pytest.param("dist_train.sh", True, marks=NIGHTLY),
    ],
)
def test_killed_rank_is_named_and_ends_the_others(
    digits: Path, tmp_path: Path, launcher: str, stuck: bool
) -> None:
    """stuck: the other rank does not react, as if it waited for nccl. torchrun kills it after 30
    s.
    """
    folder = tmp_path / "run"
    with started(launcher, digits, folder) as (process, pids):
        assert len(processes_of(folder)) >= 5, "a launcher, and two ranks with a data worker each"
        if stuck:
            os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        errors = assert_ends(process, folder, 128 + signal.SIGKILL)
    assert "Rank 1 was killed by SIGKILL" in errors


@pytest.mark.nightly
def test_rank_that_hangs_has_its_stack_in_its_log(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = command_for("spawn", digits, folder, pause_sec=1e6, pause_after=3, pause_rank=1)
    with watched([*command, "parallel.timeout_sec=10"], folder) as process:
        errors = assert_ends(process, folder, 5)
    log = (folder / "logs" / "rank1.log").read_text()
    assert re.search(r'helpers\.py", line \d+ in forward', log), log
    assert "the stacks in logs/rank1.log" in errors
    assert not list(folder.glob("logs/nccl_trace*"))


@pytest.mark.nightly
def test_ignored_signals_change_nothing_and_sigterm_saves(digits: Path, tmp_path: Path) -> None:
    """SIGHUP under nohup, SIGINT in a script's background job. All go to the process group, and
    SIGTERM twice.
    """
    folder = tmp_path / "run"
    prefix = ["bash", "-c", "trap '' INT; exec nohup \"$@\"", "bash"]
    with started("dist_train.sh", digits, folder, prefix=prefix) as (process, _):
        os.killpg(process.pid, signal.SIGHUP)
        os.killpg(process.pid, signal.SIGINT)
        done = steps_done(folder)
        wait_for(
            lambda: steps_done(folder) >= done + 5 or process.poll() is not None, "five more steps"
        )
        for _ in range(2):
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.02)
        assert_ends(process, folder, 143)
    assert_saved(folder)


@pytest.mark.nightly
def test_ranks_restarted_by_torchrun_resume_with_the_same_bits(
    few_images: ByRanks, undisturbed: ByRanks, tmp_path: Path
) -> None:
    """torchrun's store outlives the ranks. On several machines: test_launchers.py."""
    folder = tmp_path / "run"
    module = [sys.executable, "-m", "torch.distributed.run"]
    torchrun = [*module, "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = words_for(few_images(2), folder, 2, model__kwargs__pause_sec=0.05)
    with watched([*torchrun, TRAIN, *words], folder) as process:
        wait_for(lambda: steps_done(folder) >= 12 or process.poll() is not None, "step 12")
        os.kill(pids_by_rank(folder)[1], signal.SIGKILL)
        assert_ends(process, folder, 0)
    assert (folder / "logs" / "rank1.log").read_text().count("rank 1 of 2") == 2
    assert_same_run(folder, undisturbed(2))
