"""The peak memory of this process."""

import contextlib
import resource
import sys
from pathlib import Path

import torch


def peak_memory_bytes() -> int:
    """The most bytes so far: of the CUDA allocator on this process's GPU, else resident."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # On Linux, the peak of getrusage may belong to the process that started this one.
    with contextlib.suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
