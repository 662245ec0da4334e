"""DataParallel in one process. On one GPU (marked gpu), naming it twice takes DataParallel's own
path.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import (
    TRAIN,
    arguments,
    evaluations,
    losses,
    newest,
    noisy,
    run,
    state_digest,
    train_here,
)
from torch import nn

from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.check import rank_problems
from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.devices import Devices, choose_devices
from imagenet_cls.parallel.wrap import with_callers_autocast, wrap_data_parallel
from imagenet_cls.seeding import seed_generators

CPU = torch.device("cpu")


def config_of(
    device: str = "auto", batch: int = 256, compiled: bool = False, **parallel: Any
) -> Config:
    train = {"global_batch_size": batch, "compile": compiled}
    return config_from_dict(
        {"optimizer": {"lr": 0.1}, "device": device, "train": train, "parallel": parallel}
    )


def test_dp_with_two_ranks_is_a_problem() -> None:
    assert rank_problems(config_of(mode="dp", device="cpu"), 1) == []
    (problem,) = rank_problems(config_of(mode="dp"), 2)
    assert problem.key == "parallel.mode" and "2 ranks were started" in problem.message


def test_batch_that_gpus_cannot_divide_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    (problem,) = rank_problems(config_of(mode="dp", batch=256), 1)
    assert (
        problem.message
        == "256 images do not divide among 3 devices; the nearest numbers that do: 255 or 258"
    )
    assert rank_problems(config_of(mode="dp", batch=256, device_ids=[0, 2]), 1) == []


# ---- the devices


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_choose_devices_keeps_the_given_order(device: str) -> None:
    for ids, output, visible, expected in [
        (None, None, 4, ([0, 1, 2, 3], 0)),
        ([4, 5, 6, 7], None, 8, ([4, 5, 6, 7], 4)),
        ([1, 2, 0], 2, 3, ([1, 2, 0], 2)),
        ([1, 2], 0, 3, ([1, 2], 0)),
    ]:
        devices = choose_devices(device, ids, output, visible)
        assert ([one.index for one in devices.all], devices.output.index) == expected


@pytest.mark.parametrize(
    ("ids", "output", "visible", "message"),
    [
        ([0, 4, 5], None, 4, "parallel.device_ids .*4, 5"),
        ([0, 1], 9, 4, "parallel.output_device"),
        (None, 4, 4, "GPU 4"),
        ([3], None, 1, "parallel.device_ids .*3"),
    ],
)
def test_choose_devices_with_a_missing_gpu_names_it(
    ids: list[int] | None, output: int | None, visible: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_devices("auto", ids, output, visible)


@pytest.mark.parametrize(
    ("device", "ids", "visible", "expected"),
    [
        ("auto", [4, 5, 6, 7], 0, CPU),
        ("cpu", None, 8, CPU),
        ("auto", [0], 1, torch.device("cuda", 0)),
        ("cuda", [2], 4, torch.device("cuda", 2)),
    ],
)
def test_choose_devices_with_fewer_than_two_gpus_uses_one(
    device: str, ids: list[int] | None, visible: int, expected: torch.device
) -> None:
    devices = choose_devices(device, ids, None, visible)
    assert devices.all == (expected,) and devices.output == expected
    assert devices.note
    model = nn.Linear(2, 2)
    assert wrap_data_parallel(model, devices) is model


def test_callers_autocast_dtype_applies_in_other_threads() -> None:
    """In a thread that a plain call starts, autocast is off, and its dtype is the device's
    default.
    """
    layer, images, found = nn.Linear(4, 4), torch.randn(2, 4), {}

    def in_thread(name: str, forward: Any) -> None:
        thread = threading.Thread(target=lambda: found.update({name: forward(images).dtype}))
        thread.start()
        thread.join()

    with torch.autocast("cpu", torch.float16):
        in_thread("wrapped", with_callers_autocast(layer, "cpu"))
        in_thread("plain", layer)
    in_thread("without", with_callers_autocast(layer, "cpu"))
    assert found == {"wrapped": torch.float16, "plain": torch.float32, "without": torch.float32}


# ---- whole runs


def test_dp_on_a_cpu_gives_the_bits_of_mode_none(digits: Path, tmp_path: Path, capsys: Any) -> None:
    common = {"device": "cpu", "train.max_steps": 3, "ema.decay": 0.9}
    train_here(arguments(digits, tmp_path / "plain", "noisy", **common))
    assert "parallel.mode=dp" not in capsys.readouterr().out
    train_here(arguments(digits, tmp_path / "dp", "noisy", **common, parallel__mode="dp"))
    assert (
        capsys.readouterr().out.count(
            "parallel.mode=dp: no GPU is used, so the model runs on the CPU"
        )
        == 1
    )
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        assert (newest(tmp_path / "dp") / name).read_bytes() == (
            newest(tmp_path / "plain") / name
        ).read_bytes()
    state = safetensors.torch.load_file(newest(tmp_path / "dp") / "model.safetensors")
    assert set(state) == set(noisy(10).state_dict())  # no name carries `module.`


# ---- on real GPUs

GPU = torch.device("cuda", 0)
TWICE = Devices((GPU, GPU), GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_dp_gives_the_gradients_of_the_whole_batch(dtype: torch.dtype | None) -> None:
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_deterministic_dp_run_repeats_its_bits(digits: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        words = arguments(
            digits, tmp_path / name, "noisy", parallel__mode="dp", train__deterministic="true"
        )
        done = run([sys.executable, TRAIN, *words, "train.max_steps=5"])
        assert done.returncode == 0, done.stderr
    assert state_digest(tmp_path / "one") == state_digest(tmp_path / "two")
