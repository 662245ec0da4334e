"""Out-of-memory errors of torch, with the batch sizes and what to change."""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator

import torch

from imagenet_cls.config.schema import Config
from imagenet_cls.errors import ResourceError

_GIB = 2.0**30


@contextlib.contextmanager
def explain_resource_errors(*explanations: Callable[[RuntimeError], ResourceError | None]) -> Iterator[None]:
    """Replace a RuntimeError by the first ResourceError that one of `explanations` makes of it, if any."""
    try:
        yield
    except RuntimeError as error:
        explained = next(filter(None, (explain(error) for explain in explanations)), None)
        if explained is None:
            raise
        raise explained from error


def out_of_memory(error: RuntimeError, config: Config | None = None, micro_batch: int = 0) -> ResourceError | None:
    """The error to show where memory ran out, of a GPU or of the host; None for any other `error`.

    config: of a training run; its sizes are shown. micro_batch: images of one device at once in it.
    """
    if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
        return None
    first, _, detail = str(error).splitlines()[0].partition("DefaultCPUAllocator: ")
    where, peak, total = memory()
    sizes, remedies = "", ["a smaller train.micro_batch_size", "a smaller eval.batch_size", "smaller images"]
    if config is not None:
        train, size_px = config.train, config.augment.size_px
        sizes = (
            f"{micro_batch} images at once of {size_px} px ({config.eval.batch_size} of {config.eval.crop_px} px in "
            "evaluation), "
        )
        remedies = [
            f"train.micro_batch_size={micro_batch // 2} (the global batch stays; in evaluation, eval.batch_size)"
            if micro_batch > 1
            else "a smaller eval.batch_size, in evaluation",
            "train.precision=bf16" if train.precision == "fp32" and torch.cuda.is_initialized() else "",
            "" if train.grad_checkpointing else "train.grad_checkpointing=true",
            f"an augment.size_px below {size_px}",
            "a smaller model",
        ]
    return ResourceError(
        f"out of memory on {where}: {sizes}peak {peak / _GIB:.2f} of {total / _GIB:.2f} GiB\n"
        f"{(detail or first)[:200]}\n"
        f"Try {', or '.join(list(filter(None, remedies))[:3])}."
    )


def memory() -> tuple[str, int, int]:
    """The device of this process, the most bytes that it has used there, and its total bytes."""
    if torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        total = torch.cuda.get_device_properties(index).total_memory
        return f"cuda:{index}", torch.cuda.max_memory_allocated(index), total
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "this machine", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, total
