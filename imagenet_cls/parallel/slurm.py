"""A SLURM job that goes on by itself: before its time limit it saves and asks to be queued again.

SLURM sends SIGUSR2 to the ranks of a batch job that was submitted with `--signal=USR2@SECONDS` and `--requeue`, as
`scripts/slurm_train.sh` does with BATCH=1, and `parallel.stop` makes a stop of it. Once the run is saved, rank 0 asks
for the job to be put back into the queue; when it starts again, `engine.run` finds that the folder holds this
job's run, and goes on as with --resume. Refuses to save or to end anything. Called by `ranks`, on rank 0 only.
"""

import shutil
import signal
import subprocess
from collections.abc import Mapping

from imagenet_cls.errors import Stopped

# Longest wait for SLURM's controller, which may be busy. The time limit comes next, so there is no point in more.
_PATIENCE_SEC = 30


def requeue(stopped: Stopped, env: Mapping[str, str]) -> Stopped:
    """What to tell instead of `stopped` where it was SIGUSR2 inside a SLURM job, which is queued again by this call.

    Never raises: the run is saved, and a job that SLURM does not take back can be started by hand.
    """
    job = env.get("SLURM_JOB_ID", "")
    if stopped.exit_code != 128 + signal.SIGUSR2 or not job:
        return stopped
    what = str(stopped).splitlines()[0]
    refusal = _ask(job)
    if refusal is None:
        return Stopped(f"{what}\nSLURM will start job {job} again, and it goes on by itself.", stopped.exit_code)
    return Stopped(
        f"{what}\nSLURM did not queue job {job} again: {refusal}\nGo on with the same command and --resume.",
        stopped.exit_code,
    )


def _ask(job: str) -> str | None:
    """None where SLURM agreed, else its reason in a line."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return "there is no scontrol here"
    words = [scontrol, "requeue", job]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_SEC)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
