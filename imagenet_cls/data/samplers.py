"""Which images, in which order, on which rank: a pure function of (seed, epoch, step, rank)."""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler

from imagenet_cls.seeding import generator

SampleKey = tuple[int, int, int]  # epoch, index, repeat


class EpochSampler(DistributedSampler[SampleKey]):
    """This rank's samples of an epoch, from any step on.

    It is a DistributedSampler only for code that asks for one by `isinstance`. Every method is its
    own; `num_samples` and `total_size` of the base class are not used.

    G: global batch size. N: devices of all ranks. k: accumulation steps, the micro-batches of a
    device in one step. G is at least N k.

    The samples of an epoch are a permutation of the images, with every image `repeats` times in a
    row, numbered 0 to repeats - 1, truncated to `samples_per_epoch`. With `balance`, it is a
    permutation of `balanced_samples`. The global batch of step s consists of samples s G to (s + 1)
    G - 1. The incomplete last batch is dropped.

    Micro-batch m of global device index d consists of every (N k)-th sample of the global batch,
    from number d k + m on. If N k does not divide G, some micro-batches have one sample more than
    the others. So the images of one forward pass depend on the product N k only, and the images
    that SyncBN normalizes together on k only. A rank has one device, or several with DataParallel,
    which splits the batch; then N k must divide G.

    Repeated augmentation: Hoffer et al., "Augment your batch", 2020; Berman et al., "MultiGrain",
    2019. As in RASampler of DeiT's `samplers.py` and of torchvision's references, sample p of an
    epoch is on device p mod N, if k is 1 and N divides G. Its number of samples is that of
    `repeats_multiple=256`.
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
        balance: float = 0.0,
        targets: np.ndarray | None = None,
    ):
        """accumulation: k above. devices: the devices of this rank; N above is world_size *
        devices. balance: see `class_quotas`; above 0 it needs the targets of the images, int64.
        An epoch has at least one global batch (`engine.plan.plan_run`).
        """
        passes = world_size * devices * accumulation  # forward passes of a step
        assert global_batch_size >= passes and (devices == 1 or global_batch_size % passes == 0), (
            passes,
            devices,
        )
        num_samples = samples_per_epoch(num_images, repeats_multiple)
        images: Any = range(num_images)  # torch only asks for its length
        super().__init__(images, world_size, rank, shuffle=True, seed=seed, drop_last=True)
        self.num_images = num_images
        self.global_batch_size = global_batch_size
        self.world_size = world_size
        self.repeats = repeats
        self.images_by_class: list[torch.Tensor] = []
        if balance > 0:
            assert targets is not None and len(targets) == num_images
            counts = np.bincount(targets)
            self.quotas = class_quotas(counts, balance, num_images).tolist()
            self.images_by_class = list(
                torch.from_numpy(np.argsort(targets, kind="stable")).split(counts.tolist())
            )
        own_devices = range(rank * devices, (rank + 1) * devices)
        # For each micro-batch of this rank, the positions of its samples in a global batch, device
        # by device.
        self.positions = [
            torch.cat(
                [torch.arange(d * accumulation + m, global_batch_size, passes) for d in own_devices]
            )
            for m in range(accumulation)
        ]
        # of all devices of this rank
        self.micro_batch_sizes = [len(positions) for positions in self.positions]
        self.steps_per_epoch = num_samples // global_batch_size
        self.start_step = 0

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """The next iteration yields epoch `epoch` (from 0) from its step `start_step` on."""
        assert 0 <= start_step <= self.steps_per_epoch, (start_step, self.steps_per_epoch)
        self.epoch = epoch
        self.start_step = start_step

    def __iter__(self) -> Iterator[SampleKey]:
        order = torch.randperm(
            self.num_images, generator=generator("permutation", self.seed, self.epoch)
        )
        steps = torch.arange(self.start_step, self.steps_per_epoch)
        positions = (
            steps.view(-1, 1) * self.global_batch_size + torch.cat(self.positions)
        ).flatten()
        indices = order[positions // self.repeats]
        repeat_numbers = positions % self.repeats
        del order, positions
        if self.images_by_class:
            samples, occurrences = balanced_samples(
                self.images_by_class, self.quotas, self.seed, self.epoch
            )
            repeat_numbers += occurrences[indices] * self.repeats
            indices = samples[indices]
        epoch = self.epoch
        # a Python list of a whole epoch would take 50 MB
        for start in range(0, len(indices), 1024):
            chunk = slice(start, start + 1024)
            pairs = zip(indices[chunk].tolist(), repeat_numbers[chunk].tolist(), strict=True)
            for index, repeat in pairs:
                yield epoch, index, repeat

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.start_step) * sum(self.micro_batch_sizes)


class MicroBatchSampler(Sampler[list[SampleKey]]):
    """The samples of an `EpochSampler`, one list per micro-batch: of its epoch, and of those that
    follow.
    """

    def __init__(self, sampler: EpochSampler, num_epochs: int = 0):
        """num_epochs: the number of epochs of the run; an iteration ends with the last one. 0: it
        ends with its epoch.
        """
        self.sampler = sampler
        self.num_epochs = num_epochs

    def __iter__(self) -> Iterator[list[SampleKey]]:
        while True:
            samples = iter(self.sampler)
            for size in cycle(self.sampler.micro_batch_sizes):
                micro_batch = list(islice(samples, size))
                if not micro_batch:
                    break
                yield micro_batch
            if self.sampler.epoch + 1 >= self.num_epochs:
                return
            self.sampler.set_epoch(self.sampler.epoch + 1)


def samples_per_epoch(num_images: int, repeats_multiple: int | None = None) -> int:
    """The number of images, rounded down to a multiple of `repeats_multiple`, perhaps 0."""
    multiple = repeats_multiple or 1
    return num_images // multiple * multiple


def class_quotas(counts: np.ndarray, balance: float, num_samples: int) -> np.ndarray:
    """The samples of each class in an epoch, int64 (classes,), `num_samples` together.

    Proportional to n^(1 - balance), where n is the class's number in `counts`; rounded by the
    largest remainder.
    """
    shares = np.where(counts > 0, np.maximum(counts, 1.0) ** (1 - balance), 0)
    # the last bits may differ between processors
    exact = np.round(num_samples * shares / shares.sum(), 6)
    quotas = np.floor(exact).astype(np.int64)
    largest = np.argsort(quotas - exact, kind="stable")
    quotas[largest[: num_samples - quotas.sum()]] += 1
    return quotas


def balanced_samples(
    images_by_class: Sequence[torch.Tensor], quotas: Sequence[int], seed: int, epoch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of an epoch, class by class: (images, occurrences), each int64 (samples,).

    Of a class with n images and quota q, each image has floor(q / n) samples; the others come first
    in a permutation with the key (seed, epoch, class). occurrences: which sample of its image in
    this epoch it is, from 0.
    """
    samples = []
    occurrences = []
    for number, (images, quota) in enumerate(zip(images_by_class, quotas, strict=True)):
        if quota > 0:
            times, rest = divmod(quota, len(images))
            drawn = torch.randperm(
                len(images), generator=generator("balance", seed, epoch, number)
            )[:rest]
            samples += [images.repeat(times), images[drawn]]
            occurrences.append(torch.arange(quota) // len(images))
    return torch.cat(samples), torch.cat(occurrences)


def shard_for_eval(num_images: int, rank: int, world_size: int) -> range:
    """This rank's share of an evaluation: unpadded, each image on exactly one rank, sizes differ by
    at most one.
    """
    return range(rank, num_images, world_size)
