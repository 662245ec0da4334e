"""Signals that ask for a stop, at a known moment: all ranks finish the same step, save, and say how it goes on.

With launchers, and what a terminal sends: test_launchers_die.py.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_ranks import KillPoint, RankServer
from same_run import ACCUMULATION, assert_same_run, checkpoints, records, resumed_at, words_for

ByRanks = Callable[[int], Path]

IN_STEP_17 = ("in_forward", 17 * ACCUMULATION)
# The flags of step 17 are reduced while step 18 is under way.
STOPPED_AT = {1: 17, 2: 18}
TERM, USR2 = signal.SIGTERM, signal.SIGUSR2


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        pytest.param(1, [KillPoint(*IN_STEP_17, 0, TERM)], id="alone"),
        pytest.param(2, [KillPoint(*IN_STEP_17, 1, TERM)], id="one of two"),
        pytest.param(2, [KillPoint(*IN_STEP_17, 0, TERM), KillPoint(*IN_STEP_17, 1, TERM)], id="both"),
        pytest.param(
            2,
            [KillPoint(*IN_STEP_17, 1, TERM), KillPoint("checkpoint_half_written", 4, 0, TERM)],
            id="again in the save",
        ),
    ],
)
def test_sigterm_saves_the_same_step_and_nothing_is_lost(
    rank_server: RankServer,
    few_images: ByRanks,
    undisturbed: ByRanks,
    tmp_path: Path,
    ranks: int,
    kills: list[KillPoint],
) -> None:
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    words = words_for(few_images(ranks), folder, ranks)
    codes = rank_server.run(words, output, ranks, kills)
    assert codes == [143] * ranks, output.read_text()
    step = STOPPED_AT[ranks]
    assert output.read_text().splitlines()[-2:] == [
        f"stopped by SIGTERM after step {step} of 40, saved in {folder}/checkpoints/step-{step:07d}",
        "Resume with the same command and --resume.",
    ]
    assert checkpoints(folder)[-1] == step

    output.unlink()
    assert rank_server.run([*words, "--resume"], output, ranks) == [0] * ranks, output.read_text()
    assert resumed_at(output) == step
    assert_same_run(folder, undisturbed(ranks))


def test_a_stop_in_an_evaluation_does_not_wait_for_its_end(
    rank_server: RankServer, few_images: ByRanks, tmp_path: Path
) -> None:
    """Rank 1 is asked in its first of five batches. The flag is passed on before the second, and read before the third.

    What was counted is thrown away. Were there a third batch, rank 0 would not survive it.
    """
    words = {name: words_for(few_images(2), tmp_path / name, 2, eval__batch_size=4) for name in ("run", "whole")}
    output, of_both_weights = tmp_path / "output.txt", 2
    asked = [KillPoint("in_evaluation", 5 * of_both_weights + 1, 1, TERM)]
    too_late = [KillPoint("in_evaluation", (5 + 3) * of_both_weights, 0)]
    assert rank_server.run(words["run"], output, 2, asked + too_late) == [143, 143], output.read_text()
    assert "stopped by SIGTERM after step 20 of 40, saved in " in output.read_text()
    assert checkpoints(tmp_path / "run")[-1] == 20
    assert [line["step"] for line in records(tmp_path / "run") if line["kind"] == "eval"] == [10, 10]

    output.unlink()
    assert rank_server.run([*words["run"], "--resume"], output, 2) == [0, 0], output.read_text()
    assert resumed_at(output) == 20
    assert rank_server.run(words["whole"], output, 2) == [0, 0], output.read_text()
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def scontrol(folder: Path, refusal: str = "") -> dict[str, str]:
    """The environment of a job of SLURM whose `scontrol` notes down what it is asked for, and agrees or does not."""
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\n' + (f"echo '{refusal}' >&2; exit 1\n" * bool(refusal))
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "4711"}


def test_a_slurm_job_is_queued_again_by_one_rank_and_goes_on_by_itself(
    rank_server: RankServer, few_images: ByRanks, undisturbed: ByRanks, tmp_path: Path
) -> None:
    """SLURM signals all ranks, and later starts the same command again."""
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    words, env = words_for(few_images(2), folder, 2), scontrol(tmp_path / "bin")
    codes = rank_server.run(words, output, 2, [KillPoint(*IN_STEP_17, rank, USR2) for rank in (0, 1)], **env)
    assert codes == [140, 140]
    assert output.read_text().splitlines()[-2:] == [
        f"stopped by SIGUSR2 after step 18 of 40, saved in {folder}/checkpoints/step-0000018",
        "SLURM will restart job 4711, which resumes by itself.",
    ]
    assert (tmp_path / "bin" / "asked").read_text() == "requeue 4711\n"

    output.unlink()
    assert rank_server.run(words, output, 2, SLURM_RESTART_COUNT="1", **env) == [0, 0], output.read_text()
    assert resumed_at(output) == 18
    assert_same_run(folder, undisturbed(2))


def test_a_job_that_slurm_does_not_take_back_is_saved_and_says_so(
    rank_server: RankServer, few_images: ByRanks, tmp_path: Path
) -> None:
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    env = scontrol(tmp_path / "bin", "Requested operation is presently disabled for job 4711")
    assert rank_server.run(words_for(few_images(1), folder), output, 1, [KillPoint(*IN_STEP_17, 0, USR2)], **env) == [
        140
    ]
    assert output.read_text().splitlines()[-3:] == [
        f"stopped by SIGUSR2 after step 17 of 40, saved in {folder}/checkpoints/step-0000017",
        "SLURM did not requeue job 4711: Requested operation is presently disabled for job 4711",
        "Resume with the same command and --resume.",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, USR2])
def test_other_signals_save_and_stop_alike(
    rank_server: RankServer, few_images: ByRanks, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGUSR2 outside of SLURM, and one Ctrl-C; with launchers around the ranks: test_launchers_die.py."""
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    words = words_for(few_images(1), folder)
    assert rank_server.run(words, output, 1, [KillPoint(*IN_STEP_17, 0, number)]) == [128 + number]
    assert output.read_text().splitlines()[-2:] == [
        f"stopped by {number.name} after step 17 of 40, saved in {folder}/checkpoints/step-0000017",
        "Resume with the same command and --resume.",
    ]
    assert checkpoints(folder)[-1] == 17
