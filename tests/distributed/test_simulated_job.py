"""A job of thousands of ranks, one rank at a time, without the others.

What a rank derives from its rank and the world size alone needs no other rank: plan, samples, learning rate, banner,
and what they cost. What ranks compute together is in the other files here. (torch's fake process group was tried for a
whole `build`: it can't carry DDP's backward.)
"""

import gc
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from imagenet_cls.checkpoint.format import Progress
from imagenet_cls.config.load import config_from_dict
from imagenet_cls.config.schema import Config
from imagenet_cls.data.samplers import EpochSampler, shard_for_eval
from imagenet_cls.engine.build import TrainingParts, build
from imagenet_cls.engine.check import rank_problems
from imagenet_cls.engine.loaders import build_train_loader, build_val_batches
from imagenet_cls.engine.plan import plan_run
from imagenet_cls.engine.summary import startup_table
from imagenet_cls.optim.schedule import build_schedule
from imagenet_cls.parallel.environment import RankInfo
from imagenet_cls.parallel.process_group import Group
from imagenet_cls.seeding import generator

IMAGENET, TEST_IMAGES = 1_281_167, 50_000
GPUS_A_MACHINE = 8
# World size, global batch, micro-batch limit; then what must come out: images at once, accumulation, steps an epoch.
JOBS = [
    (8, 1024, None, 128, 1, 1251),
    (64, 4096, 32, 32, 2, 312),
    (768, 9216, None, 12, 1, 139),
    (4096, 32768, 4, 4, 2, 39),
]
each_job = pytest.mark.parametrize(("world_size", "batch", "limit", "micro", "accumulation", "steps"), JOBS)


def config_for(batch: int, limit: int | None, sync_bn: bool = False) -> Config:
    synthetic = {"train_images": IMAGENET, "val_images": TEST_IMAGES, "num_classes": 10, "size_px": 8}
    return config_from_dict(
        {
            "model": {"name": "helpers:noisy", "kwargs": {"width": 2}},
            "data": {"name": "synthetic", "kwargs": synthetic},
            "augment": {"size_px": 8},
            "eval": {"crop_px": 8, "batch_size": 4},
            "optimizer": {"lr": 3.2},
            "schedule": {"warmup_epochs": 5.0},
            "train": {"epochs": 90, "global_batch_size": batch, "micro_batch_size": limit},
            "parallel": {"sync_bn": sync_bn},
            "device": "cpu",
        }
    )


@pytest.fixture(scope="module")
def alone() -> TrainingParts:
    """All parts, of a run of one rank."""
    return build(config_for(64, None), Group(RankInfo(), torch.device("cpu")))


def on_rank(alone: TrainingParts, config: Config, rank: int, world_size: int) -> TrainingParts:
    """The parts that are another on each rank, made as `build` makes them."""
    rank_info = RankInfo(rank, rank % GPUS_A_MACHINE, world_size, GPUS_A_MACHINE, "slurm")
    group = Group(rank_info, torch.device("cpu"))
    assert alone.data.train is not None and alone.data.val is not None
    plan = plan_run(config.train, len(alone.data.train), world_size)
    return replace(
        alone,
        config=config,
        group=group,
        plan=plan,
        schedule=build_schedule(config.schedule, config.optimizer.lr, plan.steps_per_epoch, config.train.epochs),
        train_loader=build_train_loader(config, alone.data.train, plan, group, alone.evaluation.mean),
        evaluation=replace(
            alone.evaluation, batches=partial(build_val_batches, config, alone.data.val, group, num_devices=1)
        ),
    )


def count(accumulation: int) -> str:
    return f"{accumulation} accumulation step{'s' if accumulation > 1 else ''}"


@each_job
def test_first_middle_and_last_rank_have_the_right_parts(
    alone: TrainingParts, world_size: int, batch: int, limit: int | None, micro: int, accumulation: int, steps: int
) -> None:
    config = config_for(batch, limit)
    assert rank_problems(config, world_size) == []
    order = torch.randperm(IMAGENET, generator=generator("permutation", 0, 3))
    rates = []
    for rank in (0, world_size // 2, world_size - 1):
        parts = on_rank(alone, config, rank, world_size)
        rows = dict(startup_table(parts, Path("run"), Progress()))
        images, targets, *_ = next(parts.train_loader.epoch(3))
        evaluated = sum(len(indices) for _, _, indices in parts.evaluation.batches())
        plan, sampler = parts.plan, parts.train_loader.sampler
        assert (plan.micro_batch, plan.accumulation, plan.steps_per_epoch) == (micro, accumulation, steps)
        assert plan.total_steps == 90 * steps and len(images) == len(targets) == micro
        sampler.set_epoch(3, steps - 1)
        share = [index for _, index, _ in sampler]
        last = order[(steps - 1) * batch :][:batch].view(-1, world_size, accumulation)  # dealt like cards
        assert share == last[:, rank].T.flatten().tolist()
        assert len(share) == batch // world_size == micro * accumulation
        assert evaluated == len(shard_for_eval(TEST_IMAGES, rank, world_size))
        assert evaluated - TEST_IMAGES // world_size in (0, 1)
        rates.append([parts.schedule(step) for step in (0, 4 * steps, 5 * steps, 47 * steps, 90 * steps - 1)])
        assert rows["ranks"] == f"{world_size} (launcher: slurm)"
        assert rows["batch"] == f"{batch} = {world_size} ranks x {count(accumulation)} x {micro} per device"
        assert rows["BatchNorm batch"] == f"{micro} images"
        assert rows["steps"] == f"{90 * steps} ({steps} per epoch, 90 epochs)"
    assert rates[0] == rates[1] == rates[2]
    assert rates[0][2] == pytest.approx(3.2) and rates[0][0] < rates[0][1] < 3.2 > rates[0][3] > rates[0][4]


def test_with_sync_bn_the_banner_counts_the_images_of_all_ranks(alone: TrainingParts) -> None:
    rows = dict(startup_table(on_rank(alone, config_for(32768, 4, True), 4095, 4096), Path("run"), Progress()))
    assert rows["BatchNorm batch"] == "16384 images over all ranks (SyncBatchNorm)"


def tensor_bytes() -> int:
    """Bytes of all tensors that are alive."""
    storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_epoch_on_more_ranks_takes_less_memory() -> None:
    held = {}
    for world_size in (8, 512, 4096):
        sampler = EpochSampler(IMAGENET, 32768, world_size - 1, world_size, seed=0)
        sampler.set_epoch(1)
        next(iter(sampler))  # allocates what stays
        gc.collect()
        before = tensor_bytes()
        samples = iter(sampler)
        assert len(list(islice(samples, 8))) == 8
        held[world_size] = tensor_bytes() - before
        del samples
    for world_size, size in held.items():
        assert 0 < size <= 8 * (39 * 32768) // world_size, "this rank's share of the epoch and nothing else"


def test_a_batch_that_thousands_of_ranks_cannot_share_is_refused() -> None:
    config = config_for(32768, None)
    (problem,) = rank_problems(replace(config, train=replace(config.train, global_batch_size=33000)), 4096)
    assert problem.message == "33000 images do not divide among 4096 ranks; nearest that do: 32768 or 36864"
