"""Which images, in which order, on which rank: a pure function of (seed, epoch, step, rank).

Owns the order of an epoch and its cut into global batches and ranks. Refuses to know about images: it deals in numbers.
Called by `loader` (training) and by the evaluation (`shard_for_eval`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from imagenet_cls.errors import DataError
from imagenet_cls.seeding import generator

SampleKey = tuple[int, int, int]  # epoch, index, view


class EpochSampler(DistributedSampler[SampleKey]):
    """This rank's samples of an epoch, from any step on.

    Step s of epoch e takes the global batch `permutation(e)[s * G : (s + 1) * G]`; rank r of W takes every W-th of it,
    from r on. So the union of all ranks' samples is the same for every W, of a step and also of a micro-batch
    (micro-batch m of k takes `permutation[s * G + m * G / k : s * G + (m + 1) * G / k]` over all ranks). What is left
    over behind the last whole global batch is not seen in this epoch; the next epoch's permutation leaves over others.

    Unlike torch's DistributedSampler, nothing is padded or repeated, the seed is hashed and not added to the epoch,
    and an epoch can begin at any step without replaying the steps before it.
    """

    def __init__(self, num_images: int, global_batch_size: int, rank: int, world_size: int, seed: int):
        """Raises DataError where there are fewer images than one global batch takes."""
        assert global_batch_size % world_size == 0, (global_batch_size, world_size)
        if num_images < global_batch_size:
            raise DataError(
                f"{num_images} training images do not fill one global batch of {global_batch_size}\n"
                f"set train.global_batch_size to at most {num_images}"
            )
        images: Any = range(num_images)  # torch only asks for its length
        super().__init__(images, world_size, rank, shuffle=True, seed=seed, drop_last=True)
        self.num_images = num_images
        self.global_batch_size = global_batch_size
        self.world_size = world_size
        self.steps_per_epoch = num_images // global_batch_size
        self.start_step = 0

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """The next iteration yields epoch `epoch` (from 0) from its step `start_step` on."""
        assert 0 <= start_step <= self.steps_per_epoch, (start_step, self.steps_per_epoch)
        self.epoch = epoch
        self.start_step = start_step

    def __iter__(self) -> Iterator[SampleKey]:
        order = torch.randperm(self.num_images, generator=generator("permutation", self.seed, self.epoch))
        first, end = self.start_step * self.global_batch_size, self.steps_per_epoch * self.global_batch_size
        # Global batches are multiples of the world size, so one stride over the epoch is a stride over each batch.
        mine = order[first + self.rank : end : self.world_size].clone()
        del order
        epoch = self.epoch
        for chunk in mine.split(1024):  # a Python list of a whole epoch would take 50 MB
            for index in chunk.tolist():
                yield epoch, index, 0

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.start_step) * (self.global_batch_size // self.world_size)


def shard_for_eval(num_images: int, rank: int, world_size: int) -> range:
    """This rank's share of an evaluation: unpadded, each image on exactly one rank, sizes differing by at most one."""
    return range(rank, num_images, world_size)
