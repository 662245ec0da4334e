"""A run killed by SIGKILL, at a named point (kill_points.py) or several times at random ones,
resumes and ends in the same bits.
"""

import os
import random
import signal
from collections.abc import Callable

import pytest
from forked_ranks import KillPoint
from same_run import ACCUMULATION, MICRO_BATCH, SAVED_EVERY, STEPS, Run, checkpoints

IN_STEP_17 = 17 * ACCUMULATION
# By point: at which passing the rank is killed, and the step of the newest checkpoint whose write
# has begun by then.
POINTS: dict[str, tuple[int, int]] = {
    "reading_an_image": (IN_STEP_17 * MICRO_BATCH, 15),
    "in_forward": (IN_STEP_17, 15),
    "in_backward": (IN_STEP_17, 15),
    "after_optimizer_step": (15, 10),
    "checkpoint_begun": (4, 20),
    "checkpoint_half_written": (4, 20),
    "checkpoint_before_fsync": (1, 5),
    "checkpoint_before_rename": (4, 20),
    "checkpoint_after_rename": (4, 20),
    "before_old_one_is_removed": (2, 20),
    "old_one_half_removed": (2, 20),
    "in_evaluation": (4, 15),  # of the EMA weights, after the raw ones
    "between_epochs": (2, 10),
    "after_the_last_step": (1, STEPS),
}
# Where that checkpoint is complete, so that the run must resume from it.
COMPLETE = (
    "checkpoint_after_rename",
    "before_old_one_is_removed",
    "old_one_half_removed",
    "after_the_last_step",
)
# On two ranks: the points where a collective is in progress, and the rank that is killed.
ON_TWO_RANKS = [
    ("in_backward", 1),
    ("after_optimizer_step", 0),
    ("checkpoint_before_rename", 0),
    ("in_evaluation", 1),
]
CASES = [
    *((point, 1, 0) for point in POINTS),
    *((point, 2, victim) for point, victim in ON_TWO_RANKS),
]
FAST = [("checkpoint_half_written", 1, 0), ("after_optimizer_step", 2, 0)]


@pytest.mark.parametrize(
    ("point", "ranks", "victim"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.nightly) for case in CASES],
)
def test_killed_run_resumes_to_the_same_bits(
    new_run: Callable[..., Run], point: str, ranks: int, victim: int
) -> None:
    run = new_run(ranks, data__num_workers=int(point == "in_forward"))
    passing, begun = POINTS[point]
    codes = run.start(kills=[KillPoint(point, passing, victim)])
    assert codes[victim] == -signal.SIGKILL, f"{point} was not passed {passing} times: {run.output}"
    assert "done" not in run.output.splitlines()
    left = [path.name for path in (run.folder / "checkpoints").iterdir()]
    assert len([name for name in left if name.startswith(".tmp-")]) <= 1, left
    step = run.resume()
    assert step == begun if point in COMPLETE else begun - SAVED_EVERY <= step <= begun


@pytest.mark.nightly
def test_killed_while_a_step_is_saved_again_resumes_to_the_same_bits(
    new_run: Callable[..., Run],
) -> None:
    """SIGTERM saves step 20 before its evaluation. The resumed run evaluates it, and is killed
    while it saves it again: in the end, the evaluation is recorded once.
    """
    run = new_run(1)
    assert run.start(kills=[KillPoint("after_optimizer_step", 20, 0, signal.SIGTERM)]) == [143], (
        run.output
    )
    assert checkpoints(run.folder)[-1] == 20
    for point in ("checkpoint_half_written", "checkpoint_before_rename", "checkpoint_after_rename"):
        assert run.start("--resume", kills=[KillPoint(point)]) == [-signal.SIGKILL], run.output
    assert run.resume() == 20


# Passed in each step, that often.
RANDOM_POINTS = {
    "reading_an_image": ACCUMULATION * MICRO_BATCH,
    "in_forward": ACCUMULATION,
    "in_backward": ACCUMULATION,
    "after_optimizer_step": 1,
}


@pytest.mark.parametrize(
    "ranks", [1, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (2, 3, 4))]
)
def test_run_killed_three_times_at_random_points_resumes_to_the_same_bits(
    new_run: Callable[..., Run], ranks: int
) -> None:
    """Each time a random rank at a random point of a random step."""
    seed = os.environ.get("KILL_SEED") or str(random.randrange(2**32))
    draw = random.Random(f"{seed} {ranks}")
    print(f"KILL_SEED={seed} repeats these kills")
    run = new_run(ranks)
    first_step = 0
    for kills_left in (3, 2, 1):
        point, victim = draw.choice(list(RANDOM_POINTS)), draw.randrange(ranks)
        # In the steps that are left, and not so late that none is left for the kills to come.
        steps = draw.randint(1, (STEPS - first_step) // kills_left)
        passing = RANDOM_POINTS[point] * (steps - 1) + draw.randint(1, RANDOM_POINTS[point])
        print(f"rank {victim} is killed {point} of step {first_step + steps}")
        codes = run.start("--resume", kills=[KillPoint(point, passing, victim)])
        assert codes[victim] == -signal.SIGKILL, run.output
        saved = (run.folder / "checkpoints").glob("step-*")
        first_step = max((int(path.name.removeprefix("step-")) for path in saved), default=0)
    assert run.resume() == first_step
