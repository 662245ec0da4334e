"""Worker processes of a DataLoader: how they start and end, and the errors for workers that fail."""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from imagenet_cls.errors import ResourceError
from imagenet_cls.parallel.exit import set_parent_death_signal

# Forked workers share the index's memory and start at once. Other start methods import torch again, for seconds, and
# require picklable data sets. On macOS forked processes crash in system libraries.
START_METHOD = "fork" if sys.platform == "linux" else None

SHARED_MEMORY = Path("/dev/shm")

# How much later than torch's own timeout, whose error names the worker, `time_limit` expires.
_GRACE_SEC = 1.0
_JOIN_SEC = 2.0

_USE_FEWER = "use fewer data.num_workers or data.prefetch_batches"
_OUT_OF_MEMORY = ("No space left on device", "Cannot allocate memory", "shared memory", "DefaultCPUAllocator")


def start_worker(worker_id: int) -> None:
    """A DataLoader's `worker_init_fn`: end with the parent process, and leave SIGTERM, SIGINT and SIGUSR2 to it.

    The parent may need batches until it has saved a checkpoint, and launchers signal whole process groups. A worker
    that outlives its parent would keep the parent's sockets and output open.
    """
    parent = multiprocessing.parent_process()
    if set_parent_death_signal(signal.SIGKILL) and parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent died before the kernel was asked
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def kill_workers_at_exit() -> None:
    """Kill all workers when this process exits. Call it after a loader's workers have started.

    torch and multiprocessing ask workers to end, or send SIGTERM, and wait. Exit handlers run in reverse order: ours is
    moved to the end of the list, to run before theirs.
    """
    atexit.unregister(_kill_all)
    atexit.register(_kill_all)


def _kill_all() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for workers that are killed
    for child in multiprocessing.active_children():
        if child.daemon:  # as workers are
            child.kill()


def stop_workers(loader: DataLoader[Any]) -> None:
    """Kill the loader's workers, which have nothing to save, and wait until they are gone, for seconds at most.

    torch would ask them to end, and wait for each one that hangs.
    """
    iterator: Any = loader._iterator
    loader._iterator = None
    if iterator is None:
        return
    if iterator._worker_pids_set:  # otherwise torch's SIGCHLD handler would raise, wherever this process is
        iterator._worker_pids_set = False
        signal_handling._remove_worker_pids(id(iterator))
    iterator._shutdown = True
    if loader.pin_memory and hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()
    _kill(iterator._workers)
    for worker in iterator._workers:
        worker.join(_JOIN_SEC)


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        worker.kill()


@contextmanager
def time_limit(loader: DataLoader[Any]) -> Iterator[threading.Event]:
    """Kill the loader's workers if the block, which waits for a batch, takes longer than the loader's timeout.

    Yields an event that is set before the kill. torch's own timeout ends when a worker announces a batch; the batch is
    then received from a socket of the worker without a timeout, and a stopped worker would block the loader forever.
    """
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        if loader._iterator is not None:
            _kill(loader._iterator._workers)  # type: ignore[attr-defined]

    timer = threading.Timer(loader.timeout + _GRACE_SEC, expire)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


def awaited_worker(loader: DataLoader[Any]) -> tuple[int, int | None]:
    """Number and process id of the worker that makes the next batch."""
    iterator: Any = loader._iterator
    worker_id = iterator._task_info.get(iterator._rcvd_idx, (0,))[0]
    return worker_id, iterator._workers[worker_id].pid


def worker_death(error: RuntimeError) -> ResourceError | None:
    """The error for a worker that was killed, where `error` is torch's report of it; None for any other error.

    torch raises it from a signal handler: mostly while the main process waits for a batch, else within a training step.
    """
    return worker_killed(str(error).splitlines()[0]) if "DataLoader worker" in str(error) else None


def worker_killed(reason: str) -> ResourceError:
    """The error for a worker that ended without a report."""
    return ResourceError(
        f"a data worker of process {os.getpid()} was killed: {reason}\n"
        f"most often memory or /dev/shm ran out: {_USE_FEWER}"
    )


def worker_hung(worker_id: int, pid: int | None, timeout_sec: float, image: str) -> ResourceError:
    """The error for a worker that returned no batch in time. image: the last one that it started to read."""
    return ResourceError(
        f"data worker {worker_id} (process {pid}) returned no batch for {timeout_sec:g} s (data.timeout_sec); "
        f"it was reading {image}\nmost often a disk or network hangs: check that file, and continue with --resume"
    )


def worker_raised(error: Exception, worker_id: int, image: str) -> ResourceError:
    """The error for a worker whose data set raised `error`. The traceback is a note, which survives pickling."""
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    memory = isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
    reported = ResourceError(
        f"data worker {worker_id} (process {os.getpid()}) raised {type(error).__name__} at {image}: {reason}\n"
        + (f"memory or /dev/shm ran out: {_USE_FEWER}" if memory else "the traceback is in the log; or use --traceback")
    )
    reported.add_note("".join(traceback.format_exception(error)))
    return reported


def check_shared_memory(held: Sequence[tuple[int, int]], local_ranks: int, where: Path = SHARED_MEMORY) -> None:
    """Raise ResourceError where the workers of all ranks of this machine need more shared memory than is free.

    held: for each loader of a rank, the most images (uint8, RGB) that its workers hold ready, and their side in pixels.
    The loaders add up: training workers keep their batches during an evaluation. Containers often have 64 MiB, and a
    worker that finds it full is killed within the run.
    """
    if not where.is_dir():  # not Linux
        return
    needed = local_ranks * sum(images * 3 * side_px**2 for images, side_px in held)
    free = shutil.disk_usage(where).free
    if needed > free:
        raise ResourceError(
            f"{where} has {free / 2**20:,.0f} MiB free, and the batches that data workers hold ready need "
            f"{needed / 2**20:,.0f} MiB\n{_USE_FEWER}, or enlarge it (docker run --shm-size={(needed >> 20) + 1}m)"
        )
