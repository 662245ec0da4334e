"""When the machine gives out: what torch says then, in words that tell what to do.

Called by `engine.run` and `cli` around everything that trains or evaluates.
"""

import contextlib
import os
import resource
from collections.abc import Iterator

import torch

from imagenet_cls.config.schema import Config
from imagenet_cls.data import worker_death
from imagenet_cls.engine.plan import accumulation_for
from imagenet_cls.errors import ResourceError

_GIB = 2.0**30


@contextlib.contextmanager
def explain_resource_errors(config: Config | None = None, world_size: int = 1) -> Iterator[None]:
    """Raise ResourceError in place of torch's RuntimeError where memory ran out or a data worker was killed.

    Around a whole run, since torch reports a worker's death from a signal handler, wherever the main process is.
    config: of a training run on `world_size` ranks; its batches and sides are told with the error.
    """
    try:
        yield
    except RuntimeError as error:
        known = out_of_memory(error, config, world_size) or worker_death(error)
        if known is None:
            raise
        raise known from error


def out_of_memory(error: RuntimeError, config: Config | None = None, world_size: int = 1) -> ResourceError | None:
    """What to tell a user where `error` says that memory ran out, a GPU's or the host's; None for anything else."""
    if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
        return None
    parts = str(error).splitlines()[0].partition("DefaultCPUAllocator: ")
    where, peak, total = memory()
    what, remedies = (
        "",
        [
            "a train.micro_batch_size (what it leaves of a batch is accumulated)",
            "a smaller eval.batch_size",
            "a smaller image",
        ],
    )
    if config is not None:
        at_once = images_at_once(config, world_size)
        train, evaluation = config.augment, config.eval
        what = f"{at_once} images at once of {train.size_px} px ({evaluation.batch_size} of {evaluation.crop_px} px in "
        what += "evaluation), "
        remedies = remedies_for(config, at_once)
    return ResourceError(
        f"memory ran out on {where}: {what}peak {peak / _GIB:.2f} of {total / _GIB:.2f} GiB\n"
        f"{(parts[2] or parts[0])[:200]}\n"
        f"Try {', or '.join(remedies)}."
    )


def memory() -> tuple[str, int, int]:
    """Where this process computes, the most bytes that it held there at once, and how many there are."""
    if torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        total = torch.cuda.get_device_properties(index).total_memory
        return f"cuda:{index}", torch.cuda.max_memory_allocated(index), total
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "this machine", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, total


def images_at_once(config: Config, world_size: int) -> int:
    """The images of one device in one forward pass of the training."""
    devices = 1
    if config.parallel.mode == "dp":
        devices = len(config.parallel.device_ids or range(torch.cuda.device_count())) or 1
    train, num_devices = config.train, world_size * devices
    if train.global_batch_size % num_devices:
        return -(-train.global_batch_size // num_devices)  # refused soon, for that
    images = train.global_batch_size // num_devices
    return images // accumulation_for(train.global_batch_size, num_devices, train.micro_batch_size)


def remedies_for(config: Config, at_once: int) -> list[str]:
    """Three things that would help, the cheapest first, without those that the config does already."""
    train = config.train
    remedies = [
        f"train.micro_batch_size={max(1, at_once // 2)} (the same batch in more turns; in evaluation, eval.batch_size)"
        if at_once > 1
        else "a smaller eval.batch_size, in evaluation",
        "train.precision=bf16" if train.precision == "fp32" and torch.cuda.is_initialized() else "",
        "" if train.grad_checkpointing else "train.grad_checkpointing=true",
        f"an augment.size_px below {config.augment.size_px}",
        "a smaller model",
    ]
    return [remedy for remedy in remedies if remedy][:3]
