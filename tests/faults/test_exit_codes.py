"""Exit codes of ranks reach the shell through both launchers, with one message of at most three lines.

130, 140 and 143: test_launchers_die.py. A port that is taken: test_launchers.py.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import DIST_TRAIN, REPOSITORY, TRAIN, arguments, environment

Ended = tuple[int, list[str], str]


LAUNCHERS = ("spawn", "dist_train.sh")


def ends_of(words: list[str], launchers: Sequence[str] = LAUNCHERS) -> dict[str, Ended]:
    """The same two-rank run by each launcher, at the same time: exit code, lines on stderr, and stdout of each.

    LAUNCHER in a word becomes the launcher's name, so that each run has a folder of its own.
    """
    config, *rest = words
    commands = {
        "spawn": [sys.executable, TRAIN, config, *rest, "--launcher", "spawn", "--gpus", "2"],
        "dist_train.sh": ["bash", DIST_TRAIN, config, "2", *rest],
    }
    started = {
        name: subprocess.Popen(
            [word.replace("LAUNCHER", name) for word in command],
            env=environment(), cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for name, command in commands.items()
        if name in launchers
    }  # fmt: skip
    try:
        ended = {}
        for name, process in started.items():
            out, err = process.communicate(timeout=120)
            ended[name] = (process.returncode, err.splitlines(), out)
        return ended
    finally:
        for process in started.values():
            process.kill()


def test_invalid_config_exits_2_with_a_line_for_each_problem(digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run", optimzer__lr=1, train__epochs="many", eval__crop_px=-1, seed="one")
    for code, lines, out in ends_of(words).values():
        assert (code, len(lines), out) == (2, 4, ""), lines
        for key in ("optimzer.lr", "train.epochs", "eval.crop_px", "seed"):
            assert sum(key in line for line in lines) == 1
    assert not (tmp_path / "run").exists()


# What a rank ends with, each by a cause that no launching process could have seen: by code, the config's changes, and
# what is said.
CAUSES: dict[int, tuple[dict[str, Any], str]] = {
    2: ({"model__num_classes": 5}, "the dataset has 10 classes"),
    3: ({"data__name": "folder", "data__root": "nowhere"}, "nowhere: no such folder"),
    5: ({"work_dir": "/proc/LAUNCHER"}, "can't write to /proc/"),
    6: ({"optimizer__lr": 1e9, "train__max_nonfinite_steps": 1}, "NaN or infinite in 1 steps in a row"),
}


@pytest.mark.parametrize(
    ("code", "launchers"),
    [
        *(pytest.param(code, LAUNCHERS, marks=pytest.mark.nightly) for code in CAUSES),
        (3, ["dist_train.sh"]),
        (6, ["spawn"]),
    ],
)
def test_error_of_a_rank_is_the_launchers_exit_code(
    digits: Path, tmp_path: Path, code: int, launchers: Sequence[str]
) -> None:
    changes, told = CAUSES[code]
    settings = {key: value for key, value in changes.items() if key != "work_dir"}
    words = arguments(digits, Path(changes.get("work_dir", tmp_path / "LAUNCHER")), **settings)
    for name, (got, lines, _) in ends_of(words, launchers).items():
        assert (got, len(lines) <= 3) == (code, True), (name, lines)
        assert sum(told in line for line in lines) == 1, (name, lines)
