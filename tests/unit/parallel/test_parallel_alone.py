"""What ranks do together, where there is only one: nothing lost, nothing changed. Several: tests/distributed."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from imagenet_cls.errors import UsageError
from imagenet_cls.parallel.collectives import all_mean, all_sum, broadcast_tensors, gather_to_main
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group, choose_device, gpu_index, init_group, run_on_main
from imagenet_cls.parallel.signals import StopRequest, StopRequested
from imagenet_cls.parallel.wrap import BatchNormStatistics, gradient_sync, warm_up_buckets, wrap_model

CPU = torch.device("cpu")
ALONE = Group(RankInfo(), CPU)


def test_collectives_give_back_what_they_got() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert all_sum(tensor, ALONE) is tensor and all_mean(tensor, ALONE).tolist() == [1.0, 2.0]
    rows = [{"a": 1}]
    assert gather_to_main(rows, ALONE) == rows
    tensors = {"a": tensor}
    assert broadcast_tensors(tensors, ALONE) is tensors
    assert run_on_main(ALONE, lambda: 7) == 7
    with pytest.raises(UsageError):
        run_on_main(ALONE, lambda: (_ for _ in ()).throw(UsageError("no")))


def test_one_rank_starts_no_group_and_wraps_nothing() -> None:
    group = init_group(RankInfo(), CPU, "auto", "auto", "env://", 5.0)
    assert group.control is None and group.is_main and not torch.distributed.is_initialized()
    model = nn.Linear(2, 2)
    assert wrap_model(model, group, "auto") is model and wrap_model(model, group, "none") is model
    warm_up_buckets(model, lambda: pytest.fail("there are no buckets"))
    with gradient_sync(model, False):
        pass


def test_devices_that_are_not_there() -> None:
    assert choose_device("cpu", RankInfo()) == CPU
    if not torch.cuda.is_available():
        assert choose_device("auto", RankInfo()) == CPU
        with pytest.raises(UsageError, match="sees no GPU"):
            choose_device("cuda", RankInfo())
    else:
        with pytest.raises(UsageError, match="needs GPU 99"):
            choose_device("cuda:99", RankInfo())


def test_which_gpu_a_rank_takes() -> None:
    ranks = [RankInfo(4 + local, local, 8, 4) for local in range(4)]
    assert [gpu_index("cuda", rank_info, 4) for rank_info in ranks] == [0, 1, 2, 3]
    assert [gpu_index("auto", rank_info, 8, [6, 2, 0, 7]) for rank_info in ranks] == [6, 2, 0, 7]
    assert gpu_index("cuda:3", RankInfo(), 4) == 3 and gpu_index("auto", RankInfo(), 4, [2]) == 2
    for rank_info, gpus, ids in ((ranks[3], 3, None), (ranks[3], 8, [0, 1]), (ranks[0], 2, [5, 6, 7, 4])):
        with pytest.raises(UsageError, match=f"rank {rank_info.rank}"):
            gpu_index("cuda", rank_info, gpus, ids)


def test_a_step_that_was_skipped_leaves_no_trace_in_running_statistics() -> None:
    """NaN in one batch would else live on in them for ever."""
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2, track_running_stats=False), nn.BatchNorm2d(2)
    )
    statistics = BatchNormStatistics(model, ALONE)
    good, bad = torch.randn(4, 3, 2, 2), torch.full((4, 3, 2, 2), float("nan"))
    model(good)
    statistics.sync(torch.tensor(False))
    after_good = [buffer.clone() for buffer in statistics.buffers]
    assert len(after_good) == 4 and not torch.equal(after_good[0], torch.zeros(3))
    model(bad)
    assert statistics.buffers[0].isnan().all()
    statistics.sync(torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(statistics.buffers, after_good, strict=True))
    model(good)
    statistics.sync(torch.tensor(False))
    assert not torch.equal(statistics.buffers[0], after_good[0])


def test_loaded_statistics_are_remembered() -> None:
    norm = nn.BatchNorm1d(2)
    statistics = BatchNormStatistics(norm, ALONE)
    norm.running_mean.fill_(5.0)  # type: ignore[union-attr]
    statistics.remember()
    norm.running_mean.fill_(float("nan"))  # type: ignore[union-attr]
    statistics.sync(torch.tensor(True))
    assert norm.running_mean.tolist() == [5.0, 5.0]  # type: ignore[union-attr]
    BatchNormStatistics(nn.Linear(2, 2), ALONE).sync(torch.tensor(True))  # a model without any


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_stop_request_after_a_signal_raises_once_and_restores_handlers(number: signal.Signals) -> None:
    before = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
    stop = StopRequest(ALONE)
    stop.listen()
    try:
        stop.check()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # a later signal changes nothing
        with pytest.raises(StopRequested) as raised:
            stop.check()
        assert raised.value.signal_number == number
    finally:
        stop.close()
        stop.close()
    assert [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)] == before


LISTENING = """
import time, torch
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.signals import StopRequest, StopRequested

StopRequest(Group(RankInfo(), torch.device("cpu"))).listen()
print("listening", flush=True)
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("numbers", "torchrun", "exits"),
    [
        ((signal.SIGINT, signal.SIGINT), False, True),
        pytest.param((signal.SIGTERM, signal.SIGINT, signal.SIGINT), False, True, marks=pytest.mark.nightly),
        ((signal.SIGINT, signal.SIGTERM), False, False),
        pytest.param((signal.SIGINT, signal.SIGUSR2), True, False, marks=pytest.mark.nightly),
        ((signal.SIGINT, signal.SIGTERM), True, True),  # torchrun forwards a second Ctrl-C as SIGTERM
    ],
)
def test_second_ctrl_c_ends_the_process_other_signals_do_not(
    numbers: tuple[signal.Signals, ...], torchrun: bool, exits: bool
) -> None:
    """Two within half a second are one."""
    environment = os.environ | ({"TORCHELASTIC_RUN_ID": "1"} if torchrun else {})
    program = [sys.executable, "-c", LISTENING]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        process.send_signal(numbers[0])
        time.sleep(0.1)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.7)
        assert process.poll() == (130 if exits else None)
        process.kill()
