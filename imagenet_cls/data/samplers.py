"""Which images, in which order, on which rank: a pure function of (seed, epoch, step, rank)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from imagenet_cls.errors import DataError, Problem
from imagenet_cls.seeding import generator

SampleKey = tuple[int, int, int]  # epoch, index, view


class EpochSampler(DistributedSampler[SampleKey]):
    """This rank's samples of an epoch, from any step on.

    The order of epoch e is its permutation with every image `repeats` times in a row, as views 0 to repeats - 1,
    truncated to `samples_per_epoch`: with repeats, an epoch has as many samples, but of fewer images. The global
    batch of step s is `order(e)[s * G : (s + 1) * G]`; the incomplete last batch is dropped.

    With N devices in all and k micro-batches for each, micro-batch m of device d has every (N k)-th sample
    of the global batch, starting at number d k + m. So the images of one forward pass depend on the product N k only:
    one device with eight micro-batches computes the same forward passes as eight devices with one. The images that
    SyncBN normalizes together depend on k only. A rank has one device, or several with DataParallel, which splits the
    batch.

    Repeated augmentation: Hoffer et al., "Augment your batch", 2020; Berman et al., "MultiGrain", 2019. Order, ranks
    and truncation (to multiples of 256) are those of RASampler in DeiT's `samplers.py` and in torchvision's references,
    which have no micro-batches. Unlike torch's DistributedSampler, nothing is padded, the seed is hashed and not added
    to the epoch, and an epoch can start at any step.
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

        Raises DataError where an epoch has fewer samples than one global batch.
        """
        groups = world_size * devices * accumulation
        assert global_batch_size % groups == 0, (global_batch_size, world_size, devices, accumulation)
        num_samples = samples_per_epoch(num_images, repeats_multiple)
        if num_samples < global_batch_size:
            multiple = "" if repeats_multiple is None else " (see data.repeats_multiple)"
            raise DataError(
                f"an epoch of {num_samples} training images{multiple} is smaller than one global batch of "
                f"{global_batch_size}\nset train.global_batch_size to at most {num_samples}"
            )
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
        # Each row has one sample of every group, ordered by rank, device and micro-batch.
        rows = self.global_batch_size // (self.world_size * self.devices * self.accumulation)
        grid = torch.arange(first, end).view(-1, rows, self.world_size, self.devices, self.accumulation)
        positions = grid[:, :, self.rank].permute(0, 3, 2, 1).flatten()  # by step, micro-batch, device, row
        samples = order[positions // self.repeats] * self.repeats + positions % self.repeats
        del order, grid, positions
        epoch, repeats = self.epoch, self.repeats
        for start in range(0, len(samples), 1024):  # a Python list of a whole epoch would take 50 MB
            for sample in samples[start : start + 1024].tolist():
                index, view = divmod(sample, repeats)
                yield epoch, index, view

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.start_step) * (self.global_batch_size // self.world_size)


def samples_per_epoch(num_images: int, repeats_multiple: int | None = None) -> int:
    """Samples of an epoch, repeats included: the number of images, rounded down to a multiple of `repeats_multiple`.

    Raises DataError where that is 0.
    """
    if repeats_multiple is None:
        return num_images
    if num_images < repeats_multiple:
        raise DataError(
            f"{num_images} training images are fewer than data.repeats_multiple, {repeats_multiple}\nset it to null"
        )
    return num_images // repeats_multiple * repeats_multiple


def repeats_problems(repeats_multiple: int | None, world_size: int) -> list[Problem]:
    """The problem of a `data.repeats_multiple` that this many ranks don't divide."""
    if repeats_multiple is None or repeats_multiple % world_size == 0:
        return []
    above = -(-repeats_multiple // world_size) * world_size
    text = f"{repeats_multiple} can't be divided by {world_size} ranks; use {above}, or null"
    return [Problem("data.repeats_multiple", text)]


def shard_for_eval(num_images: int, rank: int, world_size: int) -> range:
    """This rank's share of an evaluation: unpadded, each image on exactly one rank, sizes differ by at most one."""
    return range(rank, num_images, world_size)
