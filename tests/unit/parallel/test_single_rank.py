"""Devices, backends and wrapping with a single rank. Several ranks: tests/distributed."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from imagenet_cls.errors import ResourceError, UsageError
from imagenet_cls.parallel import process_group
from imagenet_cls.parallel.devices import choose_device, gpu_index
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import (
    RankContext,
    check_backend,
    init_process_groups,
    name_flight_recorder_files,
)
from imagenet_cls.parallel.wrap import (
    BatchNormStatistics,
    gradient_sync,
    rebuild_ddp_buckets,
    wrap_ddp,
)

CPU = torch.device("cpu")
SINGLE = RankContext(RankInfo(), CPU)


def test_single_rank_makes_no_process_group_and_wraps_nothing() -> None:
    context = init_process_groups(RankInfo(), CPU, "auto", "auto", "env://", 5.0)
    assert context.cpu_group is None and context.is_main and not dist.is_initialized()
    model = nn.Linear(2, 2)
    assert wrap_ddp(model, context, "auto") is model and wrap_ddp(model, context, "none") is model
    rebuild_ddp_buckets(model, lambda: pytest.fail("there are no buckets"))
    with gradient_sync(model, False):
        pass


def test_choose_device_without_the_gpu_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu", RankInfo()) == CPU
    if not torch.cuda.is_available():
        assert choose_device("auto", RankInfo()) == CPU
    with pytest.raises(UsageError):
        choose_device("cuda:99", RankInfo())
    for is_available, ranks in ((True, 2), (False, 1)):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda found=is_available: found)
        with pytest.raises(UsageError):
            choose_device("mps", RankInfo(0, 0, ranks, ranks))


def test_gpu_index_is_the_local_rank_or_from_device_ids() -> None:
    ranks = [RankInfo(4 + local, local, 8, 4) for local in range(4)]
    assert [gpu_index("cuda", rank_info, 4) for rank_info in ranks] == [0, 1, 2, 3]
    assert [gpu_index("auto", rank_info, 8, [6, 2, 0, 7]) for rank_info in ranks] == [6, 2, 0, 7]
    assert gpu_index("cuda:3", RankInfo(), 4) == 3 and gpu_index("auto", RankInfo(), 4, [2]) == 2
    for gpus, ids in ((3, None), (8, [0, 1]), (2, [5, 6, 7, 4])):
        with pytest.raises(UsageError):
            gpu_index("cuda", ranks[3], gpus, ids)


@pytest.mark.parametrize(
    ("launcher", "launched", "visible", "is_found"),
    [
        ("slurm", False, "", True),
        ("pytorch", False, "1", True),  # set by a script around each rank
        ("pytorch", False, "", False),
        ("pytorch", True, "0", False),  # our launching process has the same for all
    ],
)
def test_rank_that_sees_one_gpu_uses_it_if_it_may_be_its_own(
    launcher: str,
    launched: bool,
    visible: str,
    is_found: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    rank_info = RankInfo(1, 1, 2, 2, launcher, launched)
    with nullcontext() if is_found else pytest.raises(UsageError):
        assert gpu_index("auto", rank_info, 1) == 0


@pytest.mark.parametrize(
    "raised",
    [
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might", 2),
        torch.cuda.DeferredCudaCallError("CUDA error: no kernel image is available"),
    ],
)
def test_gpu_on_which_cuda_cannot_start_exits_5(
    raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", Mock(side_effect=raised))
    with pytest.raises(ResourceError):
        init_process_groups(RankInfo(), torch.device("cuda", 0), "auto", "auto", "env://", 10.0)


def test_check_backend_that_is_missing_or_does_not_fit_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name != "ucc")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for backend, launcher in (("auto", "spawn"), ("gloo", "mpi"), ("mpi", "mpi")):
        check_backend(backend, launcher)
    for backend, launcher in (("ucc", "none"), ("nccl", "none"), ("mpi", "spawn")):
        with pytest.raises(UsageError):
            check_backend(backend, launcher)


@pytest.mark.parametrize("backend", ["nccl", "auto", "gloo"])
def test_process_group_is_bound_to_the_gpu_of_its_rank(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a single rank."""
    gpu, bound = torch.device("cuda", 1), []
    monkeypatch.setattr(process_group, "start_gpu", lambda _: None)
    monkeypatch.setattr(process_group, "check_backend", lambda *_: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **words: bound.append(words["device_id"])
    )
    init_process_groups(RankInfo(), gpu, "ddp", backend, "env://", 10.0)
    assert bound == [None if backend == "gloo" else gpu]


@pytest.mark.parametrize(("backend", "own"), [("gloo", None), ("nccl", None), ("nccl", "a")])
def test_flight_recorder_of_nccl_writes_to_the_folder_of_logs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, own: str | None
) -> None:
    """Without a GPU: only the variable that nccl's process group reads."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    env = {"TORCH_FR_DUMP_TEMP_FILE": own} if own else {}
    name_flight_recorder_files(env, tmp_path)
    expected = own or (f"{tmp_path}/nccl_trace_rank" if backend == "nccl" else None)
    assert env.get("TORCH_FR_DUMP_TEMP_FILE") == expected


def fill(norm: nn.Module, value: float) -> None:
    norm.running_mean.fill_(value)


def assign(norm: nn.Module, value: float) -> None:
    norm.running_mean = torch.full((2,), value)


def assign_data(norm: nn.Module, value: float) -> None:
    norm.running_mean.data = torch.full((2,), value)


@pytest.mark.parametrize("change", [fill, assign, assign_data])
def test_batch_norm_statistics_of_a_loaded_state_are_restored(
    change: Callable[[nn.Module, float], None],
) -> None:
    norm = nn.BatchNorm1d(2)
    statistics = BatchNormStatistics(norm, SINGLE)
    change(norm, 5.0)
    statistics.store_current()
    for skipped, expected in ((True, 5.0), (False, 7.0), (True, 7.0)):
        change(norm, float("nan") if skipped else 7.0)
        statistics.sync(torch.tensor(skipped))
        assert norm.running_mean.tolist() == [expected, expected]
    fill(norm, 8.0)  # the buffer that the norm has now is a view again
    statistics.sync(torch.tensor(False))
    assert statistics.flat[0].tolist() == [8.0, 8.0, 1.0, 1.0]


def test_batch_norm_statistics_leave_copies_and_files_of_the_model_as_they_are(
    tmp_path: Path,
) -> None:
    untracked = nn.BatchNorm1d(2, track_running_stats=False)
    wide = nn.BatchNorm1d(3).double()
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3), wide, untracked)
    model[1].running_mean.fill_(4.0)
    expected = deepcopy(model.state_dict())
    BatchNormStatistics(model, SINGLE).sync(torch.tensor(False))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    for found in (model.state_dict(), deepcopy(model).state_dict(), stored):
        torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
