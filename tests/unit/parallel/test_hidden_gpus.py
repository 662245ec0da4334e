"""The default tests hide GPUs, so that they pass on a machine that has some."""

import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, python_path, run, runs_on_gpus

from imagenet_cls.parallel.environment import RankInfo

# What CUDA does with the variable, as a plugin of pytest: one GPU, unless it is hidden.
ONE_GPU = """
import os, torch
torch.cuda.device_count = lambda: int(os.environ.get("CUDA_VISIBLE_DEVICES") != "")
torch.cuda.is_available = lambda: torch.cuda.device_count() > 0
assert torch.cuda.is_available()
"""


@pytest.mark.parametrize(
    ("markers", "paths", "expected"),
    [
        ("not gpu", ["tests/gpu"], False),
        ("gpu and not nightly", ["tests"], True),
        ("nightly", ["tests/gpu/test_gpu_data.py::test_erase"], True),
        ("", ["tests/gpu", "tests/unit"], False),
    ],
)
def test_m_gpu_and_the_folder_of_gpu_tests_show_gpus(
    markers: str, paths: list[str], expected: bool
) -> None:
    assert runs_on_gpus(markers, [REPOSITORY / path for path in paths]) is expected


def test_device_auto_is_the_cpu() -> None:
    from imagenet_cls.parallel.devices import choose_device

    assert choose_device("auto", RankInfo()).type == "cpu"


def test_tests_choose_the_cpu_on_a_machine_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_gpu.py").write_text(ONE_GPU)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    test = f"{Path(__file__)}::test_device_auto_is_the_cpu"
    paths = python_path(tmp_path, REPOSITORY / "tests")
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "one_gpu", test], PYTHONPATH=paths)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
