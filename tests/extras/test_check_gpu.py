"""tools/check_gpu.py on a CPU: the table and its files, and checks that fail, hang or are
killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import (
    REPOSITORY,
    environment,
    fails,
    python_path,
    run,
    train_here,
    wait_for,
    write_files,
)

from imagenet_cls.commands import child
from imagenet_cls.extras.machine import check_gpu
from imagenet_cls.extras.machine.check_gpu import (
    CHECKS,
    Check,
    CheckFailed,
    CheckSkipped,
    Task,
    check_gpu_command,
    compare_steps,
    run_check,
)

TOOL = [sys.executable, str(REPOSITORY / "tools" / "check_gpu.py")]


def results(folder: Path) -> dict[str, str]:
    """The result of each check in the table."""
    lines = (folder / "check_gpu.md").read_text().splitlines()
    cells = [line.split(" | ") for line in lines if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[1] for row in cells[1:]}


def running_with(text: str) -> list[str]:
    """The command lines of running processes that contain `text`."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(file.read_bytes().decode(errors="replace"))
    return [line for line in lines if text in line]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are programs of Python."""
    monkeypatch.setattr(child, "child_command", lambda name: [sys.executable, "-c", name])
    monkeypatch.setattr(check_gpu, "describe_machine", lambda task: "no GPU")


def test_tool_on_a_cpu_with_warnings_at_exit(tmp_path: Path) -> None:
    site = tmp_path / "site"
    lines = "import atexit\natexit.register(print, 'a warning at exit')\n"
    write_files(site, {"sitecustomize.py": lines})
    path = python_path(site)
    done = run([*TOOL, "--only", "sanitizer", "--out", "out"], cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(tmp_path / "out") == {"machine": "pass", "sanitizer": "skipped"}
    table = (tmp_path / "out" / "check_gpu.md").read_text()
    assert "no GPU" in table and "more checks" not in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "site"]


def test_precision_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(_: Task, name: str, argv: list[object], **env: str) -> None:
        train_here([str(word) for word in argv])

    monkeypatch.setattr(Task, "run", run_here)
    check = CHECKS["precision-bf16"]
    outcome, line = run_check(check, [], tmp_path / "log.txt")
    assert outcome == "pass" and "10 steps" in line


def test_unknown_check_exits_with_2(tmp_path: Path) -> None:
    words = ["--only", "resume", "determinstic", "--out", tmp_path / "out"]
    assert "determinstic" in fails(2, check_gpu_command, *words)
    assert not (tmp_path / "out").exists()


def test_check_that_fails_first_ends_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Mock(side_effect=CheckFailed("no driver"))
    monkeypatch.setattr(check_gpu, "describe_machine", failing)
    words = ["--only", "precision-fp32", "--out", tmp_path]
    assert "no driver" in fails(5, check_gpu_command, *words)
    assert results(tmp_path) == {"machine": "fail"}


def test_failing_and_hanging_checks_do_not_stop_the_others(
    programs: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hanging process is killed with its child. The exit code is 5."""
    out = tmp_path / "out"
    marker = f"check-{os.getpid()}-{tmp_path.name}"
    child = f"import time; time.sleep(600)  # {marker}"
    hanging = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"

    def run_code(code: str) -> Check:
        return Check(lambda task: task.run(code, []))

    def hangs(task: Task) -> str:
        task.end = time.monotonic() + 1
        return task.run(hanging, [])

    skips = Mock(side_effect=CheckSkipped("not here"))
    checks = {
        "fails": run_code(
            "from imagenet_cls.parallel.exit import write_error_file\n"
            "error = ValueError('no such | kernel')\nwrite_error_file(error)\nraise error"
        ),
        "exits": run_code("import sys; sys.exit(7)"),
        "hangs": Check(hangs),
        "has a bug": Check(lambda task: str(1 / 0)),
        "skips": Check(skips),
        "needs two": Check(skips, min_gpus=2),
        "passes": run_code("print('done')"),
    }
    monkeypatch.setattr(check_gpu, "CHECKS", checks)
    assert check_gpu_command(["--out", str(out)]) == 5
    table = (out / "check_gpu.md").read_text()
    expected = ["pass", *["fail"] * 4, "skipped", "skipped", "pass"]
    found = results(out)
    assert list(found) == ["machine", *checks] and list(found.values()) == expected
    assert r"| ValueError: no such \| kernel |" in table
    assert "exit code 7" in table and "time limit" in table
    assert "Traceback" in (out / "check_gpu_logs" / "fails.txt").read_text()
    assert running_with(marker) == []
    assert len(capsys.readouterr().out.splitlines()) == len(expected) + 1


NIGHTLY = [
    pytest.param(number, marks=pytest.mark.nightly) for number in (signal.SIGINT, signal.SIGKILL)
]


@pytest.mark.parametrize("number", [signal.SIGTERM, *NIGHTLY])
def test_killed_run_keeps_its_table(tmp_path: Path, number: signal.Signals) -> None:
    names = ["sanitizer", "deterministic", "resume"]
    out, temporary = tmp_path / "out", tmp_path / "t"  # data workers need a short path
    temporary.mkdir()
    with subprocess.Popen(
        [*TOOL, "--only", *names, "--out", out],
        env=environment(TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        start_new_session=True,
    ) as process:
        log = out / "check_gpu_logs" / "deterministic.txt"
        wait_for(lambda: log.exists() and log.stat().st_size > 0, "a training")
        process.send_signal(number)
        code = process.wait(240)
    assert results(out) == {"machine": "pass", "sanitizer": "skipped"}
    assert "2 more checks" in (out / "check_gpu.md").read_text()
    left = running_with(str(temporary))
    if number == signal.SIGKILL:
        # A short run ends by itself.
        assert code == -number and all("train" in line for line in left)
    else:
        assert (code, left) == (128 + number, [])
        assert list(temporary.glob("imagenet-cls-*")) == []


def test_steps_that_differ_fail() -> None:
    steps = [{"step": step, "loss": 2.0, "grad_norm": 1.0} for step in (1, 2)]
    assert "2 steps" in compare_steps(steps, steps, 0.01)
    for wrong in ({"grad_norm": 1.1}, {"loss": float("nan")}, {"loss": 1.9}):
        with pytest.raises(CheckFailed, match="step 2"):
            compare_steps([steps[0], steps[1] | wrong], steps, 0.02)
    with pytest.raises(CheckFailed):
        compare_steps(steps[:1], steps, 0.02)


@pytest.mark.parametrize(
    ("command", "missing", "expected"),
    [
        ("check-gpu", ["matplotlib", "sklearn", "tensorboard"], 0),
        ("check-gpu", ["omegaconf"], 2),
        ("train", ["matplotlib"], 2),
    ],
)
def test_libraries_of_reports_may_be_missing(
    command: str, missing: list[str], expected: int
) -> None:
    code = (
        "import importlib.util, sys\nfind = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name in {missing} else find(name)\n"
        f"sys.argv = ['imagenet-cls', {command!r}, '--help']\n"
        "from imagenet_cls.commands.main import main\nmain()"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == expected, done.stderr
    assert done.stderr.startswith(missing[0] + ":" if expected else "")


@pytest.mark.nightly
def test_checks_that_a_cpu_can_run_pass(tmp_path: Path) -> None:
    # The compiled checks take minutes on a CPU: see tests/distributed/test_compiled_runs.py.
    names = ["deterministic", "resume", "ddp"]
    done = run([*TOOL, "--only", *names, "--out", "out"], timeout_sec=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(tmp_path / "out") == dict.fromkeys(["machine", *names], "pass")
