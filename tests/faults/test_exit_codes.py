"""Exit codes of ranks reach the shell through both launchers, with one message of at most three
lines.

130, 140 and 143: test_launchers_die.py. A port that is taken: test_launchers.py.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import DIST_TRAIN, TRAIN, arguments, run


# Errors of a rank that no launching process could have seen.
@pytest.mark.parametrize(
    ("launcher", "code", "changes"),
    [
        ("dist_train.sh", 3, {"train__global_batch_size": 5000}),
        ("spawn", 6, {"optimizer__lr": 1e9, "train__max_nonfinite_steps": 1}),
    ],
)
def test_error_of_a_rank_is_the_launchers_exit_code(
    digits: Path, tmp_path: Path, launcher: str, code: int, changes: dict[str, Any]
) -> None:
    config, *rest = arguments(digits, tmp_path / "run", **changes)
    if launcher == "spawn":
        ended = run([sys.executable, TRAIN, config, *rest, "--gpus", "2"])
    else:
        ended = run(["bash", DIST_TRAIN, config, "2", *rest])
    assert ended.returncode == code and 0 < len(ended.stderr.splitlines()) <= 3, ended.stderr
