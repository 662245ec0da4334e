"""Batch sizes and steps of a run, and what is due at a step: pure functions of the config."""

from dataclasses import dataclass

from imagenet_cls.config.schema import Config, TrainConfig, format_size
from imagenet_cls.errors import DataError, Problem


@dataclass(frozen=True)
class Plan:
    """Batch sizes and numbers of optimizer updates (steps).

    accumulation: the number of micro-batches of a rank in a step. A micro-batch is what a rank
    passes to the model at once; with DataParallel its devices divide it. device_micro_batch: the
    largest number of images of a micro-batch on one device. offset: added to a number of steps, it
    gives the place in the epochs; not 0 in a run that resumed with other steps per epoch.
    """

    world_size: int
    global_batch: int
    accumulation: int
    device_micro_batch: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    devices_per_rank: int = 1
    offset: int = 0

    def place(self, step: int) -> tuple[int, int]:
        """The epoch after `step` steps, from 0, and the number of its steps among them."""
        return divmod(step + self.offset, self.steps_per_epoch)

    def loss_divisor(self, num_images: int) -> float:
        """What the mean loss of a micro-batch of `num_images` is divided by. DDP averages over the
        ranks, so the weight is num_images * world_size / global_batch. If all micro-batches have
        the same size, the divisor is `accumulation`.
        """
        return self.global_batch / (self.world_size * num_images)

    @property
    def forward_passes(self) -> int:
        """The number of forward passes of one step, on all devices.

        One device with eight micro-batches computes the same forward passes as eight devices with
        one.
        """
        return self.world_size * self.devices_per_rank * self.accumulation


def micro_batch_for(
    global_batch: int, num_devices: int, limit: int | None, equal: bool = False
) -> int:
    """The largest number of images of one device in one forward pass, at most `limit`.

    There are as few micro-batches as possible, and their sizes differ by at most one.

    equal: whether all must have the same size. The devices then divide the batch.
    """
    share = ceil_div(global_batch, num_devices)
    accumulation = ceil_div(share, limit or share)
    if equal:
        while share % accumulation != 0:
            accumulation += 1
    return ceil_div(global_batch, num_devices * accumulation)


def part_sizes(images: int, parts: int) -> list[int]:
    """The sizes of the parts of a batch, each once: one number, or two that differ by one."""
    return sorted({images // parts, ceil_div(images, parts)})


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient of two integers, rounded up."""
    return (dividend + divisor - 1) // divisor


def batch_problem(train: TrainConfig, num_devices: int, uneven: bool = True) -> Problem | None:
    """The problem of a global batch that can't be divided among the devices, with the nearest sizes
    that can.

    uneven: whether the sizes of micro-batches may differ.
    """
    size = train.global_batch_size
    # Micro-batches of at most one image can't have two sizes: some would be empty.
    if size % num_devices == 0 or (uneven and size > num_devices and train.micro_batch_size != 1):
        return None
    below = size // num_devices * num_devices
    above = ceil_div(size, num_devices) * num_devices
    nearest = " or ".join(str(n) for n in (below, above) if n > 0)
    how = " in micro-batches of one image" if uneven and size > num_devices else ""
    message = (
        f"{size} images do not divide among {num_devices} devices{how}; the nearest numbers that "
        f"do: {nearest}"
    )
    return Problem("train.global_batch_size", message)


def plan_run(
    train: TrainConfig, num_samples: int, world_size: int, devices_per_rank: int = 1
) -> Plan:
    """The plan of a run with `num_samples` samples in an epoch. Raises DataError where they do not
    fill one batch.
    """
    steps_per_epoch = num_samples // train.global_batch_size
    if steps_per_epoch == 0:
        raise DataError(
            f"The training set has {num_samples} images an epoch, fewer than one batch "
            f"(train.global_batch_size={train.global_batch_size}).",
            "Give a smaller train.global_batch_size, data.repeats_multiple=null, or more images.",
        )
    num_devices = world_size * devices_per_rank
    # DataParallel divides each micro-batch among its devices in equal parts.
    micro_batch = micro_batch_for(
        train.global_batch_size, num_devices, train.micro_batch_size, equal=devices_per_rank > 1
    )
    total = steps_per_epoch * train.epochs
    return Plan(
        world_size=world_size,
        global_batch=train.global_batch_size,
        accumulation=ceil_div(train.global_batch_size, num_devices * micro_batch),
        device_micro_batch=micro_batch,
        steps_per_epoch=steps_per_epoch,
        epochs=train.epochs,
        total_steps=min(total, train.max_steps or total),
        devices_per_rank=devices_per_rank,
    )


@dataclass(frozen=True)
class Due:
    """What is due after a step. A save that is due together with an evaluation is made after it.

    end: it is the last step of the run. regular_evaluation: the evaluation of `eval.every_epochs`
    is due. evaluation: that, or the run ends.
    """

    end: bool
    end_of_epoch: bool
    log: bool
    regular_evaluation: bool
    evaluation: bool
    save: bool


def due_after(step: int, plan: Plan, config: Config, stopped_early: bool = False) -> Due:
    """What is due after `step` steps. stopped_early: whether `train.early_stop` ends the run."""
    end = stopped_early or step >= plan.total_steps
    epochs, rest = plan.place(step)
    end_of_epoch = rest == 0
    regular_evaluation = end_of_epoch and epochs % config.eval.every_epochs == 0
    save_steps, save_epochs = config.checkpoint.every_steps, config.checkpoint.every_epochs
    save = end
    if save_steps is not None:
        save = save or step % save_steps == 0
    if save_epochs is not None:
        save = save or (end_of_epoch and epochs % save_epochs == 0)
    return Due(
        end=end,
        end_of_epoch=end_of_epoch,
        log=step % config.log.every_steps == 0,
        regular_evaluation=regular_evaluation,
        evaluation=end or regular_evaluation,
        save=save,
    )


def describe_batch_sizes(config: Config, world_size: int, devices_per_rank: int) -> str:
    """Batch and image size of a device as text, for the message of an out-of-memory error."""
    train = config.train
    micro_batch = micro_batch_for(
        train.global_batch_size,
        world_size * devices_per_rank,
        train.micro_batch_size,
        equal=devices_per_rank > 1,
    )
    images = micro_batch * config.augment.splits
    return (
        f"{images} images at once of {format_size(config.augment.size_px)} "
        f"({config.eval.batch_size} of {format_size(config.eval.crop_px)} in evaluation)"
    )
