"""Explanations of errors that torch raises on some devices only."""

import contextlib
from collections.abc import Iterator

from imagenet_cls.errors import UsageError
from imagenet_cls.guards.memory import explain_out_of_memory

_NO_DETERMINISTIC_KERNEL = " does not have a deterministic implementation"


@contextlib.contextmanager
def explain_device_errors(sizes: str = "") -> Iterator[None]:
    """As `explain_out_of_memory`, and raises UsageError for errors due to `train.deterministic`.

    A failed assertion in a CUDA kernel gets a note.
    """
    with explain_out_of_memory(sizes):
        try:
            yield
        except RuntimeError as error:
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
