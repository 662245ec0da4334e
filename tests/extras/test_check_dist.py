"""tools/check_dist.py: the table of good ranks, and the problems of others."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import REPOSITORY, free_port, python_path, run
from test_launchers import run_together

from imagenet_cls.extras.machine.check_dist import RankReport, report_problems, table

CHECK = str(REPOSITORY / "tools" / "check_dist.py")
GOOD = RankReport(
    0, 0, "host0", "cuda:0 H", "GPU-1", "eth0", "2.15.0", "3.11.7", "2.30.7", "right", "100.00"
)


def test_two_good_ranks_pass_all_checks() -> None:
    done = run([sys.executable, CHECK, "--gpus", "2", "device=cpu"])
    assert done.returncode == 0 and done.stderr == ""
    titles, *rows, last = [line.split() for line in done.stdout.splitlines()]
    for rank, row in enumerate(rows):
        seen = dict(zip(titles, row, strict=True))
        assert seen["rank"] == seen["local_rank"] == str(rank) and seen["sum"] == "right"
        assert float(seen["gb_per_sec"]) > 0 and seen["interface"] == "lo"
    assert len(rows) == 2
    assert " ".join(last).endswith("all checks passed")


@pytest.mark.nightly
def test_ranks_with_different_python_versions_exit_5(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import platform\nplatform.python_version = lambda: '3.0.1'\n"
    )
    method = f"parallel.init_method=file://{tmp_path}/rendezvous"
    command = [sys.executable, CHECK, "device=cpu", method]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    ranks[1]["PYTHONPATH"] = python_path(tmp_path)
    done = run_together([(command, env) for env in ranks])
    assert [process.returncode for process in done] == [5, 5]
    assert "3.0.1" in done[0].stdout and done[1].stdout == "", "rank 0 prints the table"
    assert "3.0.1 on rank 1" in done[0].stderr and len(done[0].stderr.splitlines()) <= 3


def test_missing_rank_exits_5_and_is_named() -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = run(
        [sys.executable, CHECK, "device=cpu", "parallel.timeout_sec=2"],
        **variables,
        MASTER_PORT=free_port(),
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert "\nmissing: rank 1 of 2\n" in done.stderr and len(done.stderr.splitlines()) <= 3


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"gpu": "GPU-2"}, None),
        ({"gpu": "GPU-1", "host": "host1"}, None),  # virtual machines may repeat each other's
        (
            {"gpu": "GPU-1"},
            "On host0, ranks 0, 1 share one GPU (cuda:0 H): give each rank its own.",
        ),
        (
            {"gpu": "GPU-2", "nccl": "2.27.3"},
            "The ranks have different versions of nccl: 2.30.7 on rank 0; 2.27.3 on rank 1.",
        ),
        (
            {"gpu": "GPU-2", "sum": "WRONG"},
            "An all-reduce gave a wrong sum on rank 1: the network or a device corrupts data.",
        ),
        ({"gpu": "-", "device": "cpu", "sum": "-", "gb_per_sec": "-"}, None),
    ],
)
def test_rank_problems_name_the_ranks(other: dict, problem: str | None) -> None:
    reports = [GOOD, replace(GOOD, rank=1, local_rank=1, **other)]
    assert report_problems(reports) == ([problem] if problem else [])
    assert len(table(reports).splitlines()) == 3
