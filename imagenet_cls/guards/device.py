"""Explanations of errors of a device: out of memory, missing kernels, failed assertions."""

import contextlib
from collections.abc import Iterator

from imagenet_cls.errors import ResourceError, UsageError, out_of_memory_line

_NO_DETERMINISTIC_KERNEL = " does not have a deterministic implementation"
_LESS_MEMORY = (
    "Set train.micro_batch_size (the global batch stays) or eval.batch_size to fewer images, "
    "train.grad_checkpointing=true, train.precision=bf16, or smaller images."
)


@contextlib.contextmanager
def explain_device_errors(sizes: str = "", remedy: str = _LESS_MEMORY) -> Iterator[None]:
    """Raise ResourceError where memory ran out, and UsageError for `train.deterministic`.

    sizes: the batch sizes as text, for the message. remedy: what needs less memory. A failed
    assertion in a CUDA kernel gets a note.
    """
    try:
        yield
    except RuntimeError as error:
        if (detail := out_of_memory_line(error)) is not None:
            with_sizes = f" with {sizes}" if sizes else ""
            shown = detail.rpartition("DefaultCPUAllocator: ")[2][:200]
            raise ResourceError(f"Out of memory{with_sizes}.\n{shown}", remedy) from error
        for line in str(error).splitlines():
            if _NO_DETERMINISTIC_KERNEL in line:
                operator = line.partition(_NO_DETERMINISTIC_KERNEL)[0].rpartition(" ")[2]
                raise UsageError(
                    f"train.deterministic=true: the model or the loss uses {operator}, "
                    "for which torch has no deterministic kernel on this device.",
                    "Use another model, train.deterministic=false, or device=cpu.",
                ) from error
        if "device-side assert triggered" in str(error):
            # Kernels run asynchronously, so the traceback shows a later line.
            error.add_note(
                "A kernel has found invalid values, most often a target outside of the "
                "classes. The traceback may show a later line. Set CUDA_LAUNCH_BLOCKING=1, or "
                "use device=cpu, to see the right one."
            )
        raise
