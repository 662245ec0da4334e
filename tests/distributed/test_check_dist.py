"""tools/check_dist.py: well where it is well, and what is wrong where it isn't, before a run finds it out."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import REPOSITORY, environment, free_port, run

from imagenet_cls.commands.check_dist import RankReport, rank_problems, table

CHECK = str(REPOSITORY / "tools" / "check_dist.py")
GOOD = RankReport(0, 0, 2, "host0", "cuda:0 H", "GPU-1", "eth0", "2.15.0", "3.11.7", "2.30.7", True, 100.0)


def test_two_ranks_that_are_well() -> None:
    done = run([sys.executable, CHECK, "--gpus", "2", "device=cpu"])
    assert done.returncode == 0 and done.stderr == ""
    titles, *rows, last = [line.split() for line in done.stdout.splitlines()]
    seen = [dict(zip(titles, row, strict=True)) for row in rows]
    assert [(row["rank"], row["local"], row["of"], row["sum"]) for row in seen] == [
        ("0", "0", "2", "right"),
        ("1", "1", "2", "right"),
    ]
    assert all(float(row["GB/s"]) > 0 and row["interface"] == "lo" for row in seen)
    assert " ".join(last).endswith("all checks passed")


@pytest.mark.nightly
def test_ranks_of_different_pythons(tmp_path: Path) -> None:
    """Started by hand, as on two machines that were set up at different times."""
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.python_version = lambda: '3.0.1'\n")
    meeting = f"parallel.init_method=file://{tmp_path}/meeting"
    started = [
        subprocess.Popen(
            [sys.executable, CHECK, "device=cpu", meeting],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2") | more, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank, more in enumerate([{}, {"PYTHONPATH": str(tmp_path)}])
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [5, 5]
    assert "3.0.1" in outputs[0][0] and outputs[1][0] == "", "the table, from rank 0"
    assert "different versions of python" in outputs[0][1] and "3.0.1 on rank 1" in outputs[0][1]
    assert len(outputs[0][1].splitlines()) <= 3


def test_a_rank_that_does_not_come() -> None:
    meeting = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    done = run([sys.executable, CHECK, "device=cpu", "parallel.timeout_sec=2"], **meeting)
    assert (done.returncode, done.stdout) == (5, "")
    assert "rank 0 of 2: rendezvous at" in done.stderr and len(done.stderr.splitlines()) <= 3
    assert "\nmissing: rank 1 of 2\n" in done.stderr


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"gpu": "GPU-2"}, None),
        ({"gpu": "GPU-1", "host": "host1"}, None),  # virtual machines may repeat each other's
        ({"gpu": "GPU-1"}, "ranks 0, 1 share one GPU of host0 (cuda:0 H): give each rank its own"),
        ({"gpu": "GPU-2", "torch": "2.14.1"}, "different versions of torch: 2.15.0 on rank 0; 2.14.1 on rank 1"),
        ({"gpu": "GPU-2", "nccl": "2.27.3"}, "different versions of nccl: 2.30.7 on rank 0; 2.27.3 on rank 1"),
        (
            {"gpu": "GPU-2", "sum_is_right": False},
            "an all-reduce gave a wrong sum on rank 1: the network or a device corrupts data",
        ),
        ({"gpu": "", "device": "cpu", "sum_is_right": None, "bandwidth_gb_per_sec": None}, None),
    ],
)
def test_what_is_wrong(other: dict, problem: str | None) -> None:
    reports = [GOOD, replace(GOOD, rank=1, local_rank=1, **other)]
    assert rank_problems(reports) == ([problem] if problem else [])
    assert len(table(reports).splitlines()) == 3
