"""Out-of-memory errors of torch, with the batch sizes and what to change."""

import contextlib
import os
from collections.abc import Iterator

import torch

from imagenet_cls.errors import ResourceError, out_of_memory_line
from imagenet_cls.parallel.memory import peak_resident_bytes

_GIB = 2.0**30


@contextlib.contextmanager
def explain_out_of_memory(sizes: str = "") -> Iterator[None]:
    """Replace a RuntimeError by a ResourceError where memory ran out.

    sizes: the batch sizes in words, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        detail = out_of_memory_line(error)
        if detail is None:
            raise
        on_host = "DefaultCPUAllocator" in detail
        if on_host or not torch.cuda.is_initialized():
            where = "this machine"
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            peak = peak_resident_bytes()
        else:
            index = torch.cuda.current_device()
            where = f"cuda:{index}"
            total = torch.cuda.get_device_properties(index).total_memory
            peak = torch.cuda.max_memory_allocated()
        used = f"peak {peak / _GIB:.2f} of {total / _GIB:.2f} GiB"
        if sizes:
            used = f"{sizes}, {used}"
        raise ResourceError(
            f"Out of memory on {where}: {used}.\n"
            f"{detail.rpartition('DefaultCPUAllocator: ')[2][:200]}",
            "Try a smaller train.micro_batch_size (the global batch stays) or eval.batch_size, "
            "train.grad_checkpointing=true, train.precision=bf16, or smaller images.",
        ) from error
