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
@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_planted_bug_is_noticed(bug: str) -> None:
    done = start("--bug", bug)
    scenario, _, message = PLANTED_BUGS[bug]
    assert done.returncode == 1 and f"FAILS {scenario}\n" in done.stdout
    assert message in done.stdout + done.stderr
