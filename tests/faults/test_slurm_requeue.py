"""A batch job in a real SLURM before its time limit: it saves, is requeued, and ends with the same bits.

The fast tests, with a scontrol of their own, are in test_stop_signals.py.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import REPOSITORY, environment, steps_done, wait_for
from same_run import STEPS, assert_same_bits, words_for

ByRanks = Callable[[int], Path]
SCRIPT = str(REPOSITORY / "scripts" / "slurm_train.sh")


def call(words: list[str], folder: Path, **env: str) -> str:
    done = subprocess.run(
        words, env=environment(**env), cwd=folder, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


@pytest.mark.nightly
def test_batch_job_signaled_by_slurm_is_requeued_and_resumes(
    few_images: ByRanks, undisturbed: ByRanks, tmp_path: Path, slurm: dict[str, str]
) -> None:
    """scancel sends the signal that SLURM sends before a time limit, whose moment depends on the machine's speed."""
    folder = tmp_path / "a run"  # its arguments reach the ranks through two shells
    words = words_for(few_images(2), folder, 2, model__kwargs__pause_sec=0.1)
    env = {"BATCH": "1", "GPUS": "2", "GPUS_PER_NODE": "2", "GRES": "", "CPUS_PER_TASK": "1"}
    env["SBATCH_ARGS"] = "--time=30"
    submitted = call(["bash", SCRIPT, "main", "tests", *words], tmp_path, **slurm, **env)
    job = submitted.split()[-1]
    output = tmp_path / f"slurm-{job}.out"

    def said(text: str) -> bool:
        return output.exists() and text in output.read_text()

    wait_for(lambda: steps_done(folder) >= 12, "step 12")
    call(["scancel", "--signal=USR2", job], tmp_path, **slurm)
    wait_for(lambda: said(f"SLURM will restart job {job}"), "the job to be queued again")
    assert steps_done(folder) < STEPS
    wait_for(lambda: said("\ndone\n"), "the job to go on to its end")

    text = output.read_text()
    stopped_at = re.findall(r"stopped by SIGUSR2 after step (\d+) of 40, saved in ", text)
    assert len(stopped_at) == 1
    assert re.findall(r"resumed from .* at step (\d+)", re.sub(r"\s+(?=at step)", " ", text)) == stopped_at
    assert text.count("run folder") == 1 + len(stopped_at), "all starts, of which later ones were appended"
    assert_same_bits(folder, undisturbed(2))


def test_slurm_script_with_an_invalid_batch_value_exits_with_code_2(tmp_path: Path) -> None:
    env = os.environ | {"BATCH": "yes"}
    done = subprocess.run(
        ["bash", SCRIPT, "main", "tests", "configs/demo.yaml"], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "") and "BATCH=yes" in done.stderr
