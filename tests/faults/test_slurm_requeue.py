"""A batch job in a real SLURM before its time limit: it saves, is requeued, and ends with the same
bits.

The fast tests, with a scontrol of their own, are in test_stop_signals.py.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import REPOSITORY, run, steps_done, wait_for
from same_run import STEPS, Run, assert_same_bits

SCRIPT = str(REPOSITORY / "scripts" / "slurm_train.sh")


@pytest.mark.nightly
def test_batch_job_signaled_by_slurm_is_requeued_and_resumes(
    new_run: Callable[..., Run], tmp_path: Path, slurm: dict[str, str]
) -> None:
    """scancel sends the signal that SLURM sends before a time limit, whose moment depends on the
    machine's speed.
    """
    # its arguments reach the ranks by two shells
    job = new_run(2, tmp_path / "a run", model__kwargs__pause_sec=0.1)
    env = {"BATCH": "1", "GPUS": "2", "GPUS_PER_NODE": "2", "GRES": "", "CPUS_PER_TASK": "4"}
    # more CPUs than the cluster has, unless the ranks get the number in SBATCH_ARGS
    env["SBATCH_ARGS"] = "--time=30 --cpus-per-task=1"
    submitted = run(["bash", SCRIPT, "main", "tests", *job.words], cwd=tmp_path, **slurm, **env)
    number = submitted.stdout.split()[-1]
    output = tmp_path / f"slurm-{number}.out"

    def printed(text: str) -> bool:
        return output.exists() and text in output.read_text()

    wait_for(lambda: steps_done(job.folder) >= 12, "step 12")
    assert run(["scancel", "--signal=USR2", number], **slurm).returncode == 0
    wait_for(lambda: printed(f"SLURM will restart job {number}"), "the job to be queued again")
    assert steps_done(job.folder) < STEPS
    wait_for(lambda: printed("\ndone\n"), "the job to run to its end")

    text = output.read_text()
    stopped_at = re.findall(r"SIGUSR2 after step (\d+) of 40, saved in ", text)
    assert len(stopped_at) == 1
    assert (
        re.findall(r"resumed from .* at step (\d+)", re.sub(r"\s+(?=at step)", " ", text))
        == stopped_at
    )
    assert_same_bits(job.folder, job.undisturbed(2))


def test_slurm_script_with_an_invalid_batch_value_exits_with_2(tmp_path: Path) -> None:
    done = run(["bash", SCRIPT, "main", "tests", "configs/demo.yaml"], BATCH="yes")
    assert (done.returncode, done.stdout) == (2, "") and "BATCH=yes" in done.stderr
