"""DataParallel in one process: its devices, and a run on a CPU. See also tests/gpu."""

import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import arguments, newest, noisy, train_here
from torch import nn

from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.engine.component_checks import rank_problems
from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.devices import choose_devices
from imagenet_cls.parallel.wrap import with_callers_autocast, wrap_data_parallel

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
