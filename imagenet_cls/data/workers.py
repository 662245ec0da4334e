"""Data workers as processes: they end when they should, and never outlive or hold up the process that they work for.

Owns how they begin, how long one waits for them, and how they are ended. torch asks them to end and waits; it has no
public call for it, and what it does otherwise relies on SIGTERM, which ours ignore. Refuses to know what a batch is.
Called by `loader`.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from imagenet_cls.parallel.exit import signal_when_parent_dies

# Workers that are forked share the index's memory and begin at once; others import torch anew, seconds each, and need
# every data set to be picklable. On macOS forked processes crash in system libraries, and Windows has no fork.
START_METHOD = "fork" if sys.platform == "linux" else None

# How long workers may take to end when they are asked to. They have nothing to save.
_PATIENCE_SEC = 2.0

# How much longer than torch a `Watch` waits: torch's own clock names a silent worker first, wherever it runs.
_GRACE_SEC = 1.0

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


def is_stopped(pid: int | None) -> bool:
    """Whether a process stands still by a signal (SIGSTOP) or under a debugger; False where /proc can't tell."""
    return _state(pid) in ("T", "t")


def _state(pid: int | None) -> str | None:
    """The kernel's letter for what a process does; None where there is none, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def suspect(loader: DataLoader[Any]) -> int:
    """The worker to name where no batch comes: one that stands still, since it may hold up the others; else the one
    that is awaited."""
    return next((i for i in range(loader.num_workers) if is_stopped(process_id(loader, i))), awaited(loader))


class Watch:
    """Ends the workers of a loader whose next batch is awaited for too long, so that the wait ends with an error.

    torch's own limit is for a batch that nobody announces. One that is announced is fetched over a socket from the
    process that made it, without a limit: a worker that stands still between the two would hold its loader forever.
    A kill closes the socket. (What goes through the pipe is too short to be torn.) Time in which this process stood
    still itself is not waited: a clock of ticks counts.

    Of a worker that dies torch tells by an exception out of a signal handler, once. Where that comes at a moment in
    which Python swallows exceptions, as in a finalizer, nobody would hear before the limit: the signal is sent again.
    """

    def __init__(self, loader: DataLoader[Any], describe: Callable[[], Exception]):
        """describe: makes the error to raise; called before the workers are ended."""
        self.loader, self.describe = loader, describe
        self.error: Exception | None = None
        self._awaited: int | None = None  # the number of the batch that is waited for
        self._done = threading.Event()

    def __enter__(self) -> "Watch":
        if self.loader.num_workers > 0:
            threading.Thread(target=self._look, name="data worker watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def batches(self) -> Iterator[Any]:
        """The loader's batches, each waited for under watch."""
        self._awaited = 0
        for number, batch in enumerate(self.loader, 1):
            self._awaited = None
            yield batch
            self._awaited = number
        self._awaited = None

    def _look(self) -> None:
        limit_sec = self.loader.timeout + _GRACE_SEC
        tick_sec = min(1.0, limit_sec / 4)
        ticks, before = 0, None
        while not self._done.wait(tick_sec):
            iterator: Any = self.loader._iterator
            now = None if iterator is None else self._awaited
            ticks = ticks + 1 if now is not None and now == before else 0
            before = now
            if ticks > 1 and any(_state(worker.pid) in ("Z", "X", None) for worker in iterator._workers):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)
            if ticks * tick_sec >= limit_sec:
                self.error = self.describe()
                _kill(_disowned(iterator))
                return


def _disowned(iterator: Any) -> list[Any]:
    """The workers of a loader's iterator, of which torch forgets that they are its: else it would raise, wherever this
    program is, because they are killed."""
    if iterator._worker_pids_set:
        iterator._worker_pids_set = False
        signal_handling._remove_worker_pids(id(iterator))
    return iterator._workers


def stop(loader: DataLoader[Any], kill: bool = False) -> None:
    """End the loader's workers, by asking, or with `kill` at once. Returns when none is left, after seconds at most."""
    iterator: Any = loader._iterator
    loader._iterator = None
    if iterator is None or loader.num_workers == 0:
        return
    workers = _disowned(iterator)
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
