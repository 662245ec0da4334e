"""The GPU path on simulated GPUs: every scenario passes, and those with a planted bug fail.

Scenarios run in processes of their own, so that the patches of torch reach no other test.
"""

import subprocess
import sys
from functools import cache

import pytest
from helpers import REPOSITORY, run
from rehearsal.scenarios import PLANTED_BUGS, SCENARIOS

DEFAULT = ("train", "files", "waits", "ddp")
NIGHTLY = tuple(name for name in SCENARIOS if name not in DEFAULT)


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = REPOSITORY / "tests" / "rehearsal" / "scenarios.py"
    return run([sys.executable, script, *arguments], timeout_sec=500)


@cache
def finished(names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """One process for several scenarios, since it takes seconds to import torch."""
    return start(*names)


@pytest.mark.parametrize("name", DEFAULT)
def test_scenario_on_simulated_gpus_passes(name: str) -> None:
    done = finished(DEFAULT)
    assert f"passes {name}\n" in done.stdout, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_rare_scenario_on_simulated_gpus_passes(name: str) -> None:
    done = finished(NIGHTLY)
    assert f"passes {name}\n" in done.stdout, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("mean_stays_on_the_cpu", "Expected all tensors to be on the same device"),
        ("no_wait_for_the_copy", "race between streams"),
        ("no_record_stream", "without record_stream"),
        ("number_read_in_each_step", "the host waits"),
        ("cpu_generator_for_erasing", "a generator of cpu for a tensor of cuda:0"),
        ("cpu_tensor_to_nccl", "on nccl with tensors on"),
    ],
)
def test_planted_bug_is_noticed(bug: str, message: str) -> None:
    done = start("--bug", bug)
    assert done.returncode == 1 and f"FAILS {PLANTED_BUGS[bug][0]}\n" in done.stdout
    assert message in done.stdout + done.stderr
