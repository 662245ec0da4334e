"""Jobs behind the training: one at a time, and what they fail with is raised by whoever looks next."""

import threading
import time

import pytest

from imagenet_cls.engine.saving import Behind

SOON_SEC = 5.0


def test_a_job_runs_beside_its_caller_and_is_waited_for() -> None:
    behind, go_on, done = Behind(), threading.Event(), []

    def job() -> None:
        assert go_on.wait(SOON_SEC)
        done.append(threading.current_thread().name)

    behind.start(job)
    for _ in range(3):
        behind.check()  # does not wait
    assert done == []
    go_on.set()
    behind.wait()
    assert done == ["checkpoint"]
    behind.wait()
    behind.check()


def test_there_is_one_at_a_time() -> None:
    """A second one begins when the first has ended, and who starts it waits so long."""
    behind, at_once, most = Behind(), 0, 0
    lock = threading.Lock()

    def job() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1

    begin = time.monotonic()
    for _ in range(5):
        behind.start(job)
    assert time.monotonic() - begin > 4 * 0.02
    behind.wait()
    assert (at_once, most) == (0, 1)


@pytest.mark.parametrize("look", ["check", "wait", "start"])
def test_an_error_is_raised_once_by_the_next_look(look: str) -> None:
    behind, began = Behind(), []

    def job() -> None:
        raise OSError("no room")

    behind.start(job)
    end = time.monotonic() + SOON_SEC
    while any(thread.name == "checkpoint" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.001)
    looks = {"check": behind.check, "wait": behind.wait, "start": lambda: behind.start(lambda: began.append(1))}
    with pytest.raises(OSError, match="no room"):
        looks[look]()
    assert began == []  # what failed is known before anything else is written
    behind.check()
    behind.start(lambda: began.append(2))
    behind.wait()
    assert began == [2]
