"""sweep.py with its runs: two at once, failed, killed, stopped, as jobs of SLURM."""

import csv
import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from helpers import (
    REPOSITORY,
    arguments,
    call,
    environment,
    evaluations,
    fails,
    run,
    steps_done,
    wait_for,
)

from imagenet_cls.extras.sweep import command as sweep
from imagenet_cls.extras.sweep.command import sweep_command
from imagenet_cls.files import take_lock

TOOL = [sys.executable, str(REPOSITORY / "tools" / "sweep.py")]


def words(digits: Path | str, out: Path, **changes: Any) -> list[str]:
    """Arguments of sweep.py for runs of two steps."""
    changes = {"train__max_steps": 2, "eval__batch_size": 512} | changes
    return [*arguments(digits, out, **changes)[:-2], "--out", str(out)]


def table(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "table.csv").read_text().splitlines()))


def best_top1(folder: Path) -> float:
    return max(record["top1_pct"] for record in evaluations(folder))


def test_two_runs_at_once_of_which_one_fails(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of the environment, which are not there, and the CPU threads are divided."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.delenv("OMP_NUM_THREADS")
    out = tmp_path / "out"
    argv = words(digits, out, model__checkpoint="null,missing.pth")
    code, printed, err = call(sweep_command, *argv, "--parallel", 2)
    good, bad = "model.checkpoint=null", "model.checkpoint=missing.pth"
    assert code == 7 and bad in err and good not in err
    assert f"{bad}: failed with exit code 4: {out / bad}.log" in printed.splitlines()
    assert "missing.pth" in (out / f"{bad}.log").read_text()
    rows = table(out)
    assert [row["finished"] for row in rows] == ["1", "0"]
    assert float(rows[0]["mean top1_pct"]) == best_top1(out / good)
    assert re.search(rf"--work-dir {out}/best .*model\.checkpoint=null$", printed)
    assert "<td>missing.pth</td>" in (out / "report.html").read_text()
    variables = json.loads((out / good / "env.json").read_text())["variables"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "5"
    assert variables["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_run_folder_in_use_is_an_error(digits: Path, tmp_path: Path) -> None:
    """As that of a run that still saves after its sweep was killed."""
    folder = tmp_path / "seed=1"
    folder.mkdir()
    with take_lock(folder, ""):
        assert run([*TOOL, *words(digits, tmp_path, seed="0,1")]).returncode == 2
    assert not list(tmp_path.glob("*.log"))


def test_runs_are_stopped_when_the_sweep_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def fail(runner: sweep.Runner, slot: int) -> None:
        started.append(runner.running[slot][1])
        raise OSError(errno.ENOSPC, "No space left on device", "sweep.json")

    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(sweep, "Child", lambda *_, **__: subprocess.Popen(program))
    monkeypatch.setattr(sweep.Runner, "poll", fail)
    fails(5, sweep_command, "demo", "seed=0,1", "--out", tmp_path / "out")
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# Runs of 14 slow steps, which the tests below stop or extend.
SLOW: dict[str, Any] = {
    "model": "noisy",
    "model__kwargs": "{pause_sec: 0.1}",
    "train__max_steps": 14,
    "checkpoint__every_steps": 2,
    "seed": "0,1,2",
}


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sweep") / "out"
    assert run([*TOOL, *words(digits, out, **SLOW), "--parallel", "2"]).returncode == 0
    return out


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_sweep_that_is_stopped_and_started_again_gives_the_same_table(
    digits: Path, tmp_path: Path, undisturbed: Path, number: signal.Signals
) -> None:
    """A finished run is kept, and an interrupted one resumes."""
    out = tmp_path / "out"
    first, second = out / "seed=0", out / "seed=1"
    command = [*TOOL, *words(digits, out, **SLOW)]
    with subprocess.Popen(command, env=environment(), start_new_session=True) as process:
        wait_for(lambda: steps_done(second) >= 4, "the second run")
        runs = children(process.pid)
        process.send_signal(number)
        if number == signal.SIGKILL:
            for pid in runs:
                os.kill(pid, signal.SIGKILL)
        process.wait(240)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    log = Path(f"{first}.log").read_text()
    assert run(command).returncode == 0
    assert Path(f"{first}.log").read_text() == log
    assert "resumed from" in Path(f"{second}.log").read_text()
    (row,) = table(out)
    assert [row] == table(undisturbed)
    results = [best_top1(folder) for folder in (first, second, out / "seed=2")]
    expected = [fmean(results), stdev(results), 3, 3]
    assert list(map(float, row.values())) == pytest.approx(expected)


@pytest.mark.nightly
def test_search_of_the_example_continues(digits: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    config, *overrides = arguments(digits, tmp_path / "run", train__max_steps=2)[:-2]
    for trials in (2, 1):
        command = [sys.executable, REPOSITORY / "examples" / "search.py", config, tmp_path, trials]
        done = run([*map(str, command), *overrides])
        assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("trial-*/config.yaml"))) == 3


@pytest.mark.nightly
def test_printed_commands_that_ran_as_jobs_are_the_runs_of_the_sweep(
    digits: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    """They are submitted as in docs/sweep.md. Names have escapes."""
    argv = words(f"{digits},{digits}/.", tmp_path / "out")
    page = (REPOSITORY / "docs" / "sweep.md").read_text()
    (submit,) = re.findall(r"--dry-run (> runs\.txt\ngrep .*)", page)
    submit = submit.replace("runs.txt", str(tmp_path / "runs.txt"))
    submit = submit.replace(" --wrap", f" --output={tmp_path}/%j.log --wrap")
    line = f"{shlex.join([*TOOL, *argv])} --dry-run {submit}"
    path = f"{Path(sys.executable).parent}:{slurm['PATH']}"  # the commands begin with `python`
    done = run(["bash", "-c", line], **slurm | {"PATH": path})
    assert done.returncode == 0 and done.stdout.count("Submitted batch job") == 2

    wait_for(lambda: run(["squeue", "--noheader"], **slurm).stdout == "", "the jobs")
    done = run([*TOOL, *argv])
    assert done.returncode == 0 and ": started" not in done.stdout
    folders = list((tmp_path / "out").glob("*/"))
    assert [steps_done(folder) for folder in folders] == [2, 2]
    assert all("%2F" in folder.name for folder in folders)
