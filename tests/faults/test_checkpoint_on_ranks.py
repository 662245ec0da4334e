"""A save that fails on rank 0: all ranks end, one reports it, and the run can be resumed."""

import os
from collections.abc import Callable
from pathlib import Path

from same_run import Run, checkpoints, records

CHECKPOINT_BYTES = 120_000  # at least


def test_failed_save_ends_all_ranks_and_the_run_resumes(
    disk: Path, new_run: Callable[..., Run]
) -> None:
    """On a disk with room for two checkpoints and not for the third, of step 15."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(b"\0" * (free - 5 * CHECKPOINT_BYTES // 2))
    run = new_run(2, disk / "run")
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
