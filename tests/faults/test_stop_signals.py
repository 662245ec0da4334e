"""Signals that ask for a stop, at a known moment: all ranks finish the same step, save, and say how
to resume.

With launchers, and what a terminal sends: test_launchers_die.py.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_ranks import KillPoint
from helpers import TRAIN, arguments, run
from same_run import ACCUMULATION, Run, checkpoints, records

IN_STEP_17 = ("in_forward", 17 * ACCUMULATION)
# The runs report every step, so the ranks also check in every step.
# The flags of step 17 are reduced while step 18 is under way.
STOPPED_AT = {1: 17, 2: 18}
TERM, USR2 = signal.SIGTERM, signal.SIGUSR2


def to_rank(rank: int, number: signal.Signals) -> KillPoint:
    return KillPoint(*IN_STEP_17, rank, number)


@pytest.mark.parametrize(
    ("number", "ranks", "kills"),
    [
        *(
            pytest.param(number, 1, [to_rank(0, number)], id=number.name)
            for number in (TERM, signal.SIGINT, USR2, signal.SIGHUP)
        ),
        pytest.param(TERM, 2, [to_rank(0, TERM), to_rank(1, TERM)], id="both"),
        pytest.param(
            TERM,
            2,
            [to_rank(1, TERM), KillPoint("checkpoint_half_written", 4, 0, TERM)],
            id="one of two, the other in the save",
        ),
    ],
)
def test_stop_signal_saves_the_same_step_on_all_ranks(
    new_run: Callable[..., Run], number: signal.Signals, ranks: int, kills: list[KillPoint]
) -> None:
    run, step = new_run(ranks), STOPPED_AT[ranks]
    assert run.start(kills=kills) == [128 + number] * ranks, run.output
    assert run.output.count(f"/checkpoints/step-{step:07d}\n") == 1, "one rank says it"
    assert "--resume" in run.output
    assert checkpoints(run.folder)[-1] == step
    assert run.resume() == step


def test_stop_signal_between_two_reports_stops_by_the_end_of_the_epoch(
    new_run: Callable[..., Run],
) -> None:
    """The ranks check every few steps, which last half a second, and in any case at the end of an
    epoch.
    """
    run = new_run(2, log__every_steps=1000)
    assert run.start(kills=[to_rank(1, TERM)]) == [143, 143], run.output
    step = checkpoints(run.folder)[-1]
    assert 18 <= step <= 20 and f"/checkpoints/step-{step:07d}\n" in run.output, run.output
    assert run.resume() == step


def test_stop_signal_in_an_evaluation_does_not_wait_for_its_end(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Rank 1 is asked in its first of five batches. The flag is passed on before the second, and
    read before the third.

    What was counted is discarded. Were there a third batch, rank 0 would be killed in it.
    """
    run, whole = (new_run(2, tmp_path / name, eval__batch_size=4) for name in ("run", "whole"))
    run.undisturbed, of_both_weights = lambda ranks: whole.folder, 2
    asked = KillPoint("in_evaluation", 5 * of_both_weights + 1, 1, TERM)
    too_late = KillPoint("in_evaluation", (5 + 3) * of_both_weights, 0)
    assert run.start(kills=[asked, too_late]) == [143, 143], run.output
    assert checkpoints(run.folder)[-1] == 20
    assert [line["step"] for line in records(run.folder) if line["kind"] == "eval"] == [10, 10]
    assert whole.start() == [0, 0], whole.output
    assert run.resume() == 20


@pytest.mark.parametrize("refusal", ["", "Requested operation is presently disabled for job 4711"])
def test_slurm_job_is_requeued_by_one_rank_and_resumes(
    new_run: Callable[..., Run], tmp_path: Path, refusal: str
) -> None:
    """SLURM signals all ranks, and later starts the same command again. `scontrol` is a script that
    may fail.
    """
    program, asked = tmp_path / "bin" / "scontrol", tmp_path / "asked"
    program.parent.mkdir()
    fail = f"echo '{refusal}' >&2; exit 1\n" if refusal else ""
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n{fail}')
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:/usr/bin:/bin", "SLURM_JOB_ID": "4711"}

    run = new_run(2)
    assert run.start(kills=[to_rank(0, USR2), to_rank(1, USR2)], **env) == [140, 140]
    assert run.output.count("/checkpoints/step-0000018\n") == 1, "one rank says it"
    assert refusal in run.output and ("--resume" in run.output) == bool(refusal)
    assert asked.read_text() == "requeue 4711\n"
    if not refusal:
        assert run.resume([], SLURM_RESTART_COUNT="1", **env) == 18


COMPILES = """
import os, signal, subprocess
from torch import nn

class Compiles(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(3, num_classes)
        self.passes = 0

    def compile(self, **settings):
        pass  # as good as compiled

    def forward(self, images):
        self.passes += self.training
        if self.training and self.passes == 3:
            with subprocess.Popen(["sleep", "0.5"]) as compiler:
                os.killpg(0, signal.{name})
            assert compiler.returncode == 0, compiler.returncode
        return super().forward(images.mean((2, 3)))
"""


@pytest.mark.parametrize(
    ("name", "compiled", "saved"),
    [
        ("SIGTERM", "true", ["step-0000003"]),
        ("SIGINT", "true", ["step-0000003"]),
        ("SIGTERM", "false", []),
    ],
)
def test_signal_to_the_process_group_stops_a_run_whose_model_is_compiled(
    digits: Path, tmp_path: Path, name: str, compiled: str, saved: list[str]
) -> None:
    """The group is that of a terminal, or of `timeout`. With `train.compile` the compiler does not
    receive the signal. A model that compiles itself without `train.compile` raises an error.
    """
    (tmp_path / "compiles.py").write_text(COMPILES.replace("{name}", name))
    words = arguments(
        digits, tmp_path / "run", model__name="compiles:Compiles", train__compile=compiled
    )
    done = run([sys.executable, TRAIN, *words], cwd=tmp_path)
    assert done.returncode == 128 + signal.Signals[name] and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.glob("run/checkpoints/step-*")] == saved
