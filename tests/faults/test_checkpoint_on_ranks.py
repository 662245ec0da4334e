"""A save that fails on rank 0: all ranks end, one reports it, and the run can be resumed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from same_run import STEPS, Run, checkpoints, records

CHECKPOINT_BYTES = 120_000  # at least


def run_on(disk: Path, new_run: Callable[..., Run], **changes: object) -> Run:
    """A run of two ranks on a disk with room for two checkpoints and not for the third, of step 15."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(b"\0" * (free - 5 * CHECKPOINT_BYTES // 2))
    return new_run(2, disk / "run", **changes)


def test_failed_save_ends_all_ranks_and_the_run_resumes(
    disk: Path, new_run: Callable[..., Run]
) -> None:
    run = run_on(disk, new_run)
    codes = run.start()
    assert codes[0] == 5 and codes[1] != 0, codes
    assert (
        run.output.count("step-0000015: No space left on device") == 1
        and "Traceback" not in run.output
    )
    assert 15 <= len([record for record in records(run.folder) if record["kind"] == "train"]) <= 20
    assert checkpoints(run.folder) == [5, 10]
    (disk / "filler").unlink()
    assert run.resume() == 10


@pytest.mark.nightly
def test_failed_saves_on_error_continue_train_on_all_ranks(
    disk: Path, new_run: Callable[..., Run]
) -> None:
    """The last save fails, too."""
    run = run_on(disk, new_run, checkpoint__on_error="continue")
    assert run.start() == [5, 5], run.output
    assert run.output.count("(checkpoint.on_error)") == STEPS // 5 - 3
    assert checkpoints(run.folder) == [5, 10]
    assert records(run.folder) == records(run.undisturbed(2))
