"""Is there room in /dev/shm for the batches that data workers hold ready?

Owns the estimate and the refusal. Containers often have 64 MiB, and a worker that finds it full is killed in the middle
of a run. Called by `engine.build`, before any worker is started.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from imagenet_cls.errors import ResourceError

SHARED_MEMORY = Path("/dev/shm")


def check_shared_memory(held: Sequence[tuple[int, int]], local_ranks: int, where: Path = SHARED_MEMORY) -> None:
    """Raise ResourceError where the workers of all ranks of this machine would need more than is free.

    held: for each loader of a rank, the images (uint8, RGB) that its workers hold ready at most, and their side in
    pixels. Loaders' batches add up: the training workers keep theirs during an evaluation.
    """
    if not where.is_dir():  # no Linux
        return
    needed = local_ranks * sum(images * 3 * side_px**2 for images, side_px in held)
    free = shutil.disk_usage(where).free
    if needed > free:
        enlarged = f"docker run --shm-size={(needed >> 20) + 1}m"
        raise ResourceError(
            f"{where} has {_mib(free)} free, and the batches that data workers hold ready there need {_mib(needed)}\n"
            f"use fewer data.num_workers or data.prefetch_batches, or enlarge it ({enlarged})"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
