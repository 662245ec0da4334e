"""Stop requests in a single process. Several ranks: tests/faults/test_stop_signals.py."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from helpers import single_rank

from imagenet_cls.parallel.signals import STOP_SIGNALS
from imagenet_cls.parallel.stop_requests import StopRequested, StopSignalHandler

SINGLE = single_rank()


@pytest.fixture
def restored_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
@pytest.mark.usefixtures("restored_handlers")
def test_stop_request_after_a_signal_raises_and_later_signals_change_nothing(
    number: signal.Signals,
) -> None:
    stop = StopSignalHandler(SINGLE)
    stop.install()
    stop.check()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StopRequested) as raised:
        stop.check()
    assert raised.value.signal_number == number
    stop.close()
    # as from a launching process, before this one has reported its stop
    os.kill(os.getpid(), signal.SIGTERM)


def test_single_rank_checks_after_each_step() -> None:
    stop = StopSignalHandler(SINGLE)
    stop.set_interval(50, 0.05)
    stop.check_after_step()
    stop.signal = signal.SIGTERM
    with pytest.raises(StopRequested):
        stop.check_after_step()


@pytest.mark.usefixtures("restored_handlers")
def test_close_without_a_signal_restores_the_handlers() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    stop = StopSignalHandler(SINGLE)
    stop.install()
    stop.close()
    stop.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGINT, signal.SIGTERM, signal.SIGUSR2), 0),
    ],
)
def test_second_ctrl_c_ends_the_process(numbers: tuple[signal.Signals, ...], code: int) -> None:
    """Two within half a second are one."""
    pid = os.fork()
    if not pid:
        StopSignalHandler(SINGLE).install()
        for number in numbers:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            time.sleep(0.6)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
