"""Batch sizes and steps of a run: global batch -> micro-batches, epochs -> steps."""

from dataclasses import dataclass

from imagenet_cls.config.schema import TrainConfig
from imagenet_cls.errors import DataError, Problem


@dataclass(frozen=True)
class Plan:
    """Batch sizes and numbers of optimizer updates (steps).

    devices: of one rank. micro_batch: the largest number of images per device in one forward pass.
    """

    world_size: int
    global_batch: int
    accumulation: int
    micro_batch: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    devices: int = 1

    @property
    def forward_passes(self) -> int:
        """The number of forward passes of one step, on all devices."""
        return self.world_size * self.devices * self.accumulation


def micro_batch_for(global_batch: int, num_devices: int, limit: int | None) -> int:
    """The largest number of images of one device in one forward pass, at most `limit`.

    If the batch is divisible by the number of devices (of all ranks), the largest divisor of a device's share, so that
    all micro-batches are equal. Otherwise their sizes differ by one, and there are as few as possible.
    """
    share, rest = divmod(global_batch, num_devices)
    if rest == 0:
        return next(size for size in range(min(limit or share, share), 0, -1) if share % size == 0)
    return _ceil(
        global_batch, num_devices * _ceil(global_batch, num_devices * (limit or global_batch))
    )


def part_sizes(images: int, parts: int) -> list[int]:
    """The sizes of the parts of a batch, each once: one number, or two that differ by one."""
    return sorted({images // parts, _ceil(images, parts)})


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def batch_problem(train: TrainConfig, num_devices: int, uneven: bool = False) -> Problem | None:
    """The problem of a global batch that can't be divided among the devices, with the nearest sizes that can.

    uneven: whether the sizes of micro-batches may differ.
    """
    size = train.global_batch_size
    if size % num_devices == 0 or (uneven and size > num_devices and train.micro_batch_size != 1):
        return None
    below, above = size // num_devices * num_devices, _ceil(size, num_devices) * num_devices
    nearest = " or ".join(str(n) for n in (below, above) if n > 0)
    how = " in micro-batches of one image" if uneven and size > num_devices else ""
    message = (
        f"{size} images do not divide among {num_devices} devices{how}; nearest that do: {nearest}"
    )
    return Problem("train.global_batch_size", message)


def plan_run(train: TrainConfig, num_images: int, world_size: int, devices: int = 1) -> Plan:
    """The plan of a run with `num_images` samples in an epoch. Raises DataError where they do not fill one batch."""
    steps_per_epoch = num_images // train.global_batch_size
    if steps_per_epoch == 0:
        raise DataError(
            f"the training set has {num_images} images an epoch, fewer than one batch (train.global_batch_size="
            f"{train.global_batch_size}).\nGive a train.global_batch_size of at most {num_images}, or more images."
        )
    micro_batch = micro_batch_for(
        train.global_batch_size, world_size * devices, train.micro_batch_size
    )
    total = steps_per_epoch * train.epochs
    return Plan(
        world_size=world_size,
        global_batch=train.global_batch_size,
        accumulation=_ceil(train.global_batch_size, world_size * devices * micro_batch),
        micro_batch=micro_batch,
        steps_per_epoch=steps_per_epoch,
        epochs=train.epochs,
        total_steps=min(total, train.max_steps or total),
        devices=devices,
    )
