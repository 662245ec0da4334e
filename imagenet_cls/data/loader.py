"""Batches of training and evaluation images: uint8, on the CPU.

Their bits are the same for any number of worker processes.
"""

import atexit
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, get_worker_info

from imagenet_cls.config.schema import Size, height_width
from imagenet_cls.data.image_set import ImageSet, stack_targets
from imagenet_cls.data.samplers import EpochSampler, MicroBatchSampler, SampleKey
from imagenet_cls.data.transforms import EvalTransform, TrainTransform, size_px_at
from imagenet_cls.errors import ResourceError, UserError
from imagenet_cls.parallel.signals import STOP_SIGNALS, set_parent_death_signal
from imagenet_cls.seeding import hash_key, preserve_rng_state, seed_generators
from imagenet_cls.text import first_line

# Forked workers share the index's memory and start at once. Other start methods import torch again,
# for seconds, and require picklable datasets. On macOS forked processes crash in system libraries.
START_METHOD = "fork" if sys.platform == "linux" else None

PREFETCH_BATCHES = 2  # that each worker prepares ahead
_JOIN_SEC = 2.0
_USE_FEWER = "use fewer data.num_workers"
# Iterators of DataLoaders whose workers were killed. torch's clean-up, which runs when an iterator
# is deleted, could wait forever for a lock that a killed worker held.
_failed_iterators: list[Any] = []
# By process id of a worker and number: memory that was received, see `_BatchDataset`.
_received: defaultdict[int, dict[int, torch.Tensor]] = defaultdict(dict)
# The workers of each iterator that have not been ended.
_open_workers: list[list[BaseProcess]] = []


class TrainBatch(NamedTuple):
    """B samples in S splits each (`augment.splits`), ordered by split: `images.split(B)` are the
    splits, as in timm's AugMix.

    images: uint8 (B * S, C, H, W), channels-last. targets: see `data.targets`. boxes and keys are
    set only with random erasing, on the CPU. boxes: int32 (B * S, n, 4), each of top, left, height
    and width; unused ones are zeros. keys: int64 (B * S,), the random keys of the fill colors.
    """

    images: torch.Tensor
    targets: torch.Tensor
    boxes: torch.Tensor | None = None
    keys: torch.Tensor | None = None


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a loader's worker processes, which don't change its batches.

    num_workers: if 0, samples are made in this process; the states of its default generators are
    restored afterwards. pin_memory: copy
    batches into page-locked memory, for asynchronous transfers to a GPU. timeout_sec: the longest
    wait for a batch.
    """

    num_workers: int = 0
    pin_memory: bool = False
    timeout_sec: float = 300.0


class TrainLoader:
    """The micro-batches of this rank in training, made by worker processes that live until `close`.

    They read ahead into the next epoch, so that its first batches are made during the evaluation.
    """

    def __init__(
        self,
        source: ImageSet,
        transform: TrainTransform,
        sampler: EpochSampler,
        seed: int,
        options: WorkerOptions,
        num_epochs: int = 0,
    ):
        """num_epochs: number of epochs of the run, after which nothing is read ahead. 0: never read
        ahead.
        """
        self.sampler = sampler
        self.timeout_sec = options.timeout_sec
        self.num_epochs = num_epochs
        make_batch = partial(_train_batch, source, transform, seed)
        self.loader = _data_loader(make_batch, MicroBatchSampler(sampler, num_epochs), options)
        self._batches: Generator[Any] | None = None
        # number of its next batch, counted from the start of the run; -1: it has none
        self._next_batch = -1

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[TrainBatch]:
        """Batches from `start_step` on, in order. An unfinished iterator is invalid after the next
        call or `close`.

        Raises DataError for an image that cannot be read, and ResourceError for a worker that was
        killed, raised anything else, or took longer than the timeout.
        """
        steps = self.sampler.steps_per_epoch
        batches_per_step = len(self.sampler.micro_batch_sizes)
        first = (epoch * steps + start_step) * batches_per_step
        end = (epoch + 1) * steps * batches_per_step
        # otherwise the workers have read ahead
        if self._next_batch != first or epoch >= self.num_epochs:
            self.close()
            self.sampler.set_epoch(epoch, start_step)
            self._batches = _iterate_batches(self.loader, self.timeout_sec)
        assert self._batches is not None
        for number in range(first, end):
            self._next_batch = -1  # in case of an error
            batch = next(self._batches)
            self._next_batch = number + 1
            yield TrainBatch(*batch)

    def close(self) -> None:
        """Stop the workers. May be called again; a later epoch starts new workers."""
        self._next_batch = -1
        if self._batches is not None:
            self._batches.close()


def eval_batches(
    source: ImageSet,
    transform: EvalTransform,
    indices: Sequence[int],
    batch_size: int,
    options: WorkerOptions,
    endless: bool = False,
) -> Generator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batches for evaluation: images uint8 (B, C, H, W), channels-last, targets (see
    `data.targets`), indices int64 (B,).

    Every image of `indices` once, in order; the last batch may be smaller. endless: again and
    again. The workers end with the iterator. Errors as in `TrainLoader.epoch`.
    """
    batches = BatchSampler(indices, batch_size, drop_last=False)
    repeated = itertools.cycle(batches) if endless else batches
    loader = _data_loader(partial(_eval_batch, source, transform), repeated, options)
    for batch in _iterate_batches(loader, options.timeout_sec):
        yield tuple(batch)  # a list if a worker has made it


def _train_batch(
    source: ImageSet, transform: TrainTransform, seed: int, samples: list[SampleKey]
) -> tuple[torch.Tensor, ...]:
    """The tensors of a micro-batch. Split s of S of sample (epoch, index, repeat) has the random
    key (seed, epoch, index, repeat * S + s).
    """
    augment = transform.augment
    num_images = len(samples) * transform.splits
    images = _empty_images(num_images, size_px_at(augment, samples[0][0]), transform.channels)
    boxes = torch.zeros(num_images, augment.erasing.max_count, 4, dtype=torch.int32)
    keys = [0] * num_images
    targets = []
    for number, (epoch, index, repeat) in enumerate(samples):
        first = repeat * transform.splits
        split_keys = [
            hash_key("sample", seed, epoch, index, first + split)
            for split in range(transform.splits)
        ]
        seed_generators(split_keys[0])
        image, crop, target = source.load_region(index, transform.draw_crop)
        targets.append(target)
        for split, (pixels, erase_boxes) in enumerate(transform(image, epoch, split_keys, crop)):
            row = split * len(samples) + number
            images[row] = pixels
            keys[row] = split_keys[split]
            if erase_boxes:
                boxes[row, : len(erase_boxes)] = torch.tensor(erase_boxes)
    if augment.erasing.prob == 0:
        return images, stack_targets(targets)
    return images, stack_targets(targets), boxes, torch.tensor(keys)


def _eval_batch(
    source: ImageSet, transform: EvalTransform, indices: list[int]
) -> tuple[torch.Tensor, ...]:
    images = _empty_images(len(indices), list(transform.crop), transform.channels)
    targets = []
    for row, index in enumerate(indices):
        seed_generators(hash_key("eval", index))  # a user's dataset may draw; the transform doesn't
        image, _, target = source.load_region(index, transform.needed_region)
        images[row] = transform(image)
        targets.append(target)
    return images, stack_targets(targets), torch.tensor(indices)


def _empty_images(num_images: int, size_px: Size, channels: int) -> torch.Tensor:
    """uint8 (num_images, channels, height, width), channels-last; in a worker in shared memory."""
    shape = num_images, *height_width(size_px), channels
    worker: Any = get_worker_info()
    allocate = _empty_bytes if worker is None else worker.dataset.allocate
    return allocate(math.prod(shape))[: math.prod(shape)].view(shape).permute(0, 3, 1, 2)


def _empty_bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _tensors_in(memory: torch.Tensor, layouts: list[Any]) -> list[torch.Tensor]:
    """Views of `memory`. layouts: dtype, offset in elements, shape and strides of each."""
    storage = memory.untyped_storage()
    return [torch.empty(0, dtype=dtype).set_(storage, *layout) for dtype, *layout in layouts]


@dataclass
class _SentBatch:
    """A batch of worker `pid`. memory: see `_BatchDataset`; None if it was sent before."""

    pid: int
    number: int
    memory: torch.Tensor | None
    layouts: list[Any]

    def copy(self, copy_memory: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        if self.memory is not None:
            _received[self.pid][self.number] = self.memory
        return _tensors_in(copy_memory(_received[self.pid][self.number]), self.layouts)

    def pin_memory(self) -> list[torch.Tensor]:
        """A copy in page-locked memory. torch's DataLoader calls this."""
        return self.copy(torch.Tensor.pin_memory)


@dataclass
class _BatchDataset(Dataset[Any]):
    """The dataset of a DataLoader, whose items are whole batches.

    A worker copies all tensors of a batch into one shared tensor, because torch opens a connection
    for each tensor that it sends. It uses `num_memories` of them in turn: one for each batch that
    it prepares ahead, and one for the batch that is being received. Each is sent once.
    """

    make_batch: Callable[[list[Any]], tuple[torch.Tensor, ...]]
    num_memories: int
    memories: dict[int, torch.Tensor] = field(default_factory=dict)
    number: int = 0  # of the memory that is used

    def __getitem__(self, keys: list[Any]) -> Any:
        """The batch for these keys. A worker returns an error, since torch would wrap one that is
        raised.
        """
        worker = get_worker_info()
        if worker is None:
            with preserve_rng_state():
                return self.make_batch(keys)
        self.number = (self.number + 1) % self.num_memories
        last = self.memories.get(self.number)
        try:
            layouts = self._pack(self.make_batch(keys))
        except UserError as error:
            return error
        except BaseException as error:  # also sys.exit
            return worker_exception_error(error, worker.id)
        memory = self.memories[self.number]
        return _SentBatch(os.getpid(), self.number, None if memory is last else memory, layouts)

    def allocate(self, size: int) -> torch.Tensor:
        """Memory for the current batch: uint8, of at least `size` bytes, in shared memory.

        Otherwise a thread of the worker would copy the batch there when it sends it, where an error
        is only printed and the batch is lost.
        """
        if len(self.memories.get(self.number, ())) < size:
            # with room for what follows the images, so that it need not grow at once
            memory = _empty_bytes(size + size // 64 + 4096)
            self.memories[self.number] = memory.share_memory_()
        return self.memories[self.number]

    def _pack(self, tensors: tuple[torch.Tensor, ...]) -> list[Any]:
        """Copy tensors into the memory unless they are there. Returns their layouts."""
        layouts = []
        end = 0
        for tensor in tensors:
            layouts.append((tensor.dtype, end // tensor.itemsize, tensor.shape, tensor.stride()))
            end += tensor.nbytes + -tensor.nbytes % 8  # padded to the size of the largest elements
        places = _tensors_in(self.allocate(end), layouts)
        for tensor, place in zip(tensors, places, strict=True):
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)
        return layouts


def _data_loader(
    make_batch: Callable[[list[Any]], tuple[Any, ...]],
    batches: Iterable[list[Any]],
    options: WorkerOptions,
) -> DataLoader[Any]:
    has_workers = options.num_workers > 0
    return DataLoader(
        _BatchDataset(make_batch, PREFETCH_BATCHES + 1),
        batch_size=None,  # an item of the dataset is a batch
        sampler=batches,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        worker_init_fn=init_worker,
        multiprocessing_context=START_METHOD if has_workers else None,
        # otherwise each epoch draws a number from torch's default generator
        generator=torch.Generator(),
        prefetch_factor=PREFETCH_BATCHES if has_workers else None,
    )


def _iterate_batches(loader: DataLoader[Any], timeout_sec: float) -> Generator[Any]:
    """The loader's batches. Its workers end with the iterator, also if that is closed.

    Raises the errors that `_BatchDataset` returns, and ResourceError for workers that fail.

    Each batch is fetched in a helper thread, on which this thread waits with the timeout. torch's
    own timeout is not enough: it covers only the wait until a worker announces a batch. The first
    batches then come through a socket, and a worker that is stopped there would block the loader.
    """
    if loader.num_workers == 0:
        yield from loader
        return
    iterator, workers = _start_workers(loader)
    executor = ThreadPoolExecutor(max_workers=1)
    future = Future[Any]()  # the fetch of a batch
    try:
        for number in itertools.count():
            future = executor.submit(next, iterator, None)
            try:
                error = future.exception(timeout_sec)
            except TimeoutError:
                # torch's DataLoader gives the batches to the workers in turn
                awaited = _describe_worker(workers, number % len(workers))
                raise ResourceError(
                    f"{awaited} returned no batch for {timeout_sec:g} s (data.timeout_sec).",
                    "Most often a disk or network hangs: check it, and continue with --resume.",
                ) from None
            if error is not None:
                _check_alive(workers)
                raise error
            batch = future.result()
            if batch is None:
                return
            if isinstance(batch, UserError):
                raise batch
            yield batch.copy(torch.clone) if isinstance(batch, _SentBatch) else batch
    finally:
        # `_kill_workers` has removed the workers if Python exits, and its modules may be gone.
        if workers:
            # Wait for the thread unless it may hang: it may still refer to the iterator.
            has_arrived = future.done() and future.exception() is None
            executor.shutdown(wait=has_arrived)
            if not has_arrived or any(worker.exitcode for worker in workers):
                _failed_iterators.append(iterator)
            # Else torch ends the workers here, when the last reference to their iterator goes. It
            # waits five seconds for each one that hangs.
            del iterator
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join(_JOIN_SEC)
                _received.pop(worker.pid or 0, None)
            _open_workers.remove(workers)


def _start_workers(loader: DataLoader[Any]) -> tuple[Iterator[Any], list[BaseProcess]]:
    """An iterator over the loader's batches, and its worker processes in order of their numbers."""
    # This makes the folder of the workers' sockets, which this process removes. A worker that makes
    # its own leaves it behind when it is killed.
    get_temp_dir()
    others = set(multiprocessing.active_children())
    handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL  # None: not set by Python
    iterator = iter(loader)
    if threading.current_thread() is threading.main_thread():
        # torch's handler would raise wherever this process is when a worker dies. Without it torch
        # notices a dead worker within five seconds of waiting for it.
        signal.signal(signal.SIGCHLD, handler)
    started = set(multiprocessing.active_children()) - others
    # Names end with a number that counts up, as in ForkProcess-3. Process ids may start over.
    workers = sorted(started, key=lambda worker: int(re.split("[-:]", worker.name)[-1]))
    _open_workers.append(workers)
    if len(started) < loader.num_workers:
        _failed_iterators.append(iterator)
        raise ResourceError(
            f"{loader.num_workers - len(started)} data workers were killed when they started.",
            f"Most often memory or /dev/shm ran out: {_USE_FEWER}.",
        )
    return iterator, workers


def _describe_worker(workers: list[BaseProcess], number: int) -> str:
    return f"Data worker {number} (process {workers[number].pid})"


def _check_alive(workers: list[BaseProcess]) -> None:
    """Raise ResourceError if a worker has died, or dies within seconds: its connections close
    first.
    """
    ending = multiprocessing.connection.wait([worker.sentinel for worker in workers], _JOIN_SEC)
    for number, worker in enumerate(workers):
        if worker.sentinel in ending:
            worker.join(_JOIN_SEC)  # the kernel closes the sentinel before the process has ended
        if not worker.is_alive():
            raise ResourceError(
                f"{_describe_worker(workers, number)} was killed (exit code {worker.exitcode}).",
                f"Most often memory or /dev/shm ran out: {_USE_FEWER}, or give a container more "
                "(docker run --shm-size=8g). If the exit code is not negative, look for os._exit "
                "in the dataset or in a library that it uses.",
            )


def init_worker(worker_id: int) -> None:
    """A DataLoader's `worker_init_fn`: end with the parent process, and leave `STOP_SIGNALS` to it.

    Launchers signal whole process groups, and the parent may need batches until it has saved a
    checkpoint. A worker that outlives its parent would keep the parent's sockets and output open.
    """
    parent = multiprocessing.parent_process()
    is_set = set_parent_death_signal(signal.SIGKILL)
    if is_set and parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent died before the kernel was asked
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _received.clear()  # otherwise the memory would be kept by this process, too


# Exit handlers run in reverse order: this one runs before the handlers of torch and
# multiprocessing, which wait for the workers.
@atexit.register
def _kill_workers() -> None:
    """Kill the workers of loaders that were not closed."""
    for workers in _open_workers:
        for worker in workers:
            worker.kill()
        workers.clear()


def worker_exception_error(error: BaseException, worker_id: int) -> ResourceError:
    """The error for a worker whose dataset raised `error`. The traceback is a note, which survives
    pickling.
    """
    reported = ResourceError(
        f"Data worker {worker_id} (process {os.getpid()}) raised {type(error).__name__}: "
        f"{first_line(error)[:200]}",
        "See the traceback in the log, or repeat with --traceback. If memory or /dev/shm ran out, "
        f"{_USE_FEWER}.",
    )
    reported.add_note("".join(traceback.format_exception(error)))
    return reported
