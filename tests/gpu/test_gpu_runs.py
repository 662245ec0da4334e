"""Trainings on a GPU: races, precisions, compilation, two GPUs, and the same bits after a kill."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import KillPoint, RankServer
from helpers import REPOSITORY, TRAIN, arguments, records, run, state_digest

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SETTINGS = {
    # Without ReLU and max pooling, which would turn rounding errors of 1e-7 into 1e-2 in four
    # steps.
    "model.name": "resnet10t",
    "model.kwargs": "{act_layer: silu, replace_stem_pool: true, channels: [32, 32, 64, 64]}",
    "augment.size_px": 64,
    "eval.crop_px": 64,
    "train.global_batch_size": 32,
    "train.max_steps": 10,
    "train.precision": "fp32",
}
TWO_MICRO_BATCHES = {"train.micro_batch_size": 16}
# Of digits, whose upsampled images differ little, BatchNorm would enlarge the errors of bf16.
SYNTHETIC = TWO_MICRO_BATCHES | {
    "data.name": "synthetic",
    "data.kwargs": "{train_images: 20000, val_images: 32, num_classes: 10, size_px: 64}",
}
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def words(digits: Path, folder: Path, **changes: Any) -> list[str]:
    """Arguments of train.py: `SETTINGS` with these changes, as of `helpers.arguments`."""
    return arguments(digits, folder, **{**SETTINGS, "device": DEVICE, **changes})


def train(
    digits: Path, folder: Path, *options: str, sanitizer: bool = False, **changes: Any
) -> Path:
    """Train in a process of its own. Returns the run folder.

    sanitizer: whether torch looks for races between streams, and ends the run if it finds one.
    """
    env = {"TORCH_CUDA_SANITIZER": "1"} if sanitizer else {}
    env |= {
        "NVIDIA_TF32_OVERRIDE": "0",
        # of no earlier run: compiling is part of the tests
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        "TRITON_CACHE_DIR": str(folder / "compiled"),
    }
    command = [sys.executable, TRAIN, *words(digits, folder, **changes), *options]
    done = run(command, timeout_sec=600, **env)
    assert done.returncode == 0, done.stderr
    return folder


def assert_close(found: Path, expected: Path, tolerance: float) -> None:
    """Assert that losses and gradient norms of all steps are close, except the norm of a skipped
    step.
    """
    for mine, other in zip(records(found, "train"), records(expected, "train"), strict=True):
        for field in ("loss",) if mine.get("skipped") else ("loss", "grad_norm"):
            assert mine[field] == pytest.approx(other[field], rel=tolerance), mine


@pytest.fixture(scope="module")
def exact(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in fp32 without TF32, with two micro-batches for each step."""
    return train(digits, tmp_path_factory.mktemp("exact") / "run", **SYNTHETIC)


def test_sanitizer_finds_no_race(digits: Path, tmp_path: Path) -> None:
    """Without workers: the sanitizer asks CUDA for the stream of each operator, which a forked
    process can't do.
    """
    changes = TWO_MICRO_BATCHES | {
        "mix.mixup_alpha": 0.2,
        "mix.cutmix_alpha": 1.0,
        "augment.erasing.prob": 0.5,
        "ema.decay": 0.9,
    }
    train(digits, tmp_path / "run", sanitizer=True, **changes)


NIGHTLY_MODES = ("max-autotune", "max-autotune-no-cudagraphs")  # minutes
CASES = [
    pytest.param({"train.precision": "bf16"}, 0.1, id="bf16"),
    pytest.param({"train.precision": "fp16"}, 0.2, id="fp16"),
    *(
        pytest.param({"train.compile": mode}, 0.02, id=mode)
        for mode in ("default", "reduce-overhead")
    ),
    *(
        pytest.param({"train.compile": mode}, 0.02, id=mode, marks=pytest.mark.nightly)
        for mode in NIGHTLY_MODES
    ),
]


@pytest.mark.parametrize(("changes", "tolerance"), CASES)
def test_steps_are_close_to_those_in_fp32(
    digits: Path, tmp_path: Path, exact: Path, changes: dict[str, str], tolerance: float
) -> None:
    assert_close(train(digits, tmp_path / "run", **SYNTHETIC, **changes), exact, tolerance)


DP = {"parallel.mode": "dp", "parallel.device_ids": "[0, 1]"}


@needs_two_gpus
@pytest.mark.parametrize(
    ("one", "options", "two"),
    [
        # The passes of two micro-batches have the images of the two GPUs.
        pytest.param(TWO_MICRO_BATCHES, [], DP, id="dp"),
        pytest.param({}, ["--gpus", "2"], {"parallel.sync_bn": "true"}, id="ddp"),
    ],
)
def test_two_gpus_have_the_steps_of_one(
    digits: Path, tmp_path: Path, one: dict[str, Any], options: list[str], two: dict[str, str]
) -> None:
    expected = train(digits, tmp_path / "one", **one)
    assert_close(train(digits, tmp_path / "two", *options, **two), expected, 0.02)


@needs_two_gpus
def test_two_ranks_communicate_over_nccl() -> None:
    check = REPOSITORY / "tools" / "check_dist.py"
    done = run([sys.executable, check, "--gpus", "2", f"device={DEVICE}"])
    assert done.returncode == 0, done.stderr


def test_killed_and_resumed_run_ends_in_the_bits_of_another(
    digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    changes = {
        "train__deterministic": "true",
        "train__precision": "auto",
        "train__max_steps": 60,
        "checkpoint__every_steps": 10,
        "ema__decay": 0.9,
        "data__num_workers": 2,
    }
    whole = train(digits, tmp_path / "whole", **changes)
    parts, output = tmp_path / "parts", tmp_path / "output.txt"
    codes = rank_server.run(
        words(digits, parts, **changes), output, kills=[KillPoint("after_optimizer_step", 35)]
    )
    assert codes == [-9], output.read_text()
    train(digits, parts, "--resume", **changes)
    assert state_digest(parts) == state_digest(whole)
