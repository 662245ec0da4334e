"""Out-of-memory errors of torch, with the batch sizes and what to change."""

import contextlib
from collections.abc import Iterator

from imagenet_cls.errors import ResourceError, out_of_memory_line


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
        with_sizes = f" with {sizes}" if sizes else ""
        raise ResourceError(
            f"Out of memory{with_sizes}.\n{detail.rpartition('DefaultCPUAllocator: ')[2][:200]}",
            "Try a smaller train.micro_batch_size (the global batch stays) or eval.batch_size, "
            "train.grad_checkpointing=true, train.precision=bf16, or smaller images.",
        ) from error
