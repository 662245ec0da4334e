"""One, two, three and four real ranks: they read the same samples, count the same, and start from the same weights.

Also as many micro-batches in turn instead: the groups of images that go through the model together are the same; what
mixes them is drawn for each by itself.
"""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import RankServer, destroy_group, join_group
from helpers import arguments, losses, train_here
from torch import nn

from imagenet_cls.config.schema import AugmentConfig, Config, DataConfig, ErasingConfig, MixConfig, TrainConfig
from imagenet_cls.data.device import Preprocess, TrainPreprocess, build_mixing
from imagenet_cls.data.loader import TrainBatch, TrainLoader, eval_batches
from imagenet_cls.data.samplers import EpochSampler, shard_for_eval
from imagenet_cls.data.transforms import TrainTransform
from imagenet_cls.engine.evaluate import evaluate, model_outputs
from imagenet_cls.engine.loaders import build_train_loader
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.errors import ResourceError
from imagenet_cls.guards.replicas import check_same_weights
from imagenet_cls.parallel.collectives import gather_to_main
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.parallel.sync_bn import synchronize_batch_norm
from imagenet_cls.parallel.wrap import BatchNormStatistics, broadcast_buffers, wrap_model
from imagenet_cls.report.log import close_log
from imagenet_cls.seeding import hash_key, seed_generators

WORLD_SIZES = (1, 2, 3, 4)
BATCHES = {12: 1, 48: 2}  # and in how many micro-batches each
TEST_IMAGES = (359, 361)


class Numbered:
    """Images of 2 x 2 pixels whose pixels and target spell their own number."""

    classes = tuple("abcdefg")

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def load(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([i // 256, i % 256, 7 * i % 256], dtype=torch.uint8).view(3, 1, 1).expand(3, 2, 2), i % 7

    def name(self, i: int) -> str:
        return str(i)

    def digest(self) -> str:
        return "numbered"


def same(image: torch.Tensor) -> torch.Tensor:
    return image


def numbers_of(images: torch.Tensor) -> list[int]:
    """Which of `Numbered`'s images these are."""
    return (images[:, 0, 0, 0].int() * 256 + images[:, 1, 0, 0].int()).tolist()


def steps_read(group: Group, batch: int, accumulation: int) -> list[list[int]]:
    """On rank 0, for each step of an epoch the sorted numbers that all ranks' loaders read; from step 1 on."""
    sampler = EpochSampler(103, batch, group.rank, group.world_size, seed=3)
    micro_batch = batch // group.world_size // accumulation
    whole = TrainTransform(AugmentConfig(size_px=2, scale=[1.0, 1.0], ratio=[1.0, 1.0]))
    loader = TrainLoader(Numbered(103), whole, sampler, micro_batch, 3, num_workers=0)
    micro_batches = [numbers_of(batch.images) for batch in loader.epoch(epoch=2, start_step=1)]
    rows = [(index // accumulation, number) for index, numbers in enumerate(micro_batches) for number in numbers]
    gathered = gather_to_main(rows, group)
    steps = max((step for step, _ in gathered), default=-1) + 1
    return [sorted(number for step, number in gathered if step == wanted) for wanted in range(steps)]


def counts(group: Group, num_images: int) -> dict[str, Any]:
    source, shard = Numbered(num_images), shard_for_eval(num_images, group.rank, group.world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 7))
    batches = eval_batches(source, same, shard, 50, num_workers=0)
    outputs = model_outputs({"raw": model}, batches, lambda images: images.float() / 255, group.device, None)
    result = evaluate(outputs, ["raw"], group)["raw"]
    return {name: value for name, value in result.items() if name != "seconds"}


def starting_weights(group: Group) -> None:
    """Whatever each rank drew or read: after `wrap` it has rank 0's, in buffers of any type and layout, too."""
    torch.manual_seed(group.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model.register_buffer("table", torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    model.register_buffer("mask", torch.rand(5) > 0.5)
    model.register_buffer("nothing", torch.empty(0))
    model[1].running_mean.fill_(group.rank + 1.0)  # type: ignore[union-attr,operator]
    own = {name: value.clone() for name, value in model.state_dict().items()}
    wrap_model(model, group, "auto")
    assert model[1].running_mean.tolist() == [1.0] * 4  # type: ignore[union-attr,operator]
    assert model.table.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr,operator]
    handed_out = {name: value.clone() for name, value in model.state_dict().items()}
    assert (handed_out["table"] == own["table"]).all() == (group.rank == 0)
    for name in ("0.weight", "1.running_var", "mask"):
        model.load_state_dict(handed_out)
        check_same_weights(model, group)
        if group.rank in (1, 3):
            value = model.state_dict()[name].view(-1)
            value[0] = not value[0] if value.dtype is torch.bool else torch.nextafter(value[0], torch.tensor(9.0))
        if group.world_size > 1:
            listing = "rank 1" if group.world_size < 4 else "ranks 1, 3"
            diverged = rf"{listing} \(.*\) of {group.world_size} differ from the rest at the start, in {name}\.\n"
            with pytest.raises(ResourceError, match=diverged):
                check_same_weights(model, group)
    broadcast_buffers(model)
    model[0].load_state_dict({name[2:]: value for name, value in handed_out.items() if name.startswith("0.")})
    check_same_weights(model, group)


def synchronised_statistics_stay(group: Group) -> None:
    """They are equal on all ranks as they come; averaging them would change last bits on three ranks."""
    model = synchronize_batch_norm(nn.BatchNorm1d(64), group)
    statistics = BatchNormStatistics(model, group)
    model(torch.randn(5, 64, generator=torch.Generator().manual_seed(group.rank)))
    before = [buffer.clone() for buffer in statistics.buffers]
    statistics.sync(torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(statistics.buffers, before, strict=True))
    check_same_weights(model, group)


def everything(rank: int, world_size: int, folder: Path) -> None:
    """The proofs of this file for one world size after the other, by the first ranks of four."""
    for size in WORLD_SIZES:
        if rank < size:
            group = join_group(rank, size, folder / f"store{size}")
            found = {
                "read": {batch: steps_read(group, batch, micro) for batch, micro in BATCHES.items()},
                "counted": {number: counts(group, number) for number in TEST_IMAGES},
            }
            if rank == 0:
                (folder / f"{size}.json").write_text(json.dumps(found))
            if size > 1:
                starting_weights(group)
                synchronised_statistics_stay(group)
                destroy_group(group)


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What rank 0 of each world size saw; the ranks' own assertions have passed then."""
    folder = tmp_path_factory.mktemp("ranks")
    rank_server.call(everything, max(WORLD_SIZES), folder)
    return {size: json.loads((folder / f"{size}.json").read_text()) for size in WORLD_SIZES}


@pytest.mark.parametrize("batch", BATCHES)
def test_every_step_reads_the_same_samples_on_any_number_of_ranks(found: dict[int, dict[str, Any]], batch: int) -> None:
    alone = found[1]["read"][str(batch)]
    assert len(alone) == 103 // batch - 1 and all(len(set(step)) == batch for step in alone)
    assert all(found[size]["read"][str(batch)] == alone for size in WORLD_SIZES)


@pytest.mark.parametrize("images", TEST_IMAGES)
def test_evaluations_count_the_same_on_any_number_of_ranks(found: dict[int, dict[str, Any]], images: int) -> None:
    alone = found[1]["counted"][str(images)]
    assert alone["images"] == images and 0 < alone["top1_pct"] < 100
    for size in WORLD_SIZES:
        result = found[size]["counted"][str(images)]
        assert [result[name] for name in ("images", "top1_pct", "top5_pct")] == [
            alone[name] for name in ("images", "top1_pct", "top5_pct")
        ]
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("start_step", [0, 1])
def test_ranks_partition_each_step(batch: int, world_size: int, start_step: int) -> None:
    """The sampler by itself: every step's share on each rank, together the step of one rank, none twice."""

    def steps(rank: int, size: int) -> list[list[int]]:
        sampler = EpochSampler(1438, batch, rank, size, seed=0)
        sampler.set_epoch(1, start_step)
        numbers, share = [index for _, index, _ in sampler], batch // size
        return [numbers[begin : begin + share] for begin in range(0, len(numbers), share)]

    alone, shares = steps(0, 1), list(map(partial(steps, size=world_size), range(world_size)))
    assert len(alone) == 1438 // batch - start_step
    for step, expected in enumerate(alone):
        assert sorted(number for rank in shares for number in rank[step]) == sorted(expected)


def test_gpus_of_one_process_and_micro_batches_see_the_groups_of_ranks() -> None:
    """By the loader that a run has: eight at once; four, two, one with micro-batches in turn; also by DataParallel."""

    def steps(world_size: int, micro_batch: int, devices: int = 1) -> list[list[list[int]]]:
        """Of each step the groups of images that go through the model together."""
        train = TrainConfig(global_batch_size=64, micro_batch_size=micro_batch)
        config = replace(
            Config(), train=train, data=DataConfig(repeats=4, num_workers=0), augment=AugmentConfig(size_px=2)
        )
        plan = plan_run(train, 103, world_size, devices)
        groups: list[list[list[int]]] = [[] for _ in range(plan.steps_per_epoch)]
        for rank in range(world_size):
            group = Group(RankInfo(rank, rank, world_size, world_size), torch.device("cpu"))
            loader = build_train_loader(config, Numbered(103), plan, group, (0.0, 0.0, 0.0))
            for number, batch in enumerate(loader.epoch(2)):
                groups[number // plan.accumulation] += map(sorted, batch.targets.split(plan.micro_batch))
        return [sorted([[int(target) for target in group] for group in step]) for step in groups]

    at_once = steps(8, 8)
    assert [len(step) for step in at_once] == [8]
    for layout in ((4, 8), (2, 8), (1, 8), (1, 8, 2), (1, 8, 8)):
        assert steps(*layout) == at_once


def test_with_batch_norm_two_ranks_repeat_one_that_takes_two_micro_batches(
    digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    """The losses: BatchNorm normalises the same groups. (Its running statistics move once a step on ranks, and twice in
    turn; training never reads them.)"""
    settings = {
        "model__kwargs": "{dropout: 0.0}",
        "data__repeats": 4,
        "train__max_steps": 5,
        "schedule__warmup_epochs": 0,
    }
    words = partial(arguments, digits, model="noisy", train__global_batch_size=64, **settings)
    for folder, micro_batch in (("turns", 32), ("other", 16)):
        train_here(words(work_dir=tmp_path / folder, train__micro_batch_size=micro_batch))
        close_log()
    two = words(work_dir=tmp_path / "two", parallel__init_method=f"file://{tmp_path / 'store'}")
    assert rank_server.run(two, tmp_path / "said", ranks=2) == [0, 0], (tmp_path / "said").read_text()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "turns"), rel=1e-5)
    assert losses(tmp_path / "other") != pytest.approx(losses(tmp_path / "turns"), rel=1e-3), "it is about something"


MIX = MixConfig(mixup_alpha=0.8)
SEED, STEPS, MICRO_BATCHES, RANKS = 11, (4, 5), (0, 1), 2


def numbered_batch() -> tuple[Preprocess, TrainBatch]:
    source = Numbered(6)
    images, targets = zip(*map(source.load, range(6)), strict=True)
    preprocess = Preprocess((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), torch.device("cpu"), channels_last=False)
    return preprocess, TrainBatch(torch.stack(images), torch.tensor(targets))


def mix_on_each_rank(rank: int, world_size: int, folder: Path) -> None:
    """The same images in every micro-batch, so that only what is drawn differs."""
    preprocess, batch = numbered_batch()
    group = join_group(rank, world_size, folder / "store")
    prepare = TrainPreprocess(preprocess, ErasingConfig(), build_mixing(MIX, 7), SEED, group.rank)
    for step in STEPS:
        for micro_batch in MICRO_BATCHES:
            mixture = prepare(batch, epoch=0, step=step, micro_batch=micro_batch)
            torch.save(mixture, folder / f"{step}-{micro_batch}-{rank}.pt")
    destroy_group(group)


def test_every_micro_batch_of_every_rank_is_mixed_by_a_key_of_its_own(rank_server: RankServer, tmp_path: Path) -> None:
    """(seed, step, micro-batch, rank): draws apart from each other, and each the one of its key."""
    rank_server.call(mix_on_each_rank, RANKS, tmp_path)
    (preprocess, batch), mixing, seen = numbered_batch(), build_mixing(MIX, 7), []
    assert mixing is not None
    for key in product(STEPS, MICRO_BATCHES, range(RANKS)):
        mixture = torch.load(tmp_path / "{}-{}-{}.pt".format(*key))
        seed_generators(hash_key("mix", SEED, *key))
        assert all(map(torch.equal, mixture, mixing(preprocess(batch.images), batch.targets, 0)))
        seen.append(tuple(mixture[1].flatten().tolist()))
    assert len(set(seen)) == len(seen) == 8
