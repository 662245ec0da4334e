"""Stop requests in a single process. Several ranks: tests/faults/test_stop_signals.py."""

import os
import signal
import time

import pytest
import torch

from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.signals import StopRequested, StopSignalHandler

SINGLE = Group(RankInfo(), torch.device("cpu"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_stop_request_after_a_signal_raises_and_close_restores_handlers(number: signal.Signals) -> None:
    before = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
    stop = StopSignalHandler(SINGLE)
    stop.install()
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


@pytest.mark.parametrize(
    ("numbers", "torchrun", "code"),
    [
        ((signal.SIGINT, signal.SIGINT), False, 130),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), False, 130),
        ((signal.SIGINT, signal.SIGTERM), False, 0),
        ((signal.SIGINT, signal.SIGUSR2), True, 0),
        ((signal.SIGINT, signal.SIGTERM), True, 130),  # torchrun forwards a second Ctrl-C as SIGTERM
    ],
)
def test_second_ctrl_c_ends_the_process_and_other_signals_do_not(
    numbers: tuple[signal.Signals, ...], torchrun: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two within half a second are one."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1") if torchrun else monkeypatch.delenv("TORCHELASTIC_RUN_ID", False)
    pid = os.fork()
    if not pid:
        StopSignalHandler(SINGLE).install()
        for number in numbers:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            time.sleep(0.6)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
