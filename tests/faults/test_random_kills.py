"""A run killed several times, each time a random rank at a random point of a random step, ends in the same bits.

At named points: test_kill_points.py.
"""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_ranks import KillPoint, RankServer
from same_run import ACCUMULATION, STEPS, assert_same_run, resumed_at, words_for

# Passed in each step, that often.
POINTS = {
    "while_fetching": ACCUMULATION,
    "in_forward": ACCUMULATION,
    "in_backward": ACCUMULATION,
    "before_optimizer_step": 1,
    "after_optimizer_step": 1,
}
KILLS = {1: 3, 2: 3, 3: 1, 4: 1}

Undisturbed = Callable[[int], Path]


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (1, 2),
        *(pytest.param(ranks, kills, marks=pytest.mark.nightly) for ranks, kills in KILLS.items()),
        *(pytest.param(ranks, 12, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]) for ranks in KILLS),
    ],
)
def test_run_killed_several_times_resumes_to_the_same_bits(
    rank_server: RankServer, few_images: Undisturbed, undisturbed: Undisturbed, tmp_path: Path, ranks: int, kills: int
) -> None:
    """At most three kills in a run of 40 steps; more are spread over several runs."""
    seed = os.environ.get("KILL_SEED") or str(random.randrange(2**32))
    draw = random.Random(f"{seed} {ranks}")
    print(f"KILL_SEED={seed} repeats these kills")
    for number in range(-(-kills // 3)):
        folder = tmp_path / str(number)
        arguments = words_for(few_images(ranks), folder, ranks)
        first_step = 0
        for time in range(min(3, kills - 3 * number)):
            point, victim = draw.choice(list(POINTS)), draw.randrange(ranks)
            # In the steps that are left, and not so late that none is left for the kills to come.
            steps = draw.randint(1, (STEPS - first_step) // (3 - time))
            passing = POINTS[point] * (steps - 1) + draw.randint(1, POINTS[point])
            print(f"rank {victim} dies {point} of step {first_step + steps}")
            output = folder.with_suffix(f".{time}.txt")
            codes = rank_server.run([*arguments, "--resume"], output, ranks, [KillPoint(point, passing, victim)])
            assert codes[victim] == -signal.SIGKILL, output.read_text()
            first_step = newest_saved(folder)
        output = folder.with_suffix(".last.txt")
        assert rank_server.run([*arguments, "--resume"], output, ranks) == [0] * ranks, output.read_text()
        assert resumed_at(output) == first_step
        assert_same_run(folder, undisturbed(ranks))


def newest_saved(folder: Path) -> int:
    return max((int(path.name[-7:]) for path in folder.glob("checkpoints/step-*")), default=0)
