"""DataParallel in one process: its devices, and a run on a CPU. See also tests/gpu."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, saved_bytes, train_here
from torch import nn

from imagenet_cls.config.load import config_from_dict
from imagenet_cls.engine.component_checks import rank_problems
from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.devices import choose_devices
from imagenet_cls.parallel.wrap import with_callers_autocast, wrap_data_parallel


def dp_problems(ranks: int, batch: int = 256, **more: Any) -> list[str]:
    """The keys of the problems of a run with DataParallel."""
    train, parallel = {"global_batch_size": batch}, {"mode": "dp", **more}
    config = config_from_dict({"optimizer": {"lr": 0.1}, "train": train, "parallel": parallel})
    return [problem.key for problem in rank_problems(config, ranks)]


def test_dp_with_two_ranks_or_a_batch_that_gpus_cannot_divide_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert dp_problems(2) == ["parallel.mode"]
    assert dp_problems(1) == ["train.global_batch_size"]
    assert dp_problems(1, batch=255) == dp_problems(1, device_ids=[0, 2]) == []


# ---- the devices


@pytest.mark.parametrize(
    ("device", "ids", "visible", "expected"),
    [
        ("auto", None, 4, [0, 1, 2, 3]),
        ("cuda", [4, 5, 6, 7], 8, [4, 5, 6, 7]),
        ("auto", [1, 2, 0], 3, [1, 2, 0]),
        ("auto", [0, 4, 5], 4, "4, 5"),
        ("auto", [4, 5, 6, 7], 0, [None]),
        ("cpu", None, 8, [None]),
        ("cuda", [2], 4, [2]),
    ],
)
def test_choose_devices_keeps_the_given_order_and_names_missing_gpus(
    device: str, ids: list[int] | None, visible: int, expected: Any
) -> None:
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            choose_devices(device, ids, visible)
        return
    devices = choose_devices(device, ids, visible)
    assert [one.index for one in devices.all] == expected
    model = nn.Linear(2, 2)
    if len(devices.all) == 1:
        assert wrap_data_parallel(model, devices) is model


def test_callers_autocast_dtype_applies_in_other_threads() -> None:
    """In a thread that a plain call starts, autocast is off, and its dtype is the device's
    default.
    """
    layer = nn.Linear(4, 4)

    def dtype_in_thread(forward: Any) -> torch.dtype:
        with ThreadPoolExecutor() as threads:
            return threads.submit(forward, torch.randn(2, 4)).result().dtype

    with torch.autocast("cpu", torch.float16):
        assert dtype_in_thread(with_callers_autocast(layer, "cpu")) is torch.float16
        assert dtype_in_thread(layer) is torch.float32
    assert dtype_in_thread(with_callers_autocast(layer, "cpu")) is torch.float32


# ---- whole runs


def test_dp_on_a_cpu_gives_the_bits_of_mode_none(digits: Path, tmp_path: Path, capsys: Any) -> None:
    common = {"device": "cpu", "train.max_steps": 3, "ema.decay": 0.9}
    train_here(arguments(digits, tmp_path / "plain", "noisy", **common))
    train_here(arguments(digits, tmp_path / "dp", "noisy", **common, parallel__mode="dp"))
    assert capsys.readouterr().out.count("so the model runs on the CPU") == 1
    assert saved_bytes(tmp_path / "dp") == saved_bytes(tmp_path / "plain")  # and the same names
