"""What a data worker's end means, in words: killed, silent, or raising.

Owns these messages, with the likely cause. Refuses broken images: those are errors of the data, not of a worker. Called
by `loader`, and by `engine` for what torch raises from a signal handler.
"""

import os
import traceback

from imagenet_cls.errors import ResourceError

# How torch's DataLoader says that it waited for a worker in vain.
TIMED_OUT = "DataLoader timed out"

_TOO_MUCH = "use fewer data.num_workers or data.prefetch_batches"
_OUT_OF_MEMORY = ("No space left on device", "Cannot allocate memory", "shared memory", "DefaultCPUAllocator")


def worker_death(error: RuntimeError) -> ResourceError | None:
    """What to tell a user where `error` says that a worker was killed; None where it says anything else.

    torch raises it from a signal handler, wherever the main process is: mostly while it waits for a batch, and
    then the loader has translated it already; else in the middle of a training step.
    """
    return worker_killed(str(error).splitlines()[0]) if "DataLoader worker" in str(error) else None


def worker_killed(reason: str) -> ResourceError:
    """A worker is gone, and could not say why."""
    return ResourceError(
        f"a data worker of process {os.getpid()} was killed: {reason}\n"
        f"most often memory or /dev/shm ran out: {_TOO_MUCH}"
    )


def worker_silent(
    worker_id: int, pid: int | None, timeout_sec: float, image: str, is_stopped: bool = False
) -> ResourceError:
    """A worker lives and gives nothing. image: where it is. is_stopped: it stands still by a signal."""
    cause = "most often a disk or network that hangs: see whether that file can be read, and go on with --resume"
    if is_stopped:
        cause = "somebody stopped that process (SIGSTOP, a debugger, a suspended job): go on with --resume"
    return ResourceError(
        f"data worker {worker_id} (process {pid}) gave no batch for {timeout_sec:g} s (data.timeout_sec); "
        f"it is at {image}\n{cause}"
    )


def worker_raised(error: Exception, worker_id: int, image: str) -> ResourceError:
    """Called in the worker, while `error` is handled. Its traceback becomes a note: notes travel between processes."""
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    memory = isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
    told = ResourceError(
        f"data worker {worker_id} (process {os.getpid()}) raised {type(error).__name__} at {image}: {reason}\n"
        + (f"memory or /dev/shm ran out: {_TOO_MUCH}" if memory else "its traceback is in the log; or use --traceback")
    )
    told.add_note("".join(traceback.format_exception(error)))
    return told
