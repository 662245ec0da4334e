"""macOS and Windows, simulated: what Python lacks there is removed before anything is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, TRAIN, arguments, evaluations, python_path, run

# No affinity, no prctl, no triton; data workers are spawned, and torch shares their tensors through
# files.
MACOS = """
import ctypes, os, sys, urllib.request  # which imports a module of macOS otherwise
sys.platform, sys.modules["triton"] = "darwin", None
for name in ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "memfd_create"):
    delattr(os, name)
class CDLL(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = CDLL
"""
WINDOWS = """
import os, signal, sys
sys.platform = "win32"
sys.modules["fcntl"] = sys.modules["resource"] = None
del os.sched_getaffinity, os.setsid, os.fork, signal.SIGUSR2, signal.SIGHUP
"""


def run_on(system: str, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(system)
    return run([sys.executable, *words], PYTHONPATH=python_path(folder, REPOSITORY / "tests"))


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--gpus", "2"]], ids=["one rank", "two ranks"])
def test_macos_trains(options: list[str], digits: Path, tmp_path: Path) -> None:
    words = arguments(digits, tmp_path / "run", train__max_steps=2, data__num_workers=1)
    done = run_on(MACOS, [TRAIN, *words, *options], tmp_path)
    assert done.returncode == 0, done.stderr
    assert evaluations(tmp_path / "run")[0]["images"] == 359


def test_windows_names_wsl_and_exits_with_5(tmp_path: Path) -> None:
    done = run_on(WINDOWS, [TRAIN], tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (5, "", 2)
    assert "WSL" in done.stderr
    done = run_on(WINDOWS, ["-c", "import imagenet_cls\nimagenet_cls.Predictor"], tmp_path)
    assert "ImportError: " in done.stderr and "WSL" in done.stderr
