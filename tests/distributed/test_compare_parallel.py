"""The comparison for real: every row is a command that was run, and nothing of it stays, however it ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DEMO, REPOSITORY, arguments, environment, run, wait_for

TOOL = [sys.executable, str(REPOSITORY / "tools" / "compare_parallel.py")]
ROWS = ["one process", "DP, 2 GPUs", "DDP by spawn", "DDP by torchrun", "DDP, 2 in turn", "DDP with SyncBN"]


def words_for(digits: Path, **changes: object) -> list[str]:
    """The bed's config without a work dir, which is the tool's own."""
    return arguments(digits, Path("unused"), train__max_steps=3, device="cpu", **changes)[:-2]


def leftovers(folder: Path) -> list[Path]:
    """What lies in a folder for temporary files, but torch's cache of compiled code."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def cells(output: str) -> dict[str, list[str]]:
    """The table: by row, what stands behind its name."""
    lines = {name: line for name in ROWS for line in output.splitlines() if line.startswith(name)}
    return {name: re.split(r" {2,}", line.removeprefix(name).strip()) for name, line in lines.items()}


def test_every_way_ends_where_one_process_does(digits: Path, tmp_path: Path) -> None:
    """A model without BatchNorm: nothing but rounding may differ."""
    done = run([*TOOL, *words_for(digits)], TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = cells(done.stdout)
    assert list(rows) == ROWS
    assert [row[0] for row in rows.values()] == ["128", "-", "64", "64", "32", "128"]
    for name in ROWS[2:]:
        differences = [float(text) for text in rows[name][1:4]]
        assert max(differences) < 1e-4, done.stdout
        assert int(rows[name][4]) > 0 and int(rows[name][5]) > 50
    assert rows["DP, 2 GPUs"][1:] == [*"-----", "not run: needs 2 GPUs, and there are 0"]
    assert "no BatchNorm" in done.stdout
    assert len(done.stderr.splitlines()) == len(ROWS) and leftovers(tmp_path) == []


@pytest.mark.nightly
def test_the_lesson_itself(tmp_path: Path) -> None:
    """BatchNorm: plain DDP differs from the first step on, SyncBN by rounding."""
    done = run([*TOOL, "device=cpu", f"data.root={tmp_path / 'digits'}"], timeout_sec=600)
    rows = cells(done.stdout)
    differences = {name: [float(text) for text in rows[name][1:4]] for name in ROWS[2:]}
    assert max(differences["DDP with SyncBN"]) < 1e-4, done.stdout
    for name in ROWS[2:5]:
        assert min(differences[name]) > 1e-4, done.stdout
    assert differences["DDP by spawn"] == differences["DDP by torchrun"]


def test_a_run_that_fails_is_named_and_its_code_passes(tmp_path: Path) -> None:
    words = [DEMO, "data.name=folder", f"data.root={tmp_path / 'nowhere'}", "device=cpu"]
    done = run([*TOOL, *words], TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    progress, *error = done.stderr.splitlines()
    assert progress == "1 of 6: one process" and error[0].startswith("one process: ") and "no such folder" in error[0]
    assert len(error) <= 3 and leftovers(tmp_path) == []


def test_an_end_from_outside_leaves_nothing(digits: Path, tmp_path: Path) -> None:
    """Ctrl-C, which reaches the run as well, and SIGTERM to the tool alone, each in the midst of a long run."""
    words = words_for(digits, model__name="helpers:noisy", model__kwargs="{pause_sec: 0.2}", train__epochs=99)
    words.remove("train.max_steps=3")
    started = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        (tmp_path / number.name).mkdir()
        started[number] = subprocess.Popen(
            [*TOOL, *words, "train.max_steps=1000"], env=environment(TMPDIR=str(tmp_path / number.name)),
            cwd=REPOSITORY, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    try:
        for number, process in started.items():
            wait_for(lambda: any((tmp_path / number.name).glob("*/1/run/metrics.jsonl")), "the first run")  # noqa: B023
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            out, err = process.communicate(timeout=30)
            assert (process.returncode, out, err) == (128 + number, "", "1 of 6: one process\n")
            assert leftovers(tmp_path / number.name) == []
            with pytest.raises(ProcessLookupError):  # of the whole session, which had one process group
                os.killpg(process.pid, 0)
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
