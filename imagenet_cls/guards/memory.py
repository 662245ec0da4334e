"""Out-of-memory errors of torch, with the batch sizes and what to change."""

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Iterator

import torch

from imagenet_cls.errors import ResourceError

_GIB = 2.0**30


@contextlib.contextmanager
def explain_resource_errors(
    killed_worker_error: Callable[[RuntimeError], ResourceError | None], sizes: str = ""
) -> Iterator[None]:
    """Replace a RuntimeError by a ResourceError where memory ran out, or where `killed_worker_error` returns one.

    sizes: of the batches, such as "32 images at once of 224 px", for the message.
    """
    try:
        yield
    except RuntimeError as error:
        explained = out_of_memory_error(error, sizes) if is_out_of_memory(error) else killed_worker_error(error)
        if explained is None:
            raise
        raise explained from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch raised this error because the memory of a GPU or of the host ran out."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def out_of_memory_error(error: RuntimeError, sizes: str) -> ResourceError:
    """The error to show where memory ran out: device, sizes, peak and total, torch's first line, and remedies."""
    where, total = "this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        where, total = f"cuda:{index}", torch.cuda.get_device_properties(index).total_memory
    batches = f"{sizes}, " if sizes else ""
    detail = str(error).splitlines()[0].rpartition("DefaultCPUAllocator: ")[2]
    return ResourceError(
        f"out of memory on {where}: {batches}peak {peak_memory_bytes() / _GIB:.2f} of {total / _GIB:.2f} GiB\n"
        f"{detail[:200]}\n"
        "Try a smaller train.micro_batch_size (the global batch stays) or eval.batch_size, "
        "train.grad_checkpointing=true, train.precision=bf16, or smaller images."
    )


def peak_memory_bytes() -> int:
    """The most bytes so far: of the CUDA allocator on this process's GPU, else the resident set size."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
