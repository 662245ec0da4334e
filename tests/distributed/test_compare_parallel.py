"""compare_parallel.py with its runs: the table, the exit code of a run that fails, and nothing left
behind.
"""

import re
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import DEMO, REPOSITORY, call, run

from imagenet_cls.commands.compare_parallel import compare_command

TOOL = [sys.executable, str(REPOSITORY / "tools" / "compare_parallel.py")]
ROWS = [
    "one process",
    "DP, 2 GPUs",
    "DDP by spawn",
    "DDP by torchrun",
    "DDP, 2 accumulation steps",
    "DDP with SyncBN",
]


def leftovers(folder: Path) -> list[Path]:
    """What is left in TMPDIR, except torch's cache of compiled code."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def cells(output: str) -> dict[str, list[str]]:
    """The table's cells by row name."""
    lines = {name: line for name in ROWS for line in output.splitlines() if line.startswith(name)}
    return {
        name: re.split(r" {2,}", line.removeprefix(name).strip()) for name, line in lines.items()
    }


@pytest.mark.nightly
def test_rows_of_the_demo_differ_by_batch_norm(tmp_path: Path) -> None:
    """Plain DDP differs from the first step on, SyncBN by rounding."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    sizes = ["augment.size_px=16", "eval.crop_px=16"]
    words = [*TOOL, "device=cpu", f"data.root={tmp_path / 'digits'}", *sizes]
    done = run(words, timeout_sec=600, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    rows = cells(done.stdout)
    assert [row[0] for row in rows.values()] == ["64", "-", "32", "32", "16", "64"] and list(
        rows
    ) == ROWS
    assert rows["DP, 2 GPUs"][1:] == [*"-----", "not run: needs 2 GPUs, and there are 0"]
    assert len(done.stderr.splitlines()) == len(ROWS) and leftovers(temporary) == []
    differences = {name: [float(text) for text in rows[name][1:4]] for name in ROWS[2:]}
    assert max(differences["DDP with SyncBN"]) < 1e-4, done.stdout
    for name in ROWS[2:]:
        assert int(rows[name][4]) > 0 and int(rows[name][5]) > 50
    for name in ROWS[2:5]:
        assert min(differences[name]) > 1e-4, done.stdout


def test_failing_run_passes_its_message_and_exit_code_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    argv = [DEMO, "data.name=folder", f"data.root={tmp_path / 'nowhere'}", "device=cpu"]
    code, out, err = call(compare_command, *argv)
    assert (code, out) == (3, "")
    progress, *error = err.splitlines()
    assert (
        progress == "1 of 6: one process"
        and error[0].startswith("one process: ")
        and len(error) <= 3
    )
    assert leftovers(tmp_path) == []
