"""The sampler: the same global batches for every world size, from any step on, and nothing evaluated twice."""

import time
from itertools import chain, islice

import pytest
import torch
from torch.utils.data import DistributedSampler

from imagenet_cls.data.samplers import EpochSampler, repeats_problem, samples_per_epoch, shard_for_eval
from imagenet_cls.errors import DataError
from imagenet_cls.seeding import generator


def test_global_batches_are_the_permutations_slices() -> None:
    sampler = EpochSampler(103, 12, 0, 1, seed=7)
    sampler.set_epoch(3)
    order = torch.randperm(103, generator=generator("permutation", 7, 3)).tolist()
    assert isinstance(sampler, DistributedSampler) and sampler.steps_per_epoch == 8
    assert list(sampler) == [(3, index, 0) for index in order[:96]]


def groups_of_an_epoch(
    num_images: int, batch: int, world_size: int, accumulation: int, devices: int = 1, repeats: int = 1
) -> list[list[list[tuple[int, int, int]]]]:
    """Of each step, the samples that go through the model together: by micro-batch, device, rank."""
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
    4: [(4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (1, 1, 4)],
    6: [(6, 1, 1), (3, 2, 1), (2, 3, 1), (1, 6, 1), (1, 3, 2)],
    8: [(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (1, 1, 8), (1, 2, 4)],
}


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize(
    ("together", "layout"), [(groups, layout) for groups, layouts in LAYOUTS.items() for layout in layouts]
)
def test_the_groups_depend_on_how_many_there_are_alone(
    together: int, layout: tuple[int, int, int], repeats: int
) -> None:
    """Ranks x micro-batches x devices; the reference is the permutation itself, every image so often in a row."""
    num_images, batch = 1003, 96
    permutation = torch.randperm(num_images, generator=generator("permutation", 7, 3)).tolist()
    order = [(3, index, view) for index in permutation for view in range(repeats)]
    for step, found in enumerate(groups_of_an_epoch(num_images, batch, *layout, repeats=repeats)):
        samples = order[step * batch : (step + 1) * batch]
        assert sorted(found) == sorted(samples[number::together] for number in range(together))
        distinct = {len({index for _, index, _ in group}) for group in found}
        assert distinct == {min(batch // together, batch // repeats)}


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_micro_batches_of_all_ranks_together_depend_on_how_many_there_are_in_turn(accumulation: int) -> None:
    """What synchronised BatchNorm sees: on one, two, four devices the same images."""
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


def test_starts_at_any_step_and_epochs_differ() -> None:
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


def test_fewer_images_than_a_batch_is_an_error() -> None:
    with pytest.raises(DataError, match=r"10 training images .* 16\nset train.global_batch_size to at most 10"):
        EpochSampler(10, 16, 0, 1, seed=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_repeats_come_one_after_the_other_each_its_own_view(world_size: int) -> None:
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


def test_an_epoch_is_cut_to_a_multiple() -> None:
    assert (samples_per_epoch(1_281_167), samples_per_epoch(1_281_167, 256)) == (1_281_167, 1_281_024)
    assert EpochSampler(1000, 100, 0, 2, seed=0, repeats=3).steps_per_epoch == 10
    assert EpochSampler(1000, 100, 0, 2, seed=0, repeats=3, repeats_multiple=256).steps_per_epoch == 7
    with pytest.raises(
        DataError, match=r"100 training images, cut to a multiple of 256, leave none\n.*multiple to null"
    ):
        EpochSampler(100, 10, 0, 1, seed=0, repeats=3, repeats_multiple=256)
    with pytest.raises(
        DataError, match=r"700 training .* cut to 512 samples, .* batch of 600\n.*repeats_multiple, now 256"
    ):
        EpochSampler(700, 600, 0, 1, seed=0, repeats=3, repeats_multiple=256)


def test_a_multiple_that_does_not_divide_among_ranks_is_a_problem() -> None:
    assert repeats_problem(None, 3) is None and repeats_problem(256, 8) is None
    problem = repeats_problem(256, 3)
    assert problem is not None and problem.key == "data.repeats_multiple"
    assert problem.message.startswith("256 samples do not divide among 3 ranks") and "258" in problem.message


def test_an_epoch_of_imagenet_is_ready_at_once() -> None:
    sampler = EpochSampler(1_281_167, 1024, 3, 8, seed=0)
    times = []
    for epoch in range(3):
        sampler.set_epoch(epoch, 1000)
        begin = time.perf_counter()
        assert len(list(islice(sampler, 256))) == 256
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.3


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_evaluation_shards_are_exact(world_size: int) -> None:
    for num_images in (0, 1, 50, 101):
        shards = [shard_for_eval(num_images, rank, world_size) for rank in range(world_size)]
        assert sorted(i for shard in shards for i in shard) == list(range(num_images))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
