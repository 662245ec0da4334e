"""The sampler: the same global batches for every world size, from any step on."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DistributedSampler

from imagenet_cls.data.samplers import EpochSampler, repeats_problems, samples_per_epoch, shard_for_eval
from imagenet_cls.errors import DataError
from imagenet_cls.seeding import generator


def test_sampler_yields_slices_of_the_permutation() -> None:
    sampler = EpochSampler(103, 12, 0, 1, seed=7)
    sampler.set_epoch(3)
    order = torch.randperm(103, generator=generator("permutation", 7, 3)).tolist()
    assert isinstance(sampler, DistributedSampler) and sampler.steps_per_epoch == 8
    assert list(sampler) == [(3, index, 0) for index in order[:96]]


def groups_of_an_epoch(
    num_images: int, batch: int, world_size: int, accumulation: int, devices: int = 1, repeats: int = 1
) -> list[list[list[tuple[int, int, int]]]]:
    """The micro-batches of each step, by number, device and rank."""
    micro = batch // (world_size * accumulation * devices)
    ranks = []
    for rank in range(world_size):
        sampler = EpochSampler(
            num_images, batch, rank, world_size, 7, repeats, accumulation=accumulation, devices=devices
        )
        sampler.set_epoch(3)
        samples = list(sampler)
        assert len(samples) == len(sampler) == num_images // batch * batch // world_size
        ranks.append([samples[begin : begin + micro] for begin in range(0, len(samples), micro)])
        per_step = accumulation * devices
        for start in (1, num_images // batch):
            sampler.set_epoch(3, start)
            assert list(sampler) == samples[start * per_step * micro :]
    steps = []
    for step in range(num_images // batch):
        numbers = range(step * per_step, (step + 1) * per_step)
        steps.append([ranks[rank][n] for n in numbers for rank in range(world_size)])
    return steps


LAYOUTS = {
    1: [(1, 1, 1)],
    6: [(6, 1, 1), (3, 2, 1), (2, 3, 1), (1, 6, 1), (1, 3, 2)],
    8: [(8, 1, 1), (2, 4, 1), (1, 1, 8), (1, 2, 4)],
}


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize(
    ("together", "layout"), [(groups, layout) for groups, layouts in LAYOUTS.items() for layout in layouts]
)
def test_micro_batches_depend_only_on_their_number(together: int, layout: tuple[int, int, int], repeats: int) -> None:
    """layout: ranks, micro-batches, devices. The reference is the permutation with every image repeated."""
    num_images, batch = 1003, 96
    permutation = torch.randperm(num_images, generator=generator("permutation", 7, 3)).tolist()
    order = [(3, index, view) for index in permutation for view in range(repeats)]
    for step, found in enumerate(groups_of_an_epoch(num_images, batch, *layout, repeats=repeats)):
        samples = order[step * batch : (step + 1) * batch]
        assert sorted(found) == sorted(samples[number::together] for number in range(together))
        distinct = {len({index for _, index, _ in group}) for group in found}
        assert distinct == {min(batch // together, batch // repeats)}


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_micro_batches_of_all_ranks_depend_only_on_accumulation(accumulation: int) -> None:
    """SyncBN normalises the same images on one, two and four devices."""
    num_images, batch = 103, 24

    def micro_batches(world_size: int, devices: int) -> list[list[list[tuple[int, int, int]]]]:
        at_once = world_size * devices
        return [
            [sorted(chain(*groups[m : m + at_once])) for m in range(0, len(groups), at_once)]
            for groups in groups_of_an_epoch(num_images, batch, world_size, accumulation, devices, repeats=3)
        ]

    alone = micro_batches(1, 1)
    assert len(alone) == 4 and all(len(step) == accumulation for step in alone)
    assert all(micro_batches(*layout) == alone for layout in [(2, 1), (4, 1), (1, 2), (1, 4)])


def test_sampler_started_at_a_step_yields_the_rest() -> None:
    sampler = EpochSampler(50, 8, 1, 2, seed=0)
    sampler.set_epoch(2)
    whole = list(sampler)
    for start in range(7):
        sampler.set_epoch(2, start)
        assert list(sampler) == whole[start * 4 :] and len(sampler) == len(whole) - start * 4
    sampler.set_epoch(3)
    assert [key[1] for key in sampler] != [key[1] for key in whole]
    other_seed = EpochSampler(50, 8, 1, 2, seed=1)
    other_seed.set_epoch(2)
    assert list(other_seed) != whole


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_repeats_are_consecutive_views(world_size: int) -> None:
    num_images, batch, repeats = 103, 12, 5
    order = torch.randperm(num_images, generator=generator("permutation", 7, 3)).tolist()
    samples = [(3, index, view) for index in order for view in range(repeats)][: num_images // batch * batch]
    assert len(set(samples)) == 96 and len({index for _, index, _ in samples}) == 20
    for rank in range(world_size):
        sampler = EpochSampler(num_images, batch, rank, world_size, seed=7, repeats=repeats)
        sampler.set_epoch(3)
        mine = list(sampler)
        assert mine == samples[rank::world_size] and len(mine) == len(sampler)
        for start in (1, 5, 8):
            sampler.set_epoch(3, start)
            assert list(sampler) == mine[start * batch // world_size :]


def test_repeats_multiple_cuts_the_epoch() -> None:
    assert (samples_per_epoch(1_281_167), samples_per_epoch(1_281_167, 256)) == (1_281_167, 1_281_024)
    assert EpochSampler(1000, 100, 0, 2, seed=0, repeats=3).steps_per_epoch == 10
    assert EpochSampler(1000, 100, 0, 2, seed=0, repeats=3, repeats_multiple=256).steps_per_epoch == 7


@pytest.mark.parametrize(
    ("num_images", "batch", "multiple", "key"),
    [
        (10, 16, None, "train.global_batch_size"),
        (100, 10, 256, "data.repeats_multiple"),
        (700, 600, 256, "data.repeats_multiple"),
    ],
)
def test_sampler_without_a_whole_batch_raises(num_images: int, batch: int, multiple: int | None, key: str) -> None:
    with pytest.raises(DataError, match=key):
        EpochSampler(num_images, batch, 0, 1, seed=0, repeats=3, repeats_multiple=multiple)


def test_repeats_problem_of_ranks_that_do_not_divide() -> None:
    assert repeats_problems(None, 3) == repeats_problems(256, 8) == []
    (problem,) = repeats_problems(256, 3)
    assert problem is not None and problem.key == "data.repeats_multiple" and "258" in problem.message


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_shard_for_eval_has_every_image_once(world_size: int) -> None:
    for num_images in (0, 1, 50, 101):
        shards = [shard_for_eval(num_images, rank, world_size) for rank in range(world_size)]
        assert sorted(i for shard in shards for i in shard) == list(range(num_images))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
