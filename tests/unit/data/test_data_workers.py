"""Data workers that fail or hang end with an error of code 5, and none outlives its loader or its process."""

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
from imagenet_cls.data import EpochSampler, TrainLoader, TrainTransform, worker_death
from imagenet_cls.errors import ResourceError

# In a process of its own, since torch's SIGCHLD handler raises wherever the program is.
SCRIPT = """
import multiprocessing, os, signal, sys, tempfile, time
from pathlib import Path
from imagenet_cls.data import worker_death, workers
from imagenet_cls.errors import ResourceError
from test_data_workers import Images, first_batch

def late_worker():
    while os.getppid() == parent:
        time.sleep(0.01)
    workers.start_worker(0)
    print("an orphan is alive", flush=True)

if os.fork() == 0:  # a process that ends before its worker has started
    parent = os.getpid()
    multiprocessing.get_context("fork").Process(target=late_worker, daemon=True).start()
    os._exit(0)

killed, epoch = first_batch(Images())
try:
    os.kill(killed.loader._iterator._workers[0].pid, signal.SIGKILL)
    list(epoch)
except ResourceError as error:
    print("killed:", error, flush=True)
except RuntimeError as error:  # torch's signal handler was faster than the loader
    print("killed:", worker_death(error), flush=True)
killed.close()

loader, _ = first_batch(Images())
iterator = loader.loader._iterator
iterator._workers_done_event._cond.acquire()  # a lock that a worker holds now and then, and torch needs to end it
try:
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    time.sleep(30)
except RuntimeError:
    pass  # torch reports the dead worker
loader.close()
print("closed", flush=True)

pipe = Path(tempfile.mkdtemp()) / "pipe"
os.mkfifo(pipe)
hung, epoch = first_batch(Images(pipe))  # one worker will hang at exit
print("workers", *(worker.pid for worker in hung.loader._iterator._workers), flush=True)
raise ValueError("a bug")
"""


class Images:
    """16 images of 8 px. pipe: reading the image with index 9 blocks on this named pipe."""

    classes = ("a", "b")

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


def first_batch(images: Images, timeout_sec: float = 60.0) -> tuple[TrainLoader, Iterator[object]]:
    """A loader with two workers, and its first epoch after the first batch."""
    transform, sampler = TrainTransform(AugmentConfig(size_px=8)), EpochSampler(16, 4, 0, 1, seed=1)
    loader = TrainLoader(images, transform, sampler, 4, 1, num_workers=2, timeout_sec=timeout_sec)
    epoch = loader.epoch(0)
    next(epoch)
    return loader, epoch


def test_workers_of_a_process_with_killed_and_hung_workers_all_end() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=150
    )  # returns when no process has its output open
    assert ended.returncode == 1 and ended.stderr.endswith("ValueError: a bug\n"), ended.stderr
    assert "killed: a data worker of process " in ended.stdout and "data.num_workers" in ended.stdout
    assert "closed" in ended.stdout and "an orphan is alive" not in ended.stdout
    pids = ended.stdout.splitlines()[-1].split()[1:]
    assert len(pids) == 2 and not any(Path("/proc", pid).exists() for pid in pids)


def test_worker_death_of_another_error_is_none() -> None:
    assert worker_death(RuntimeError("something else")) is None


def test_close_with_a_hung_worker_kills_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loader, _ = first_batch(Images(pipe))
    workers = loader.loader._iterator._workers  # type: ignore[union-attr]
    wait_for(lambda: 9 in loader.loader.dataset.reading.tolist(), "a worker to hang", 30)  # type: ignore[attr-defined]
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    loader.close()  # has no effect


def test_epoch_with_workers_stopped_before_they_send_a_batch_raises(capfd: pytest.CaptureFixture[str]) -> None:
    """All batches of the epoch are announced; torch's timeout does not apply to receiving them."""
    loader, epoch = first_batch(Images(), timeout_sec=3.0)
    workers = loader.loader._iterator._workers  # type: ignore[union-attr]
    time.sleep(1.0)  # the workers have announced the other batches
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(ResourceError, match="returned no batch for 3 s"):
        list(epoch)
    assert not any(worker.is_alive() for worker in workers)
    assert len(list(loader.epoch(0))) == 4  # with new workers
    loader.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.nightly
def test_epoch_with_steps_longer_than_the_timeout_returns_all_batches() -> None:
    loader, epoch = first_batch(Images(), timeout_sec=4.0)
    time.sleep(6.0)
    assert len(list(epoch)) == 3
    loader.close()
