"""Data workers that fail or hang end with an error of code 5, and none outlives its loader or its
process.
"""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import environment, wait_for
from test_data_loader import same
from torch.multiprocessing import reductions

from imagenet_cls.config.schema import AugmentConfig, ErasingConfig, EvalConfig
from imagenet_cls.data.image_set import Images, ImageSet, all_images
from imagenet_cls.data.loader import (
    TrainBatch,
    TrainLoader,
    WorkerOptions,
    eval_batches,
)
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.transforms import EvalTransform, TrainTransform
from imagenet_cls.errors import ResourceError

pytestmark = pytest.mark.timeout(200)  # a worker that is not ended hangs

# In a process of its own, whose end is tested, too.
SCRIPT = """
import multiprocessing, os, signal, sys, tempfile, time
from pathlib import Path
from imagenet_cls.data.loader import init_worker
from imagenet_cls.errors import ResourceError
from test_data_workers import numbers, first_batch

def late_worker():
    while os.getppid() == parent:
        time.sleep(0.01)
    init_worker(0)
    print("an orphan is alive", flush=True)

if os.fork() == 0:  # a process that ends before its worker has started
    parent = os.getpid()
    multiprocessing.get_context("fork").Process(target=late_worker, daemon=True).start()
    os._exit(0)

killed, epoch = first_batch(numbers())
try:
    for worker in multiprocessing.active_children():
        worker.kill()
    list(epoch)
except ResourceError as error:
    print("killed:", error, flush=True)
killed.close()

loader, _ = first_batch(numbers())
# A worker holds this lock now and then, and torch needs it to end the worker.
loader._batches.gi_frame.f_locals["iterator"]._workers_done_event._cond.acquire()
for worker in multiprocessing.active_children():
    worker.kill()
    worker.join()
loader.close()
print("closed", flush=True)

pipe = Path(tempfile.mkdtemp()) / "pipe"
os.mkfifo(pipe)
hung, epoch = first_batch(numbers(pipe.read_bytes))  # one worker will hang at exit
print("workers", *(worker.pid for worker in multiprocessing.active_children()), flush=True)
raise ValueError("a bug")
"""


class Numbers(Images):
    """16 images of 8 px. act: called when an image with an index in `at` is read."""

    classes = ("a", "b")

    def __init__(self, act: Callable[[], object] | None = None, at: Collection[int] = (9,)):
        self.act = act
        self.at = at

    def __len__(self) -> int:
        return 16

    def load(self, index: int) -> tuple[torch.Tensor, int]:
        if self.act is not None and index in self.at:
            self.act()
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index % 2

    def name(self, index: int) -> str:
        return str(index)

    def digest(self) -> str:
        return ""


def numbers(act: Callable[[], object] | None = None, at: Collection[int] = (9,)) -> ImageSet:
    return all_images(Numbers(act, at), None)


@pytest.fixture
def hang(tmp_path: Path) -> Callable[[], object]:
    """Blocks: nothing writes to this pipe."""
    os.mkfifo(tmp_path / "pipe")
    return (tmp_path / "pipe").read_bytes


def build_loader(images: ImageSet, timeout_sec: float, pin_memory: bool = False) -> TrainLoader:
    transform, sampler = TrainTransform(AugmentConfig(size_px=8)), EpochSampler(16, 4, 0, 1, seed=1)
    options = WorkerOptions(2, pin_memory=pin_memory, timeout_sec=timeout_sec)
    return TrainLoader(images, transform, sampler, 1, options)


def first_batch(
    images: ImageSet, timeout_sec: float = 60.0, pin_memory: bool = False
) -> tuple[TrainLoader, Iterator[object]]:
    """A loader with two workers, and its first epoch after the first batch."""
    loader = build_loader(images, timeout_sec, pin_memory)
    epoch = loader.epoch(0)
    next(epoch)
    return loader, epoch


def test_workers_of_a_process_with_killed_and_hung_workers_all_end(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
    env = environment(PYTHONPATH=path, TMPDIR=str(tmp_path))
    # Returns when no process has its output open.
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 1 and ended.stderr.endswith("ValueError: a bug\n"), ended.stderr
    assert "killed: Data worker " in ended.stdout and "data.num_workers" in ended.stdout
    assert "closed" in ended.stdout and "an orphan is alive" not in ended.stdout
    pids = ended.stdout.splitlines()[-1].split()[1:]
    assert len(pids) == 2 and not any(Path("/proc", pid).exists() for pid in pids)
    assert not list(tmp_path.glob("pymp-*")), "folders of the workers' sockets"


def test_epoch_with_workers_stopped_before_they_send_a_batch_raises(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All batches of the epoch are announced; torch's timeout does not apply to receiving them."""
    _, epoch = first_batch(numbers(), timeout_sec=6.0)
    workers = multiprocessing.active_children()
    time.sleep(0.5)  # the workers have announced the other batches
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
        # Until all threads have stopped, the one that sends batches may continue.
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
    with pytest.raises(ResourceError, match="returned no batch for 6 s"):
        list(epoch)
    # They have ended. `is_alive` is true for a moment if the thread that awaits the batch has just
    # taken their exit code.
    wait_for(lambda: not any(worker.is_alive() for worker in workers), "the workers to end")
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch start the thread that pins memory, also without an accelerator. Nothing is
    pinned.
    """
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_, **__: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)


def test_close_ends_idle_workers_and_the_thread_that_pins_memory(
    pinning: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch ends them in an order in which none finds the connections of another closed."""
    threads = set(threading.enumerate())  # an earlier test's threads may end meanwhile
    loader, _ = first_batch(numbers(), pin_memory=True)
    workers = multiprocessing.active_children()
    loader.close()
    assert [worker.exitcode for worker in workers] == [0, 0]
    wait_for(lambda: threads.issuperset(threading.enumerate()), "the end of the threads")
    assert capfd.readouterr() == ("", "")


def evaluated(images: Images, options: WorkerOptions) -> Iterator[object]:
    """The batches of an evaluation after the first one."""
    transform = EvalTransform(EvalConfig(crop_px=8, resize_px=8))
    batches = eval_batches(images, transform, range(16), 4, options)
    next(batches)
    return batches


def workers_by_number() -> list[multiprocessing.process.BaseProcess]:
    return sorted(multiprocessing.active_children(), key=lambda worker: worker.pid or 0)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_worker_that_dies_between_two_batches_is_named_at_its_next_batch(
    pinning: None, hang: Callable[[], object], pin_memory: bool
) -> None:
    """torch's SIGCHLD handler would raise here, in `join`. Worker 1 has batch 1, with image 4."""
    options = WorkerOptions(2, pin_memory=pin_memory, timeout_sec=60.0)
    batches = evaluated(numbers(hang, [4]), options)
    first, second = workers_by_number()
    second.kill()
    second.join()
    with pytest.raises(ResourceError, match=rf"^Data worker 1 \(process {second.pid}\) was killed"):
        list(batches)
    assert not first.is_alive()


def test_worker_that_hangs_is_named(hang: Callable[[], object]) -> None:
    """Without shuffling, batch 3 of four images each has image 12."""
    batches = evaluated(numbers(hang, [12]), WorkerOptions(2, timeout_sec=2.0))
    workers = workers_by_number()
    message = rf"^Data worker 1 \(process {workers[1].pid}\) returned"
    with pytest.raises(ResourceError, match=message):
        list(batches)
    assert not any(worker.is_alive() for worker in workers)


def test_memory_of_batches_is_received_once_and_batches_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers with two batches ahead have three buffers each. The batches are copies."""
    received = Mock(wraps=reductions.rebuild_storage_fd)
    counted = functools.wraps(reductions.rebuild_storage_fd)(lambda *args: received(*args))
    monkeypatch.setattr(reductions, "rebuild_storage_fd", counted)
    transform = TrainTransform(AugmentConfig(size_px=8, erasing=ErasingConfig(prob=0.5)))
    sampler = EpochSampler(16, 4, 0, 1, seed=1)

    def batches(num_workers: int) -> list[TrainBatch]:
        options = WorkerOptions(num_workers)
        loader = TrainLoader(numbers(), transform, sampler, 1, options, num_epochs=8)
        found = [batch for epoch in range(8) for batch in loader.epoch(epoch)]
        loader.close()
        return found

    ours = batches(2)
    assert received.call_count == 6 and len(ours) == 32
    assert same(ours, batches(0))
    assert ours[0].images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("end", "named"), [(sys.exit, "SystemExit: 3"), (os._exit, "exit code 3")])
def test_worker_that_a_dataset_ends_is_named(end: Callable[[int], object], named: str) -> None:
    loader = build_loader(numbers(functools.partial(end, 3)), timeout_sec=60.0)
    with pytest.raises(ResourceError, match=named):
        list(loader.epoch(0))
