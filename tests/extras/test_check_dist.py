"""tools/check_dist.py: the table of good ranks, and the problems of others."""

import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, python_path, run
from test_launchers import run_together

CHECK = str(REPOSITORY / "tools" / "check_dist.py")


def test_two_good_ranks_pass_all_checks() -> None:
    done = run([sys.executable, CHECK, "--gpus", "2", "device=cpu"])
    assert done.returncode == 0 and done.stderr == ""
    titles, *rows, last = [line.split() for line in done.stdout.splitlines()]
    for rank, row in enumerate(rows):
        seen = dict(zip(titles, row, strict=True))
        assert seen["rank"] == str(rank) and seen["sum"] == "right"
        assert float(seen["gb_per_sec"]) > 0
    assert len(rows) == 2
    assert " ".join(last) == "all checks passed"


BREAKS = """
import torch.distributed as dist
all_reduce = dist.all_reduce
def wrong(tensor, **options):
    all_reduce(tensor, **options)
    tensor[0] = 0
dist.all_reduce = wrong
"""


@pytest.mark.parametrize(
    ("changed", "code", "problem"),
    [
        ("import safetensors\nsafetensors.__version__ = '0.0.1'\n", 2, "safetensors"),
        pytest.param(BREAKS, 5, "all-reduce", marks=pytest.mark.nightly),
    ],
)
def test_rank_with_another_library_or_a_wrong_sum_is_named(
    tmp_path: Path, changed: str, code: int, problem: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(changed)
    method = f"parallel.init_method=file://{tmp_path}/rendezvous"
    command = [sys.executable, CHECK, "device=cpu", method]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    ranks[1]["PYTHONPATH"] = python_path(tmp_path)
    done = run_together([(command, env) for env in ranks])
    assert [process.returncode for process in done] == [code, code]
    assert problem in done[0].stderr and "rank 1" in done[0].stderr
