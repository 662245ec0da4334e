"""Data workers as processes: they end when they should, and never outlive or hold up the process that they work for.

Owns how they begin and how they are ended. torch asks them to end and waits; it has no public call for it, and what it
does otherwise relies on SIGTERM, which ours ignore. Refuses to know what a batch is. Called by `loader`.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from imagenet_cls.parallel.launch import signal_when_parent_dies

# Workers that are forked share the index's memory and begin at once; others import torch anew, seconds each, and need
# every data set to be picklable. On macOS forked processes crash in system libraries, and Windows has no fork.
START_METHOD = "fork" if sys.platform == "linux" else None

# How long workers may take to end when they are asked to. They have nothing to save.
_PATIENCE_SEC = 2.0

_loaders: "weakref.WeakSet[DataLoader[Any]]" = weakref.WeakSet()


def begin(worker_id: int) -> None:
    """A worker's own first act: leave stopping to the main process, but end with it, however it ends.

    The main process may need batches until it has saved, and launchers signal whole groups. As its fork, a worker holds
    its sockets and its output: others would wait for a process that is gone.
    """
    parent = multiprocessing.parent_process()
    if signal_when_parent_dies(signal.SIGKILL) and parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it was gone before the kernel knew of our wish
    for name in ("SIGTERM", "SIGINT", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)


def end_at_exit(loader: DataLoader[Any]) -> None:
    """Whatever still works for this loader when this process exits is killed. `multiprocessing` would send SIGTERM and
    wait forever.
    """
    _loaders.add(loader)


def awaited(loader: DataLoader[Any]) -> int:
    """The worker that the next batch is to come from; any, where an epoch was left half way for a new one."""
    iterator: Any = loader._iterator
    return iterator._task_info.get(iterator._rcvd_idx, (0,))[0]


def process_id(loader: DataLoader[Any], worker_id: int) -> int | None:
    iterator: Any = loader._iterator
    return iterator._workers[worker_id].pid


def stop(loader: DataLoader[Any], kill: bool = False) -> None:
    """End the loader's workers, by asking, or with `kill` at once. Returns when none is left, after seconds at most."""
    iterator: Any = loader._iterator
    loader._iterator = None
    if iterator is None or loader.num_workers == 0:
        return
    workers = iterator._workers
    signal_handling._remove_worker_pids(id(iterator))  # or torch would raise because they are killed
    iterator._worker_pids_set = False
    # One that was killed may have taken a lock along that asking needs, and then that would never end.
    if not kill and all(worker.is_alive() for worker in workers):
        patience = threading.Timer(_PATIENCE_SEC, _kill, [workers])
        patience.start()
        iterator._shutdown_workers()
        patience.cancel()
    iterator._shutdown = True
    if loader.pin_memory and hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()
    _kill(workers)
    for worker in workers:
        worker.join(_PATIENCE_SEC)


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        worker.kill()  # nothing where it has been seen to be dead


@atexit.register
def _stop_all() -> None:
    """Called before `multiprocessing`'s own handler, since that is older."""
    for loader in list(_loaders):
        stop(loader, kill=True)
