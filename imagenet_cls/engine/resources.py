"""When the machine gives out: what torch says then, in words that tell what to do.

Called by `engine.run` and `cli` around everything that trains or evaluates.
"""

import contextlib
from collections.abc import Iterator

import torch

from imagenet_cls.data import worker_death
from imagenet_cls.errors import ResourceError


@contextlib.contextmanager
def naming_what_gave_out() -> Iterator[None]:
    """Raise ResourceError in place of torch's RuntimeError where memory ran out or a data worker was killed.

    Around a whole run, since torch reports a worker's death from a signal handler, wherever the main process is.
    """
    try:
        yield
    except RuntimeError as error:
        known = out_of_memory(error) or worker_death(error)
        if known is None:
            raise
        raise known from error


def out_of_memory(error: RuntimeError) -> ResourceError | None:
    """What to tell a user where `error` says that memory ran out, a GPU's or the host's; None for anything else."""
    if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
        return None
    reason = str(error).splitlines()[0].partition("DefaultCPUAllocator: ")
    return ResourceError(
        f"memory ran out: {(reason[2] or reason[0])[:200]}\n"
        "Give a train.micro_batch_size (what it leaves of a batch is accumulated), a smaller eval.batch_size, or a "
        "smaller image."
    )
