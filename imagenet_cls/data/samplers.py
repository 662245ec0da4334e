"""Which images, in which order, on which rank: a pure function of (seed, epoch, step, rank).

Owns the order of an epoch and its cut into global batches and ranks. Refuses to know about images: it deals in numbers.
Called by `loader` (training) and by the evaluation (`shard_for_eval`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from imagenet_cls.errors import DataError, Problem
from imagenet_cls.seeding import generator

SampleKey = tuple[int, int, int]  # epoch, index, view


class EpochSampler(DistributedSampler[SampleKey]):
    """This rank's samples of an epoch, from any step on.

    The order of epoch e is its permutation with every image `repeats` times in a row, as views 0 to repeats - 1, and
    is cut to `samples_per_epoch`: with repeats an epoch is as long as without, and covers so much fewer images. Step s
    takes the global batch `order(e)[s * G : (s + 1) * G]`. What is left over behind the last whole global batch is not
    seen in this epoch; the next permutation leaves over others.

    A global batch is dealt like cards to the devices and their micro-batches: micro-batch m of k on device d of N
    takes every (N k)-th sample, from number d k + m on. So the groups of images that go through the model together
    depend on N k alone: one device that takes eight micro-batches in turn sees the eight groups of eight devices, in
    each of them the repeats of an image as far apart as there. And the m-th micro-batches of all devices together,
    which synchronised BatchNorm normalises, depend on k alone. The devices are the ranks, or those of one rank under
    DataParallel, which cuts the batch of all its devices into equal parts.

    Repeated augmentation: Hoffer et al., "Augment your batch", 2020; Berman et al., "MultiGrain", 2019. Order, ranks
    and the cut (to multiples of 256) are those of RASampler in DeiT's `samplers.py` and in torchvision's references,
    which know no micro-batches.

    Unlike torch's DistributedSampler, nothing is padded, the seed is hashed and not added to the epoch, and an epoch
    can begin at any step without replaying the steps before it.
    """

    def __init__(
        self,
        num_images: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        repeats: int = 1,
        repeats_multiple: int | None = None,
        accumulation: int = 1,
        devices: int = 1,
    ):
        """accumulation: micro-batches of a device in one step. devices: of one rank.

        Raises DataError where an epoch has fewer samples than one global batch takes.
        """
        groups = world_size * devices * accumulation
        assert global_batch_size % groups == 0, (global_batch_size, world_size, devices, accumulation)
        num_samples = samples_per_epoch(num_images, repeats_multiple)
        if num_samples < global_batch_size:
            raise DataError(_too_few(num_images, num_samples, global_batch_size, repeats_multiple))
        images: Any = range(num_images)  # torch only asks for its length
        super().__init__(images, world_size, rank, shuffle=True, seed=seed, drop_last=True)
        self.num_images = num_images
        self.global_batch_size = global_batch_size
        self.world_size = world_size
        self.repeats = repeats
        self.accumulation = accumulation
        self.devices = devices
        self.steps_per_epoch = num_samples // global_batch_size
        self.start_step = 0

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """The next iteration yields epoch `epoch` (from 0) from its step `start_step` on."""
        assert 0 <= start_step <= self.steps_per_epoch, (start_step, self.steps_per_epoch)
        self.epoch = epoch
        self.start_step = start_step

    def __iter__(self) -> Iterator[SampleKey]:
        order = torch.randperm(self.num_images, generator=generator("permutation", self.seed, self.epoch))
        first, end = self.start_step * self.global_batch_size, self.steps_per_epoch * self.global_batch_size
        # Each row has one sample of every group: those of a device's micro-batches side by side, devices rank by rank.
        rows = self.global_batch_size // (self.world_size * self.devices * self.accumulation)
        dealt = torch.arange(first, end).view(-1, rows, self.world_size, self.devices, self.accumulation)
        places = dealt[:, :, self.rank].permute(0, 3, 2, 1).flatten()  # by step, micro-batch, device, row
        samples = order[places // self.repeats] * self.repeats + places % self.repeats
        del order, dealt, places
        epoch, repeats = self.epoch, self.repeats
        for start in range(0, len(samples), 1024):  # a Python list of a whole epoch would take 50 MB
            for sample in samples[start : start + 1024].tolist():
                index, view = divmod(sample, repeats)
                yield epoch, index, view

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.start_step) * (self.global_batch_size // self.world_size)


def samples_per_epoch(num_images: int, repeats_multiple: int | None = None) -> int:
    """Samples of an epoch, repeated ones included: as many as there are images, cut to a multiple where asked for.

    Raises DataError where nothing is left.
    """
    if repeats_multiple is None:
        return num_images
    if num_images < repeats_multiple:
        raise DataError(
            f"{num_images} training images, cut to a multiple of {repeats_multiple}, leave none\n"
            "set data.repeats_multiple to null"
        )
    return num_images // repeats_multiple * repeats_multiple


def repeats_problem(repeats_multiple: int | None, world_size: int) -> Problem | None:
    """What is wrong with `data.repeats_multiple` on this many ranks: it must divide, as a batch must."""
    if repeats_multiple is None or repeats_multiple % world_size == 0:
        return None
    above = -(-repeats_multiple // world_size) * world_size
    return Problem(
        "data.repeats_multiple",
        f"{repeats_multiple} samples do not divide among {world_size} ranks; the next that do: {above}, or null",
    )


def _too_few(num_images: int, num_samples: int, global_batch_size: int, repeats_multiple: int | None) -> str:
    if num_images < global_batch_size:
        return (
            f"{num_images} training images do not fill one global batch of {global_batch_size}\n"
            f"set train.global_batch_size to at most {num_images}"
        )
    return (
        f"{num_images} training images, cut to {num_samples} samples, do not fill a global batch of {global_batch_size}"
        f"\nset data.repeats_multiple, now {repeats_multiple}, to null, or make train.global_batch_size smaller"
    )


def shard_for_eval(num_images: int, rank: int, world_size: int) -> range:
    """This rank's share of an evaluation: unpadded, each image on exactly one rank, sizes differing by at most one."""
    return range(rank, num_images, world_size)
