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
    EvalConfig,
)
from imagenet_cls.data.image_set import indexed_images
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.loader import TrainLoader, WorkerOptions, eval_batches
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.synthetic import SyntheticLoader, repeat_first_batch
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


def test_synthetic_batches_are_the_first_ones_again_and_again(image_folder: Path) -> None:
    loader = train_loader(image_folder, 0)
    first = list(loader.epoch(1))[:2]
    steps = loader.sampler.steps_per_epoch
    source = indexed_images(index_folder(image_folder / "train"))
    device = torch.device("cpu")
    synthetic = SyntheticLoader(source, TrainTransform(AUGMENT), loader.sampler, 5, device)
    assert same(list(synthetic.epoch(1)), first * steps)
    assert same(list(synthetic.epoch(1, start_step=2)), first * (steps - 2))
    batches = eval_batches(source, EvalTransform(EVAL), range(4), 4, WorkerOptions())
    evaluated = list(repeat_first_batch(batches, range(3, 10), 4, device))
    assert [indices.tolist() for *_, indices in evaluated] == [[3, 4, 5, 6], [7, 8, 9]]
    assert [len(images) for images, *_ in evaluated] == [4, 3]
