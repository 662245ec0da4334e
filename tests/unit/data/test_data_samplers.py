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
from imagenet_cls.errors import DataError
from imagenet_cls.seeding import generator


@pytest.mark.parametrize("repeats", [1, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sampler_yields_slices_of_the_permutation(world_size: int, repeats: int) -> None:
    order = torch.randperm(103, generator=generator("permutation", 7, 3)).tolist()
    samples = [(3, index, repeat) for index in order for repeat in range(repeats)][:96]
    for rank in range(world_size):
        sampler = EpochSampler(103, 12, rank, world_size, seed=7, repeats=repeats)
        assert isinstance(sampler, DistributedSampler) and sampler.steps_per_epoch == 8
        for start in (0, 1, 5, 8):
            sampler.set_epoch(3, start)
            mine = samples[start * 12 + rank :: world_size]
            assert list(sampler) == mine and len(sampler) == len(mine)
    sampler.set_epoch(4)
    other_epoch = list(sampler)
    other_seed = EpochSampler(103, 12, rank, world_size, seed=8, repeats=repeats)
    other_seed.set_epoch(4)
    assert other_epoch != list(other_seed)


def groups_of_an_epoch(
    num_images: int,
    batch: int,
    world_size: int,
    accumulation: int,
    devices: int = 1,
    repeats: int = 1,
) -> list[list[list[tuple[int, int, int]]]]:
    """The micro-batches of each step, by number, device and rank."""
    ranks = []
    splits = {"accumulation": accumulation, "devices": devices}
    for rank in range(world_size):
        sampler = EpochSampler(num_images, batch, rank, world_size, 7, repeats, **splits)
        sampler.set_epoch(3)
        micro_batches = list(MicroBatchSampler(sampler))
        assert [*chain(*micro_batches)] == list(sampler)
        of_rank = []
        for micro_batch in micro_batches:
            size = len(micro_batch) // devices
            of_rank += [micro_batch[i * size : (i + 1) * size] for i in range(devices)]
        ranks.append(of_rank)
    groups = [*chain(*zip(*ranks, strict=True))]
    per_step = world_size * accumulation * devices
    return [groups[begin : begin + per_step] for begin in range(0, len(groups), per_step)]


LAYOUTS = {
    6: [(6, 1, 1), (3, 2, 1), (2, 3, 1), (1, 6, 1), (1, 3, 2)],
    8: [(8, 1, 1), (2, 4, 1), (1, 1, 8), (1, 2, 4)],
    # Uneven: 96 images in 10 and 65 micro-batches.
    10: [(10, 1, 1), (5, 2, 1), (2, 5, 1), (1, 10, 1)],
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
    """layout: ranks, micro-batches, devices. The reference is the permutation with every image
    repeated.
    """
    num_images, batch = 1003, 96
    permutation = torch.randperm(num_images, generator=generator("permutation", 7, 3)).tolist()
    order = [(3, index, repeat) for index in permutation for repeat in range(repeats)]
    for step, found in enumerate(groups_of_an_epoch(num_images, batch, *layout, repeats=repeats)):
        samples = order[step * batch : (step + 1) * batch]
        assert sorted(found) == sorted(samples[number::together] for number in range(together))
        sizes = {len(group) for group in found}
        assert sizes == {batch // together, -(-batch // together)}
        if together <= 10:  # no image more than once, if its repeats fit
            distinct = {len({index for _, index, _ in group}) for group in found}
            assert distinct <= {min(size, batch // repeats) for size in sizes}


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_micro_batches_of_all_ranks_depend_only_on_accumulation(accumulation: int) -> None:
    """SyncBN normalizes the same images on one, two and four devices."""

    def micro_batches(world_size: int, devices: int) -> list[list[tuple[int, int, int]]]:
        steps = groups_of_an_epoch(103, 24, world_size, accumulation, devices, repeats=3)
        groups, at_once = [*chain(*steps)], world_size * devices
        return [sorted(chain(*groups[m : m + at_once])) for m in range(0, len(groups), at_once)]

    alone = micro_batches(1, 1)
    assert len(alone) == 4 * accumulation
    for layout in [(2, 1), (4, 1), (1, 2), (1, 4), (3, 1), (5, 1), (7, 1)]:
        assert micro_batches(*layout) == alone


@pytest.mark.parametrize(
    ("num_images", "batch", "multiple", "key"),
    [
        (10, 16, None, "train.global_batch_size"),
        (700, 600, 256, "data.repeats_multiple"),
    ],
)
def test_sampler_without_a_whole_batch_raises(
    num_images: int, batch: int, multiple: int | None, key: str
) -> None:
    with pytest.raises(DataError, match=key):
        EpochSampler(num_images, batch, 0, 1, seed=0, repeats=3, repeats_multiple=multiple)


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

TARGETS = np.repeat([2, 0, 3, 1], [60, 30, 7, 6])  # 103 images; not in the order of the classes


def balanced_epoch(
    balance: float, epoch: int, rank: int = 0, world_size: int = 1, repeats: int = 1, start: int = 0
) -> list[tuple[int, int, int]]:
    sampler = EpochSampler(103, 12, rank, world_size, 7, repeats, balance=balance, targets=TARGETS)
    sampler.set_epoch(epoch, start)
    return list(sampler)


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


@pytest.mark.parametrize("repeats", [1, 3])
def test_balanced_epochs_are_the_same_for_every_world_size_and_start(repeats: int) -> None:
    alone = balanced_epoch(0.8, 2, repeats=repeats)
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            assert balanced_epoch(0.8, 2, rank, ranks, repeats) == alone[rank::ranks]
    assert balanced_epoch(0.8, 2, repeats=repeats, start=3) == alone[36:]
    assert balanced_epoch(0.8, 3, repeats=repeats) != alone
    assert len(set(alone)) == len(alone) == 96
