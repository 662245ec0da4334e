"""Data workers end with what they work for, and never hold it up: in processes of their own, since torch's handler of
dead children raises wherever a program is."""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import environment, wait_for

from imagenet_cls.config.schema import AugmentConfig
from imagenet_cls.data.loader import TrainLoader, worker_death
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.transforms import train_transform
from imagenet_cls.errors import ResourceError

SCRIPT = """
import os, signal, sys, tempfile, time
from pathlib import Path
from imagenet_cls.data import workers
from imagenet_cls.data.loader import worker_death
from imagenet_cls.errors import ResourceError
from test_data_workers import Images, begun

def late_worker():
    while os.getppid() == parent:
        time.sleep(0.01)
    workers.begin(0)
    print("an orphan lives on", flush=True)

if os.fork() == 0:  # a process that is gone before its worker has begun
    import multiprocessing
    parent = os.getpid()
    multiprocessing.get_context("fork").Process(target=late_worker, daemon=True).start()
    os._exit(0)

killed, epoch = begun(Images())
try:
    os.kill(killed.loader._iterator._workers[0].pid, signal.SIGKILL)
    list(epoch)
except ResourceError as error:
    print("told:", str(error).splitlines(), flush=True)
except RuntimeError as error:  # torch's signal handler was faster than the loader
    print("told:", str(worker_death(error)).splitlines(), flush=True)
killed.close()

pipe = Path(tempfile.mkdtemp()) / "pipe"
os.mkfifo(pipe)
unheard, epoch = begun(Images(pipe))
while 9 not in (reading := unheard.loader.dataset.reading.tolist()):
    time.sleep(0.01)
torchs = signal.getsignal(signal.SIGCHLD)
def raise_the_second_time(*arguments):
    signal.signal(signal.SIGCHLD, torchs)  # the first time its exception is lost, as in a finalizer
signal.signal(signal.SIGCHLD, raise_the_second_time)
os.kill(unheard.loader._iterator._workers[reading.index(9)].pid, signal.SIGKILL)
time.sleep(0.5)
started = time.monotonic()
try:
    list(epoch)
except ResourceError as error:
    print("told again:", "was killed" in str(error), time.monotonic() - started < 20, flush=True)
unheard.close()

loader, _ = begun(Images())
iterator = loader.loader._iterator
taken_along = iterator._workers_done_event._cond.acquire()  # what a worker holds when it looks whether it should end
try:
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    time.sleep(30)
except RuntimeError:
    pass  # torch says that the worker is dead
started = time.monotonic()
loader.close()
print("closed", time.monotonic() - started < 10, flush=True)

left_open, epoch = begun(Images())
print("left open", len(left_open.loader._iterator._workers), flush=True)
raise ValueError("a bug")
"""


class Images:
    """16 images of 8 px. pipe: instead of the image with index 9 a worker reads this, until somebody writes."""

    classes = ("a", "b")
    num_classes = 2

    def __init__(self, pipe: Path | None = None):
        self.pipe = pipe

    def __len__(self) -> int:
        return 16

    def load(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 9 and self.pipe is not None:
            self.pipe.read_bytes()
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index % 2

    def name(self, index: int) -> str:
        return str(index)

    def digest(self) -> str:
        return ""


def begun(images: Images, timeout_sec: float = 60.0) -> tuple[TrainLoader, Iterator[object]]:
    """A loader with two workers, and its first epoch behind the first batch."""
    transform = train_transform(AugmentConfig(size_px=8))
    loader = TrainLoader(
        images, transform, EpochSampler(16, 4, 0, 1, seed=1), 4, 1, num_workers=2, timeout_sec=timeout_sec
    )
    epoch = loader.epoch(0)
    next(epoch)
    return loader, epoch


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess[str]:
    """The script above. That it ends, and that nobody keeps its output open, are the first things that it shows."""
    path = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=120
    )


def test_a_killed_worker_is_a_resource_error(ended: subprocess.CompletedProcess[str]) -> None:
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("told: ")]
    first, second = ast.literal_eval(line.removeprefix("told: "))
    assert "a data worker of process " in first and "was killed" in first and "data.num_workers" in second
    assert worker_death(RuntimeError("something else")) is None


def test_a_killed_worker_is_told_though_the_first_signal_was_lost(ended: subprocess.CompletedProcess[str]) -> None:
    assert "told again: True True" in ended.stdout, ended.stdout + ended.stderr


def test_an_error_while_workers_wait_ends_the_process(ended: subprocess.CompletedProcess[str]) -> None:
    """They ignore SIGTERM, which `multiprocessing` sends at the end of a process, to wait without limit then."""
    assert "left open 2" in ended.stdout
    assert ended.returncode == 1 and ended.stderr.endswith("ValueError: a bug\n"), ended.stderr


def test_a_worker_whose_process_is_gone_at_once_goes_too(ended: subprocess.CompletedProcess[str]) -> None:
    assert "closed" in ended.stdout and "an orphan lives on" not in ended.stdout


def test_a_lock_that_a_killed_worker_took_along_is_not_waited_for(ended: subprocess.CompletedProcess[str]) -> None:
    assert "closed True" in ended.stdout, ended.stderr


def test_workers_that_are_stuck_are_not_waited_for_long(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loader, _ = begun(Images(pipe))
    workers = loader.loader._iterator._workers  # type: ignore[union-attr]
    wait_for(lambda: 9 in loader.loader.dataset.reading.tolist(), "a worker to be stuck", 30)  # type: ignore[attr-defined]
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 8
    assert not any(worker.is_alive() for worker in workers)
    loader.close()  # nothing is left to close


def test_workers_that_stand_still_with_a_batch_to_hand_over(capfd: pytest.CaptureFixture[str]) -> None:
    """All that an epoch needs is announced, and has to be fetched from its maker's process."""
    loader, epoch = begun(Images(), timeout_sec=1.0)
    workers = loader.loader._iterator._workers  # type: ignore[union-attr]
    wait_for(lambda: sorted(loader.loader.dataset.reading.tolist()) != [-1, -1], "the workers to begin", 30)  # type: ignore[attr-defined]
    time.sleep(0.5)  # and their batches are in the pipe
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ResourceError, match=r"gave no batch for 1 s.*\n.*SIGSTOP"):
        list(epoch)
    assert 0.9 < time.monotonic() - started < 5
    assert not any(worker.is_alive() for worker in workers)
    again = loader.epoch(0)  # with new workers
    assert len(list(again)) == 4
    loader.close()
    assert capfd.readouterr() == ("", "")


def test_time_in_which_nobody_waits_for_a_batch_is_not_counted() -> None:
    loader, epoch = begun(Images(), timeout_sec=0.2)
    time.sleep(2.0)  # a long step
    assert len(list(epoch)) == 3
    loader.close()
