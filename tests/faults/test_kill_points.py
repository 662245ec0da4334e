"""A run killed by SIGKILL at a named point (kill_points.py) and resumed ends in the same bits.

At random points, several in one run: test_random_kills.py.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_ranks import KillPoint, RankServer
from same_run import ACCUMULATION, SAVED_EVERY, STEPS, assert_same_run, checkpoints, resumed_at, words_for

IN_STEP_17 = 17 * ACCUMULATION
# By point: at which passing the rank is killed, and the step of the newest checkpoint whose write has begun by then.
POINTS: dict[str, tuple[int, int]] = {
    "while_fetching": (IN_STEP_17, 15),
    "while_waiting_for_a_worker": (IN_STEP_17, 15),
    "in_forward": (IN_STEP_17, 15),
    "in_backward": (IN_STEP_17, 15),
    "before_optimizer_step": (15, 10),
    "after_optimizer_step": (15, 10),
    "half_a_record": (17, 15),
    "checkpoint_opened": (4, 20),
    "checkpoint_half_written": (4, 20),
    "checkpoint_before_fsync": (1, 5),
    "checkpoint_after_fsync": (4, 20),
    "checkpoint_after_rename": (4, 20),
    "before_old_ones_are_removed": (2, 20),
    "old_one_half_removed": (2, 20),
    "in_evaluation": (4, 15),  # of the EMA weights, after the raw ones
    "between_epochs": (2, 10),
    "after_the_last_step": (1, STEPS),
}
# Where that checkpoint is complete, so that the run must resume from it.
COMPLETE = ("checkpoint_after_rename", "before_old_ones_are_removed", "old_one_half_removed", "after_the_last_step")
# On two ranks: the points where a collective is in progress, and the rank that is killed.
ON_TWO_RANKS = [("in_backward", 1), ("after_optimizer_step", 0), ("checkpoint_after_fsync", 0), ("in_evaluation", 1)]
CASES = [*((point, 1, 0) for point in POINTS), *((point, 2, victim) for point, victim in ON_TWO_RANKS)]
FAST = [("checkpoint_half_written", 1, 0), ("after_optimizer_step", 2, 0)]

Undisturbed = Callable[[int], Path]


@pytest.mark.parametrize(
    ("point", "ranks", "victim"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.nightly) for case in CASES],
)
def test_killed_run_resumes_to_the_same_bits(
    rank_server: RankServer, few_images: Undisturbed, undisturbed: Undisturbed, tmp_path: Path,
    point: str, ranks: int, victim: int,
) -> None:  # fmt: skip
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    workers = int(point == "while_waiting_for_a_worker")
    arguments = words_for(few_images(ranks), folder, ranks, data__num_workers=workers)
    passing, begun = POINTS[point]

    codes = rank_server.run(arguments, output, ranks, [KillPoint(point, passing, victim)])
    assert codes[victim] == -signal.SIGKILL, f"{point} was not passed {passing} times; see {output}"
    assert "done" not in output.read_text().splitlines()
    left = [path.name for path in (folder / "checkpoints").iterdir()]
    assert len([name for name in left if name.startswith(".tmp-")]) <= 1, left

    output.unlink()
    assert rank_server.run([*arguments, "--resume"], output, ranks) == [0] * ranks, output.read_text()
    step = resumed_at(output)
    assert step == begun if point in COMPLETE else begun - SAVED_EVERY <= step <= begun
    assert_same_run(folder, undisturbed(ranks))


@pytest.mark.nightly
def test_killed_while_a_step_is_saved_again_resumes_to_the_same_bits(
    rank_server: RankServer, few_images: Undisturbed, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """SIGTERM saves step 20 before its evaluation. The resumed run evaluates it, and is killed while it saves it again:
    in the end, the evaluation is recorded once.
    """
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    arguments = words_for(few_images(1), folder)
    asked = KillPoint("after_optimizer_step", 20, 0, signal.SIGTERM)
    assert rank_server.run(arguments, output, 1, [asked]) == [128 + signal.SIGTERM], output.read_text()
    assert checkpoints(folder)[-1] == 20
    for point in ("checkpoint_opened", "checkpoint_after_fsync", "checkpoint_after_rename"):
        assert rank_server.run([*arguments, "--resume"], output, 1, [KillPoint(point, 1, 0)]) == [-signal.SIGKILL]
    output.unlink()
    assert rank_server.run([*arguments, "--resume"], output, 1) == [0], output.read_text()
    assert resumed_at(output) == 20
    assert_same_run(folder, undisturbed(1))


@pytest.mark.nightly
def test_killed_run_with_step_count_in_parameter_groups_resumes_to_the_same_bits(
    rank_server: RankServer, few_images: Undisturbed, tmp_path: Path
) -> None:
    """timm's LAMB, which is not fused either."""
    arguments = {
        name: words_for(few_images(2), tmp_path / name, 2, optimizer__name="lamb", optimizer__lr=0.01)
        for name in ("whole", "killed")
    }
    output = tmp_path / "output.txt"
    assert rank_server.run(arguments["whole"], output, 2) == [0, 0], output.read_text()
    assert (
        rank_server.run(arguments["killed"], output, 2, [KillPoint("after_optimizer_step", 15, 1)])[1]
        == -signal.SIGKILL
    )
    assert rank_server.run([*arguments["killed"], "--resume"], output, 2) == [0, 0], output.read_text()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
