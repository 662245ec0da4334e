"""DataParallel, DDP and SyncBN on a GPU. On one, naming it twice takes DataParallel's own path."""

import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from forked_ranks import RankServer
from helpers import TRAIN, arguments, evaluations, losses, newest, run, state_digest
from test_sync_bn import ours_on_a_gpu
from torch import nn

from imagenet_cls.parallel.devices import Devices
from imagenet_cls.parallel.wrap import wrap_data_parallel
from imagenet_cls.seeding import seed_generators

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
TWICE = Devices((GPU, GPU))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_dp_gives_the_gradients_of_the_whole_batch(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # cuDNN would round to TF32, and not alike for six images and for three.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).to(GPU)
    images, targets = torch.randn(6, 3, 8, 8, device=GPU), torch.arange(6, device=GPU) % 5
    gradients = []
    for forward in (model, wrap_data_parallel(model, TWICE)):
        model.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            logits = forward(images)
        assert logits.dtype is (dtype or torch.float32), "autocast's dtype reached the replicas"
        nn.functional.cross_entropy(logits.float(), targets).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    tolerance = 1e-5 if dtype is None else 2e-2
    for whole, split in zip(*gradients, strict=True):
        torch.testing.assert_close(split, whole, rtol=tolerance, atol=tolerance)


def test_seed_generators_seeds_each_gpu_differently() -> None:
    torch.cuda.init()  # before it there are no default generators
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    rounds = []
    for _ in range(2):
        seed_generators(7, *gpus)
        rounds.append([torch.rand(4, device=gpu).tolist() for gpu in gpus])
    assert rounds[0] == rounds[1] and len({tuple(draws) for draws in rounds[0]}) == len(gpus)
    torch.cuda.default_generators[0].manual_seed(7)
    assert torch.rand(4, device=gpus[0]).tolist() == rounds[0][0]


@pytest.mark.parametrize("mode", ["dp", "ddp"])
def test_run_on_one_gpu_has_the_losses_of_mode_none(
    digits: Path, tmp_path: Path, mode: str
) -> None:
    """`dp` over what is visible, and `ddp` over nccl with one rank, in a process of its own."""
    # Deterministic: other algorithms of cuDNN, which may round to TF32, would give other losses.
    common = {
        "device": "cuda",
        "train.precision": "fp32",
        "train.max_steps": 6,
        "train.deterministic": "true",
    }
    done = run(
        [
            sys.executable,
            TRAIN,
            *arguments(digits, tmp_path / "plain", **common, parallel__mode="none"),
        ]
    )
    assert done.returncode == 0, done.stderr
    done = run(
        [sys.executable, TRAIN, *arguments(digits, tmp_path / mode, **common, parallel__mode=mode)]
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / mode) == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
    assert [e["images"] for e in evaluations(tmp_path / mode)] == [359]
    assert "module." not in json.dumps(
        list(safetensors.torch.load_file(newest(tmp_path / mode) / "model.safetensors"))
    )


def test_deterministic_dp_run_repeats_its_bits(digits: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        words = arguments(
            digits, tmp_path / name, "noisy", parallel__mode="dp", train__deterministic="true"
        )
        done = run([sys.executable, TRAIN, *words, "train.max_steps=5"])
        assert done.returncode == 0, done.stderr
    assert state_digest(tmp_path / "one") == state_digest(tmp_path / "two")


def test_sync_bn_equals_torchs_on_a_gpu(rank_server: RankServer, tmp_path: Path) -> None:
    rank_server.call(ours_on_a_gpu, 2, tmp_path)
