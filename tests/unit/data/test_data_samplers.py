"""The sampler: the same global batches for every world size, from any step on."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from imagenet_cls.data.samplers import (
    EpochSampler,
    MicroBatchSampler,
    balanced_samples,
    class_quotas,
    shard_for_eval,
)
from imagenet_cls.seeding import generator

TARGETS = np.repeat([2, 0, 3, 1], [60, 30, 7, 6])  # 103 images; not in the order of the classes


def epoch_of(
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    start: int = 0,
    seed: int = 7,
    repeats: int = 1,
    balance: float = 0.0,
) -> list[tuple[int, int, int]]:
    """The samples of a rank, with 8 global batches of 12."""
    options = {"repeats": repeats, "balance": balance, "targets": TARGETS}
    sampler = EpochSampler(103, 12, rank, world_size, seed, **options)
    assert isinstance(sampler, DistributedSampler) and sampler.steps_per_epoch == 8
    sampler.set_epoch(epoch, start)
    samples = list(sampler)
    assert len(sampler) == len(samples)
    return samples


@pytest.mark.parametrize("repeats", [1, 5])
@pytest.mark.parametrize("balance", [0.0, 0.8])
def test_samples_are_the_same_for_every_world_size_and_start(repeats: int, balance: float) -> None:
    options = {"repeats": repeats, "balance": balance}
    alone = epoch_of(3, **options)
    assert len(set(alone)) == len(alone) == 96
    for world_size in (1, 2, 3, 4):
        for rank in range(world_size):
            for start in (0, 1, 5, 8):
                mine = alone[start * 12 + rank :: world_size]
                assert epoch_of(3, rank, world_size, start, **options) == mine
    assert epoch_of(4, **options) != alone != epoch_of(3, seed=8, **options)


# By the number of micro-batches of a step: ranks, micro-batches of a device (k), devices of a rank.
LAYOUTS = {
    6: [(6, 1, 1), (2, 3, 1), (1, 6, 1), (1, 3, 2)],
    8: [(8, 1, 1), (2, 1, 4), (1, 1, 8), (1, 2, 4)],
    # Uneven: 96 images in 10 and 65 micro-batches.
    10: [(10, 1, 1), (5, 2, 1), (1, 10, 1)],
    65: [(5, 13, 1)],
}


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize(
    ("together", "layout"),
    [(groups, layout) for groups, layouts in LAYOUTS.items() for layout in layouts],
)
def test_micro_batches_depend_only_on_their_number(
    together: int, layout: tuple[int, int, int], repeats: int
) -> None:
    """The reference is the permutation with every image repeated.

    The numbers of the m-th micro-batches of all devices depend on k only, so SyncBN normalizes the
    same images on any number of devices.
    """
    ranks, accumulation, devices = layout
    num_images, batch = 1003, 96
    permutation = torch.randperm(num_images, generator=generator("permutation", 7, 3)).tolist()
    order = [(3, index, repeat) for index in permutation for repeat in range(repeats)]
    for rank in range(ranks):
        splits = {"accumulation": accumulation, "devices": devices}
        sampler = EpochSampler(num_images, batch, rank, ranks, 7, repeats, **splits)
        sampler.set_epoch(3)
        micro_batches = list(MicroBatchSampler(sampler))
        assert len(micro_batches) == num_images // batch * accumulation
        for place, micro_batch in enumerate(micro_batches):
            step, m = divmod(place, accumulation)
            samples = order[step * batch : (step + 1) * batch]
            own_devices = range(rank * devices, (rank + 1) * devices)
            parts = [samples[d * accumulation + m :: together] for d in own_devices]
            assert micro_batch == [*chain(*parts)]
            if together <= 10:  # no image more than once, if its repeats fit
                for part in parts:
                    distinct = len({index for _, index, _ in part})
                    assert distinct == min(len(part), batch // repeats)


def test_ranks_need_not_divide_repeats_multiple() -> None:
    """Every number of ranks reads the same epoch."""

    def epoch(ranks: int) -> list[tuple[int, int, int]]:
        samplers = [
            EpochSampler(600, 100, rank, ranks, 7, 3, repeats_multiple=256) for rank in range(ranks)
        ]
        return sorted(chain(*samplers))

    assert epoch(3) == epoch(5) == epoch(1) and len(epoch(1)) == 500


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_shard_for_eval_has_every_image_once(world_size: int) -> None:
    for num_images in (0, 1, 50, 101):
        shards = [shard_for_eval(num_images, rank, world_size) for rank in range(world_size)]
        assert sorted(i for shard in shards for i in shard) == list(range(num_images))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


# ---- balance


@pytest.mark.parametrize(
    ("balance", "quotas"),
    # Shares n^(1 - balance): of the square root 7.746, 5.477, 2.646 and 2.449 of 18.318.
    [(0.0, [30, 6, 60, 7]), (0.5, [31, 14, 43, 15]), (1.0, [26, 26, 26, 25])],
)
def test_class_quotas_by_largest_remainder(balance: float, quotas: list[int]) -> None:
    assert class_quotas(np.bincount(TARGETS), balance, 103).tolist() == quotas
    # a class without images
    assert class_quotas(np.array([5, 0, 5]), balance, 10).tolist() == [5, 0, 5]


def test_balanced_samples_have_each_image_of_a_class_equally_often() -> None:
    by_class = [torch.from_numpy(np.flatnonzero(np.equal(TARGETS, number))) for number in range(4)]
    quotas = [26, 26, 26, 25]
    for epoch in range(2):
        samples, occurrences = balanced_samples(by_class, quotas, 7, epoch)
        all_counts = np.bincount(samples, minlength=103)
        for images, quota in zip(by_class, quotas, strict=True):
            counts = all_counts[images]
            assert counts.sum() == quota and counts.max() - counts.min() <= 1
        # occurrences of an image are different repeats
        assert len(set(zip(samples.tolist(), occurrences.tolist(), strict=True))) == 103
        assert occurrences.max() == 4  # 26 samples of 6 images
    other = balanced_samples(by_class, quotas, 7, 0)[0]
    assert not torch.equal(samples, other)  # the images that are drawn once more differ
