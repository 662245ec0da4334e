"""What ends a run from outside: Ctrl-C once and twice, a launcher that is killed, a rank that dies. Nobody stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bed import (
    DIST_TRAIN,
    REPOSITORY,
    TRAIN,
    arguments,
    environment,
    is_alive,
    ranks_of,
    steps_done,
    wait_for,
)

LAUNCHERS = ["alone", "spawn", "dist_train.sh"]
STARTING = LAUNCHERS[1:]


def command_for(launcher: str, digits: Path, folder: Path, pause_sec: float) -> list[str]:
    config, *rest = arguments(
        digits, folder, "noisy", model__kwargs__pause_sec=pause_sec, train__epochs=9, checkpoint__every_epochs="null"
    )
    return {
        "alone": [sys.executable, TRAIN, config, *rest],
        "spawn": [sys.executable, TRAIN, config, *rest, "--gpus", "2"],
        "dist_train.sh": ["bash", DIST_TRAIN, config, "2", *rest],
    }[launcher]


@contextmanager
def started(
    launcher: str, digits: Path, folder: Path, pause_sec: float = 0.05
) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """(launching process, in a process group of its own; process ids by rank) once the first step is done."""
    command = command_for(launcher, digits, folder, pause_sec)
    with subprocess.Popen(
        command, env=environment(), cwd=REPOSITORY, text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        pids: dict[int, int] = {}
        try:
            wait_for(lambda: steps_done(folder) >= 1 or process.poll() is not None, "the first step")
            pids = ranks_of(folder)
            assert process.poll() is None, process.communicate()[1]
            assert len(pids) == (1 if launcher == "alone" else 2)
            yield process, pids
        finally:
            for pid in (process.pid, *pids.values()):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


def assert_all_gone(pids: dict[int, int], within_sec: float) -> None:
    wait_for(lambda: not any(map(is_alive, pids.values())), "the ranks to end", within_sec)


def assert_saved(folder: Path) -> None:
    """The last step that was done is in a checkpoint."""
    saved = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert f"step-{steps_done(folder):07d}" in saved, (folder / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_saves(digits: Path, tmp_path: Path, launcher: str) -> None:
    """A terminal sends it to the launcher's whole process group."""
    folder = tmp_path / "run"
    with started(launcher, digits, folder) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "stopped by SIGINT" in errors and len(errors.splitlines()) <= 3, errors
    assert_all_gone(pids, 5)
    assert_saved(folder)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_twice_does_not_wait(digits: Path, tmp_path: Path, launcher: str) -> None:
    """A step takes 3.5 s here: the first Ctrl-C waits for its end, the second does not."""
    folder = tmp_path / "run"
    with started(launcher, digits, folder, pause_sec=3.5) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.7)
        assert process.poll() is None, "it is waiting for the step's end"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=4)
    assert process.returncode == 130, errors
    assert len(errors.splitlines()) <= 3, errors
    assert_all_gone(pids, 5)
    assert not list((folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("launcher", STARTING)
def test_no_rank_outlives_a_launcher_that_was_killed(digits: Path, tmp_path: Path, launcher: str) -> None:
    """And what they had done is saved."""
    folder = tmp_path / "run"
    with started(launcher, digits, folder) as (process, pids):
        process.kill()
        assert_all_gone(pids, 15)
    assert_saved(folder)


def test_a_rank_that_dies_takes_the_others_with_it(digits: Path, tmp_path: Path) -> None:
    """Spawned ranks; those of dist_train.sh: test_kill_and_resume.py."""
    with started("spawn", digits, tmp_path / "run") as (process, pids):
        os.kill(pids[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=15)
        assert_all_gone(pids, 1)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in errors and len(errors.splitlines()) <= 3, errors
