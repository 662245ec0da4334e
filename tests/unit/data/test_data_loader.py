"""Loaders: the same bits for any number of workers, and the errors of bad images."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imagenet_cls.config.schema import (
    AugmentConfig,
    ColorJitterConfig,
    ErasingConfig,
    EvalConfig,
    ProgressiveConfig,
)
from imagenet_cls.data.image_set import indexed_images
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.loader import TrainBatch, TrainLoader, WorkerOptions, eval_batches
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.synthetic import SyntheticLoader, synthetic_eval_batches
from imagenet_cls.data.transforms import EvalTransform, TrainTransform
from imagenet_cls.seeding import seed_generators

AUGMENT = AugmentConfig(size_px=24, color_jitter=ColorJitterConfig(brightness=0.3))
EVAL = EvalConfig(crop_px=24)


def train_loader(folder: Path, num_workers: int, num_epochs: int = 0) -> TrainLoader:
    source = indexed_images(index_folder(folder / "train"))
    sampler = EpochSampler(len(source), 8, 0, 1, seed=5, accumulation=2)
    options = WorkerOptions(num_workers)
    return TrainLoader(source, TrainTransform(AUGMENT), sampler, 5, options, num_epochs)


def same(one: Sequence[tuple[Any, ...]], other: Sequence[tuple[Any, ...]]) -> bool:
    """Whether these are the same batches: images, targets and what else there is. None equals only
    None.
    """
    return len(one) == len(other) and all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_loader_same_bits_for_any_number_of_workers(image_folder: Path, num_workers: int) -> None:
    """How the bits depend on keys: `test_data_batches.py`."""
    reference = list(train_loader(image_folder, 0).epoch(1))
    loader = train_loader(image_folder, num_workers)
    batches = list(loader.epoch(1))
    assert batches[0][0].dtype == torch.uint8 and batches[0][0].shape == (4, 3, 24, 24)
    assert batches[0][1].dtype == torch.int64
    assert same(batches, reference)
    # an unfinished epoch, one started at a step, and the next epoch, with the same workers
    abandoned = loader.epoch(1)
    next(abandoned)
    assert same(list(loader.epoch(1, start_step=3)), reference[6:])
    assert not same(list(loader.epoch(2)), reference)
    loader.close()
    loader.close()  # may be called again


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_reads_ahead_into_the_next_epoch(image_folder: Path, num_workers: int) -> None:
    expected = train_loader(image_folder, 0)
    loader = train_loader(image_folder, num_workers, num_epochs=3)
    for epoch, start in ((0, 2), (1, 0), (2, 0)):
        batches = loader.epoch(epoch, start)
        # The iterator is not exhausted, as in `train`.
        steps = [next(batches) for _ in range(2 * (loader.sampler.steps_per_epoch - start))]
        assert same(steps, list(expected.epoch(epoch, start)))
        if num_workers:  # `sampler.epoch` is that of the last keys sent to a worker
            assert loader.sampler.epoch == min(epoch + 1, 2)
        assert next(batches, None) is None
    assert same(list(loader.epoch(0)), list(expected.epoch(0)))  # not the next one
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_leaves_the_default_generators_alone(image_folder: Path, num_workers: int) -> None:
    def draws() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    seed_generators(99)
    expected = draws()
    seed_generators(99)
    loader = train_loader(image_folder, num_workers)
    list(loader.epoch(0))
    loader.close()
    source, options = indexed_images(index_folder(image_folder / "val")), WorkerOptions(num_workers)
    list(eval_batches(source, EvalTransform(EVAL), range(len(source)), 4, options))
    assert draws() == expected


def test_workers_ignore_signals_of_the_process_group_and_end_at_close(image_folder: Path) -> None:
    loader = train_loader(image_folder, 2)
    epoch = loader.epoch(0)
    next(epoch)
    next(epoch)  # the second worker's first batch: both have started
    workers = multiprocessing.active_children()
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            os.kill(worker.pid, number)
    time.sleep(0.2)
    assert len(workers) == 2 and len(list(epoch)) == 8
    loader.close()
    assert not multiprocessing.active_children()


def test_synthetic_batches_are_a_function_of_their_key() -> None:
    """With two splits, of which the second is erased, and images that grow."""
    device = torch.device("cpu")
    augment = AugmentConfig(
        size_px=32,
        splits=2,
        erasing=ErasingConfig(prob=0.5),
        progressive=ProgressiveConfig([0.0, 1.0], [16, 32], 16),
    )

    def batches(epoch: int, start: int = 0, rank: int = 0, seed: int = 1) -> list[TrainBatch]:
        sampler = EpochSampler(64, 15, rank, 2, seed, accumulation=2)
        return list(SyntheticLoader(10, sampler, augment, seed, device).epoch(epoch, start))

    seed_generators(99)
    next_draw = random.random()
    seed_generators(99)
    epochs = [batches(number) for number in range(3)]
    assert random.random() == next_draw
    for side, epoch in zip((16, 32, 32), epochs, strict=True):
        for images, targets, boxes, keys in epoch:
            assert images.shape == (8, 3, side, side) and targets.shape == (4,)
            assert len(set(keys.tolist())) == 8
            assert boxes.shape == (8, 1, 4) and not boxes[:4].any()
    assert any(batch.boxes.any() for batch in epochs[2])
    assert same(epochs[2][4:], batches(2, start=2))
    other_rank = batches(2, rank=1)
    assert [len(batch.targets) for batch in other_rank] == [4, 3] * 4
    for other in (other_rank, batches(2, seed=2), epochs[1]):
        assert not torch.equal(epochs[2][0].images, other[0].images)
    evaluated = list(synthetic_eval_batches(10, range(3, 10), 4, 16, 1, device))
    assert [indices.tolist() for *_, indices in evaluated] == [[3, 4, 5, 6], [7, 8, 9]]
    assert [len(images) for images, *_ in evaluated] == [4, 3]
