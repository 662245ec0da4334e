"""Batches of training and evaluation images: uint8, on the CPU, the same bits for any number of worker processes."""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, get_worker_info
from torch.utils.data._utils import signal_handling

from imagenet_cls.config.schema import Size, height_width
from imagenet_cls.data.samplers import EpochSampler, MicroBatchSampler, SampleKey
from imagenet_cls.data.sources import ImageSource
from imagenet_cls.data.transforms import EvalTransform, TrainTransform, size_px_at
from imagenet_cls.errors import ResourceError, UserError, first_line
from imagenet_cls.parallel.exit import STOP_SIGNALS, set_parent_death_signal
from imagenet_cls.seeding import hash_key, preserve_rng_state, seed_generators

# Forked workers share the index's memory and start at once. Other start methods import torch again, for seconds, and
# require picklable datasets. On macOS forked processes crash in system libraries.
START_METHOD = "fork" if sys.platform == "linux" else None

SHARED_MEMORY = Path("/dev/shm")

_MAX_TEMP_DIR_BYTES = 107 - len("/listener-12345678")  # of an AF_UNIX socket's path
_JOIN_SEC = 2.0
_USE_FEWER = "use fewer data.num_workers or data.prefetch_batches"
_OUT_OF_MEMORY = (
    "No space left on device",
    "Cannot allocate memory",
    "shared memory",
    "DefaultCPUAllocator",
)


class TrainBatch(NamedTuple):
    """B images in V views each (`augment.splits`), view-major: `images.split(B)` are the views, as in timm's AugMix.

    images: uint8 (B * V, C, H, W), channels-last. targets: int64 (B,). With random erasing, on the CPU: boxes, int32
    (B * V, n, 4) of top, left, height, width, zeros where none; and keys, int64 (B * V,), of the fill colors.
    """

    images: torch.Tensor
    targets: torch.Tensor
    boxes: torch.Tensor | None = None
    keys: torch.Tensor | None = None


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a loader's worker processes, which don't change its batches.

    num_workers: 0 makes samples in this process, whose default generators keep their states. prefetch_batches: batches
    that each worker prepares ahead. timeout_sec: the longest wait for a batch.
    """

    num_workers: int = 0
    prefetch_batches: int = 2
    pin_memory: bool = False
    timeout_sec: float = 300.0


class TrainLoader:
    """The micro-batches of this rank in training, made by worker processes that live until `close`.

    They read ahead into the next epoch, so that its first batches are made during the evaluation.
    """

    def __init__(
        self,
        source: ImageSource,
        transform: TrainTransform,
        sampler: EpochSampler,
        seed: int,
        options: WorkerOptions,
        num_epochs: int = 0,
    ):
        """num_epochs: number of epochs of the run, after which nothing is read ahead. 0: never read ahead."""
        self.sampler = sampler
        self.timeout_sec = options.timeout_sec
        self.num_epochs = num_epochs
        make_batch = partial(_train_batch, source, transform, seed)
        self.loader = _data_loader(make_batch, MicroBatchSampler(sampler, num_epochs), options)
        self._iterator: Iterator[Any] = iter(())
        self._next = (
            -1
        )  # number of its next batch, counted from the start of the run; -1: it has none

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[TrainBatch]:
        """Batches from `start_step` on, in order. An unfinished iterator is invalid after the next call or `close`.

        Raises DataError for an image that cannot be read, and ResourceError for a worker that was killed, raised
        anything else, or took longer than the timeout.
        """
        steps, per_step = self.sampler.steps_per_epoch, len(self.sampler.micro_batch_sizes)
        first, end = per_step * (epoch * steps + start_step), per_step * (epoch + 1) * steps
        if self._next != first or epoch >= self.num_epochs:  # otherwise the workers have read ahead
            self.sampler.set_epoch(epoch, start_step)
            self._iterator = _batches(self.loader, self.timeout_sec)
        for number in range(first, end):
            self._next = -1  # in case of an error
            batch = next(self._iterator)
            self._next = number + 1
            yield TrainBatch(*batch)

    def close(self) -> None:
        """Stop the workers. May be called again; a later epoch starts new workers."""
        self._next = -1
        _stop_workers(self.loader)


def eval_batches(
    source: ImageSource,
    transform: EvalTransform,
    indices: Sequence[int],
    batch_size: int,
    options: WorkerOptions,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batches for evaluation: images uint8 (B, C, H, W), channels-last, targets int64 (B,), indices int64 (B,).

    Every image of `indices` once, in order. The workers end with the iterator. Errors as in `TrainLoader.epoch`.
    """
    batches = BatchSampler(indices, batch_size, drop_last=False)
    loader = _data_loader(partial(_eval_batch, source, transform), batches, options)
    try:
        yield from _batches(loader, options.timeout_sec)
    finally:
        _stop_workers(loader)


def _train_batch(
    source: ImageSource, transform: TrainTransform, seed: int, samples: list[SampleKey]
) -> TrainBatch:
    """Split s of V of sample (epoch, index, view) is drawn from the key (seed, epoch, index, view * V + s)."""
    size, augment, targets = len(samples), transform.augment, []
    num_views = size * transform.splits
    images = _empty_images(num_views, size_px_at(augment, samples[0][0]), transform.channels)
    boxes, keys = (
        torch.zeros(num_views, augment.erasing.max_count, 4, dtype=torch.int32),
        [0] * num_views,
    )
    for row, (epoch, index, view) in enumerate(samples):
        numbers = range(view * transform.splits, (view + 1) * transform.splits)
        split_keys = [hash_key("sample", seed, epoch, index, number) for number in numbers]
        seed_generators(split_keys[0])
        image, crop, target = source.load_region(index, transform.draw_crop)
        targets.append(target)
        for split, (pixels, view_boxes) in enumerate(transform(image, epoch, split_keys, crop)):
            place = split * size + row
            images[place] = pixels
            keys[place] = split_keys[split]
            if view_boxes is not None:
                boxes[place] = view_boxes
    if augment.erasing.prob == 0:
        return TrainBatch(images, torch.tensor(targets))
    return TrainBatch(images, torch.tensor(targets), boxes, torch.tensor(keys))


def _eval_batch(
    source: ImageSource, transform: EvalTransform, indices: list[int]
) -> tuple[torch.Tensor, ...]:
    images, targets = _empty_images(len(indices), list(transform.crop), transform.channels), []
    for row, index in enumerate(indices):
        seed_generators(hash_key("eval", index))  # a user's dataset may draw; the transform doesn't
        image, _, target = source.load_region(index, transform.needed_region)
        images[row] = transform(image)
        targets.append(target)
    return images, torch.tensor(targets), torch.tensor(indices)


def _empty_images(num_images: int, size_px: Size, channels: int) -> torch.Tensor:
    """uint8 (num_images, channels, height, width), channels-last; in a worker in shared memory, as torch's batches."""
    height, width = height_width(size_px)
    size_bytes = num_images * height * width * channels
    if get_worker_info() is None:
        images = torch.empty(size_bytes, dtype=torch.uint8)
    else:
        images = torch.empty(0, dtype=torch.uint8).set_(
            torch.UntypedStorage._new_shared(size_bytes)
        )
    return images.view(num_images, height, width, channels).permute(0, 3, 1, 2)


@dataclass
class _BatchDataset(Dataset[Any]):
    """The dataset of a DataLoader, whose items are whole batches."""

    make_batch: Callable[[list[Any]], tuple[Any, ...]]

    def __getitem__(self, keys: list[Any]) -> Any:
        """The batch for these keys. An error is returned, since torch would wrap one that is raised."""
        worker = get_worker_info()
        with nullcontext() if worker is not None else preserve_rng_state():
            try:
                return self.make_batch(keys)
            except UserError as error:
                return error
            except Exception as error:
                if worker is None:
                    raise
                return worker_exception_error(error, worker.id)


def _data_loader(
    make_batch: Callable[[list[Any]], tuple[Any, ...]],
    batches: Sampler[list[Any]],
    options: WorkerOptions,
) -> DataLoader[Any]:
    has_workers = options.num_workers > 0
    return DataLoader(
        _BatchDataset(make_batch),
        batch_size=None,  # an item of the dataset is a batch
        sampler=batches,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        worker_init_fn=init_worker,
        multiprocessing_context=START_METHOD if has_workers else None,
        generator=torch.Generator(),  # otherwise each epoch draws a number from torch's default generator
        prefetch_factor=options.prefetch_batches if has_workers else None,
        persistent_workers=has_workers,
    )


def _batches(loader: DataLoader[Any], timeout_sec: float) -> Iterator[Any]:
    """The loader's batches. Raises the errors that `_BatchDataset` returns, and ResourceError for workers that fail."""
    iterator: Any = None
    if loader.num_workers > 0 and not _workers(loader):
        # Workers make sockets in the temporary folder of this process. With a path that is too long
        # for a socket they would fail later, with an error that does not say so.
        if len(os.fsencode(get_temp_dir())) > _MAX_TEMP_DIR_BYTES:
            raise ResourceError(
                f"{get_temp_dir()}: too long for sockets of data workers\nset TMPDIR to a shorter path"
            )
        iterator = iter(loader)  # starts them; the time limit is for batches
        # Keep torch's SIGCHLD handler from raising for these workers wherever this process is. Without it torch notices
        # a dead worker within five seconds of waiting for it.
        iterator._worker_pids_set = False
        signal_handling._remove_worker_pids(id(iterator))
        # Exit handlers run in reverse order: this one before those of torch and multiprocessing, which wait.
        atexit.unregister(_kill_workers)
        atexit.register(_kill_workers)
    while True:
        with _worker_errors(loader, timeout_sec) if loader.num_workers > 0 else nullcontext():
            if iterator is None:
                iterator = iter(loader)
            batch = next(iterator, None)
        if batch is None:
            return
        if isinstance(batch, UserError):
            raise batch
        yield tuple(batch)  # pinning makes a list of it


@contextmanager
def _worker_errors(loader: DataLoader[Any], timeout_sec: float) -> Iterator[None]:
    """Raise ResourceError where the block, which waits for a batch, takes too long or finds that a worker has died.

    torch's own timeout ends when a worker announces a batch, which is then received from a socket: a worker that is
    stopped in between would block the loader forever.
    """
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        for worker in _workers(loader):
            worker.kill()

    timer = threading.Timer(timeout_sec, expire)
    timer.daemon = True
    try:
        timer.start()
        yield
    except (OSError, EOFError, RuntimeError) as error:
        hung = _awaited_worker(loader) if expired.is_set() else None
        _stop_workers(loader)
        if hung is not None:
            what = f"{hung} returned no batch for {timeout_sec:g} s (data.timeout_sec)"
            remedy = "most often a disk or network hangs: check it, and continue with --resume"
            raise ResourceError(f"{what}\n{remedy}") from None
        # For a worker that was killed, torch raises a RuntimeError, or finds its connection closed.
        # The thread that pins memory ends then.
        texts = ("DataLoader worker", "Pin memory thread exited")
        was_killed = any(text in str(error) for text in texts)
        if not (was_killed or isinstance(error, ConnectionError | EOFError)):
            raise
        what = f"a data worker of process {os.getpid()} was killed: {first_line(error)}"
        raise ResourceError(
            f"{what}\nmost often memory or /dev/shm ran out: {_USE_FEWER}"
        ) from None
    finally:
        timer.cancel()


def _workers(loader: DataLoader[Any]) -> list[Any]:
    return [] if loader._iterator is None else loader._iterator._workers  # type: ignore[attr-defined]


def _awaited_worker(loader: DataLoader[Any]) -> str:
    """Number and process id of the worker that makes the next batch."""
    iterator: Any = loader._iterator
    worker_id = iterator._task_info.get(iterator._rcvd_idx, (0,))[0]
    return f"data worker {worker_id} (process {iterator._workers[worker_id].pid})"


def _stop_workers(loader: DataLoader[Any]) -> None:
    """Kill the loader's workers, and wait for seconds at most. torch would wait for each one that hangs."""
    iterator: Any = loader._iterator
    loader._iterator = None
    if iterator is None:
        return
    iterator._shutdown = True
    if hasattr(iterator, "_pin_memory_thread"):
        # Before the workers, or it prints a traceback when it finds their connections closed.
        iterator._pin_memory_thread_done_event.set()
        iterator._worker_result_queue.cancel_join_thread()
        iterator._worker_result_queue.put((None, None))  # wakes it up
        iterator._pin_memory_thread.join(_JOIN_SEC)
    for worker in iterator._workers:
        worker.kill()
    for worker in iterator._workers:
        worker.join(_JOIN_SEC)


def init_worker(worker_id: int) -> None:
    """A DataLoader's `worker_init_fn`: end with the parent process, and leave `STOP_SIGNALS` to it.

    Launchers signal whole process groups, and the parent may need batches until it has saved a checkpoint.
    """
    parent = multiprocessing.parent_process()
    if (
        set_parent_death_signal(signal.SIGKILL)
        and parent is not None
        and os.getppid() != parent.pid
    ):
        os._exit(1)  # the parent died before the kernel was asked
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _kill_workers() -> None:
    """Kill the workers of all loaders."""
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # torch's handler raises for workers that are killed
    for child in multiprocessing.active_children():
        if child.daemon:  # as workers are
            child.kill()


def worker_exception_error(error: Exception, worker_id: int) -> ResourceError:
    """The error for a worker whose dataset raised `error`. The traceback is a note, which survives pickling."""
    memory = isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
    reported = ResourceError(
        f"data worker {worker_id} (process {os.getpid()}) raised {type(error).__name__}: {first_line(error)[:200]}\n"
        + (
            f"memory or /dev/shm ran out: {_USE_FEWER}"
            if memory
            else "the traceback is in the log; or use --traceback"
        )
    )
    reported.add_note("".join(traceback.format_exception(error)))
    return reported


def check_shared_memory(held: Sequence[tuple[int, int]], local_ranks: int) -> None:
    """Raise ResourceError where the workers of all ranks of this machine need more shared memory than is free.

    held: for each loader of a rank, the most images that its workers hold ready, and the bytes of one. The loaders add
    up, since training workers keep their batches during an evaluation.
    """
    if not SHARED_MEMORY.is_dir():  # not Linux
        return
    needed = local_ranks * sum(images * image_bytes for images, image_bytes in held)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        raise ResourceError(
            f"{SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, and the batches that data workers hold ready need "
            f"{needed / 2**20:,.0f} MiB\n{_USE_FEWER}, or enlarge it (docker run --shm-size={(needed >> 20) + 1}m)"
        )
