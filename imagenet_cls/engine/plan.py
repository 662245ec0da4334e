"""Batch sizes and steps of a run: global batch -> micro-batches, epochs -> steps."""

from dataclasses import dataclass

from imagenet_cls.config.schema import TrainConfig
from imagenet_cls.errors import DataError, Problem


@dataclass(frozen=True)
class Plan:
    """Batch sizes and numbers of steps: global_batch = world_size x devices x accumulation x micro_batch.

    Steps are optimizer updates. devices: of one rank; more than one with DataParallel only. micro_batch: images per
    device in one forward pass.
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
    def share(self) -> int:
        """Images of one rank in one step."""
        return self.global_batch // self.world_size

    @property
    def loader_batch(self) -> int:
        """Images in one batch of a rank's loader, for all of its devices."""
        return self.micro_batch * self.devices


def accumulation_for(global_batch: int, num_devices: int, micro_batch_size: int | None) -> int:
    """Accumulation steps: the fewest that divide a device's images into parts of at most `micro_batch_size`.

    num_devices: of all ranks together.
    """
    assert global_batch % num_devices == 0, "call batch_problem first"
    share = global_batch // num_devices
    limit = micro_batch_size or share
    return next(k for k in range(1, share + 1) if share % k == 0 and share // k <= limit)


def micro_batch_for(train: TrainConfig, num_devices: int) -> int:
    """The micro-batch size: images of one device in one forward pass. num_devices: of all ranks together."""
    k = accumulation_for(train.global_batch_size, num_devices, train.micro_batch_size)
    return train.global_batch_size // (num_devices * k)


def batch_problem(train: TrainConfig, num_devices: int, what: str = "ranks") -> Problem | None:
    """The problem of a global batch that is not divisible by the number of devices, with the nearest that are."""
    size = train.global_batch_size
    if size % num_devices == 0:
        return None
    below, above = size // num_devices * num_devices, -(-size // num_devices) * num_devices
    nearest = " or ".join(str(n) for n in (below, above) if n > 0)
    message = f"{size} images do not divide among {num_devices} {what}; nearest that do: {nearest}"
    return Problem("train.global_batch_size", message)


def plan_run(train: TrainConfig, num_images: int, world_size: int, devices: int = 1) -> Plan:
    """The whole plan. num_images: samples of one epoch. devices: of one rank.

    Steps per epoch are floor(num_images / global batch); the images left out differ from epoch to epoch. Raises
    DataError where the images do not fill one batch.
    """
    steps_per_epoch = num_images // train.global_batch_size
    if steps_per_epoch == 0:
        raise DataError(
            f"the training set has {num_images} images an epoch, fewer than one batch (train.global_batch_size="
            f"{train.global_batch_size}).\nGive a train.global_batch_size of at most {num_images}, or more images."
        )
    k = accumulation_for(train.global_batch_size, world_size * devices, train.micro_batch_size)
    total = steps_per_epoch * train.epochs
    return Plan(
        world_size=world_size,
        global_batch=train.global_batch_size,
        accumulation=k,
        micro_batch=train.global_batch_size // (world_size * devices * k),
        steps_per_epoch=steps_per_epoch,
        epochs=train.epochs,
        total_steps=min(total, train.max_steps or total),
        devices=devices,
    )
