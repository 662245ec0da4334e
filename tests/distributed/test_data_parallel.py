"""One process, several GPUs: what can be known without any, and (marked gpu) the real thing.

On one GPU, DataParallel's own path is taken by naming it twice.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import TRAIN, arguments, evaluations, losses, newest, noisy, run, state_digest, train_here
from torch import nn

from imagenet_cls.config.check import value_problems
from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config, TrainConfig
from imagenet_cls.engine.check import rank_problems
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.data_parallel import Devices, choose_devices, with_callers_autocast, wrap_data_parallel
from imagenet_cls.seeding import seed_generators

CPU = torch.device("cpu")


def config_of(device: str = "auto", batch: int = 256, compiled: bool = False, **parallel: Any) -> Config:
    train = {"global_batch_size": batch, "compile": compiled}
    return config_from_dict({"optimizer": {"lr": 0.1}, "device": device, "train": train, "parallel": parallel})


# ------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize(
    "good",
    [
        {"mode": "dp"},
        {"mode": "dp", "device_ids": [4, 5, 6, 7]},
        {"mode": "dp", "device_ids": [1, 2, 0], "output_device": 0},
        {"mode": "dp", "device": "cuda"},
        {"mode": "dp", "device": "cpu"},
        {"mode": "ddp", "sync_bn": True, "compiled": True, "device": "cuda:1"},
        {"mode": "ddp", "device_ids": [1, 0]},
    ],
)
def test_what_fits_together(good: dict[str, Any]) -> None:
    assert value_problems(config_of(**good)) == []


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"mode": "dp", "device_ids": []}, "parallel.device_ids"),
        ({"mode": "dp", "device_ids": [0, 0]}, "parallel.device_ids"),
        ({"mode": "dp", "device_ids": [0, -1]}, "parallel.device_ids"),
        ({"mode": "dp", "output_device": -1}, "parallel.output_device"),
        ({"mode": "dp", "sync_bn": True}, "parallel.sync_bn"),
        ({"mode": "dp", "compiled": True}, "train.compile"),
        ({"mode": "dp", "device": "cuda:1"}, "device"),
        ({"mode": "ddp", "device_ids": [1, 1]}, "parallel.device_ids"),
        ({"mode": "auto", "device_ids": [1, 0], "device": "cuda:1"}, "device"),
        ({"output_device": 0}, "parallel.output_device"),
    ],
)
def test_what_does_not(wrong: dict[str, Any], key: str) -> None:
    assert [problem.key for problem in value_problems(config_of(**wrong))] == [key]


def test_dp_is_one_rank() -> None:
    assert rank_problems(config_of(mode="dp", device="cpu"), 1) == []
    (problem,) = rank_problems(config_of(mode="dp"), 2)
    assert problem.key == "parallel.mode" and "2 ranks were started" in problem.message


def test_a_batch_that_does_not_divide_among_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    (problem,) = rank_problems(config_of(mode="dp", batch=256), 1)
    assert problem.message == "256 images do not divide among 3 GPUs; nearest that do: 255 or 258"
    assert rank_problems(config_of(mode="dp", batch=256, device_ids=[0, 2]), 1) == []


# ------------------------------------------------------------------------------------------- the devices


def indices(devices: Devices) -> list[int | None]:
    return [device.index for device in devices.all]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_in_any_number_and_order(device: str) -> None:
    everything = choose_devices(device, None, None, 4)
    assert indices(everything) == [0, 1, 2, 3] and everything.output.index == 0
    upper = choose_devices(device, [4, 5, 6, 7], None, 8)
    assert indices(upper) == [4, 5, 6, 7] and upper.output.index == 4
    turned = choose_devices(device, [1, 2, 0], 2, 3)
    assert indices(turned) == [1, 2, 0] and turned.output.index == 2
    assert "faster" in turned.note and "scripts/dist_train.sh CONFIG 3" in turned.note and "\n" not in turned.note
    elsewhere = choose_devices(device, [1, 2], 0, 3)
    assert indices(elsewhere) == [1, 2] and elsewhere.output.index == 0


@pytest.mark.parametrize(
    ("ids", "output", "message"),
    [
        ([0, 4, 5], None, "parallel.device_ids names GPU 4, 5, but 4 are visible here: 0 to 3"),
        ([0, 1], 9, "parallel.output_device names GPU 9, but 4"),
        (None, 4, "parallel.output_device names GPU 4, but 4"),
    ],
)
def test_gpus_that_are_not_there(ids: list[int] | None, output: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_devices("auto", ids, output, 4)


@pytest.mark.parametrize(
    ("device", "ids", "visible", "expected", "words"),
    [
        ("auto", None, 0, CPU, "runs on the CPU"),
        ("auto", [4, 5, 6, 7], 0, CPU, "runs on the CPU"),
        ("cpu", None, 8, CPU, "runs on the CPU"),
        ("auto", None, 1, torch.device("cuda", 0), "one GPU is visible"),
        ("auto", [1, 2], 1, torch.device("cuda", 0), "one GPU is visible"),
        ("cuda", [2], 4, torch.device("cuda", 2), "only GPU 2 is named"),
    ],
)
def test_fewer_than_two_gpus_are_used_and_said(
    device: str, ids: list[int] | None, visible: int, expected: torch.device, words: str
) -> None:
    devices = choose_devices(device, ids, None, visible)
    assert devices.all == (expected,) and devices.output == expected
    assert words in devices.note and "\n" not in devices.note
    model = nn.Linear(2, 2)
    assert wrap_data_parallel(model, devices) is model


# ---------------------------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize(
    ("batch", "gpus", "limit", "accumulation", "micro"),
    [(256, 4, None, 1, 64), (256, 4, 32, 2, 32), (256, 4, 24, 4, 16), (252, 3, 50, 2, 42), (48, 8, 6, 1, 6)],
)
def test_the_batch_is_split_among_gpus_as_among_ranks(
    batch: int, gpus: int, limit: int | None, accumulation: int, micro: int
) -> None:
    train = TrainConfig(epochs=2, global_batch_size=batch, micro_batch_size=limit)
    plan, ranks = plan_run(train, 10_000, 1, gpus), plan_run(train, 10_000, gpus)
    assert (plan.accumulation, plan.micro_batch) == (accumulation, micro) == (ranks.accumulation, ranks.micro_batch)
    assert plan.loader_batch == micro * gpus and plan.loader_batch * accumulation == plan.share == batch
    assert ranks.loader_batch == micro
    assert (plan.steps_per_epoch, plan.total_steps) == (ranks.steps_per_epoch, ranks.total_steps)


def test_autocast_reaches_other_threads_with_its_dtype() -> None:
    """In a thread that a plain call starts, autocast is off, and its dtype is the device's default."""
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


# --------------------------------------------------------------------------------------------- whole runs


def test_on_a_cpu_it_trains_as_without_and_says_so(digits: Path, tmp_path: Path, capsys: Any) -> None:
    common = {"device": "cpu", "train.max_steps": 3, "ema.decay": 0.9}
    train_here(arguments(digits, tmp_path / "plain", "noisy", **common))
    assert "parallel.mode=dp" not in capsys.readouterr().out
    train_here(arguments(digits, tmp_path / "dp", "noisy", **common, parallel__mode="dp"))
    assert capsys.readouterr().out.count("parallel.mode=dp: no GPU is used, so the model runs on the CPU") == 1
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        assert (newest(tmp_path / "dp") / name).read_bytes() == (newest(tmp_path / "plain") / name).read_bytes()
    state = safetensors.torch.load_file(newest(tmp_path / "dp") / "model.safetensors")
    assert set(state) == set(noisy(10).state_dict())  # no name carries `module.`


# ------------------------------------------------------------------------------------------- on real GPUs

GPU = torch.device("cuda", 0)
TWICE = Devices((GPU, GPU), GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_replicas_give_the_gradients_of_the_whole_batch(dtype: torch.dtype | None) -> None:
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
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
    tolerance = 1e-5 if dtype is None else 2e-2
    for whole, split in zip(*gradients, strict=True):
        torch.testing.assert_close(split, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_running_statistics_are_the_first_replicas() -> None:
    layer = nn.BatchNorm1d(3, momentum=1.0).to(GPU)
    images = torch.randn(8, 3, device=GPU)
    wrap_data_parallel(layer, TWICE)(images)
    torch.testing.assert_close(layer.running_mean, images[:4].mean(0))
    assert layer.num_batches_tracked.item() == 1  # type: ignore[union-attr]


@pytest.mark.gpu
def test_evaluation_through_replicas_takes_any_batch_and_keeps_the_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).to(GPU).eval()
    wrapper = wrap_data_parallel(model, TWICE)
    assert not wrapper.training and not model.training
    for size in (1, 2, 5):
        images = torch.randn(size, 4, device=GPU)
        torch.testing.assert_close(wrapper(images), model(images))


@pytest.mark.gpu
def test_each_gpu_draws_by_a_key_of_its_own() -> None:
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
def test_a_run_on_one_gpu_learns_as_without(digits: Path, tmp_path: Path, mode: str) -> None:
    """`dp` over what is visible, and `ddp` over nccl with one rank, in a process of its own."""
    common = {"device": "cuda", "train.precision": "fp32", "train.max_steps": 6}
    done = run([sys.executable, TRAIN, *arguments(digits, tmp_path / "plain", **common, parallel__mode="none")])
    assert done.returncode == 0, done.stderr
    done = run([sys.executable, TRAIN, *arguments(digits, tmp_path / mode, **common, parallel__mode=mode)])
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / mode) == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
    assert [e["images"] for e in evaluations(tmp_path / mode)] == [359]
    assert "module." not in json.dumps(list(safetensors.torch.load_file(newest(tmp_path / mode) / "model.safetensors")))


@pytest.mark.gpu
def test_a_deterministic_dp_run_repeats_its_bits(digits: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        words = arguments(digits, tmp_path / name, "noisy", parallel__mode="dp", train__deterministic="true")
        done = run([sys.executable, TRAIN, *words, "train.max_steps=5"])
        assert done.returncode == 0, done.stderr
    assert state_digest(tmp_path / "one") == state_digest(tmp_path / "two")
