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

from imagenet_cls.config.schema import AugmentConfig, ColorJitterConfig, EvalConfig
from imagenet_cls.data.builtin import SyntheticLoader, synthetic_eval_batches
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.loader import TrainBatch, TrainLoader, WorkerOptions, eval_batches
from imagenet_cls.data.samplers import EpochSampler, shard_for_eval
from imagenet_cls.data.sources import FolderSource
from imagenet_cls.data.transforms import EvalTransform, TrainTransform
from imagenet_cls.errors import DataError
from imagenet_cls.seeding import hash_key, seed_generators

AUGMENT = AugmentConfig(size_px=24, color_jitter=ColorJitterConfig(brightness=0.3))
EVAL = EvalConfig(crop_px=24)


def train_loader(
    folder: Path, num_workers: int, prefetch_batches: int = 2, num_epochs: int = 0
) -> TrainLoader:
    source = FolderSource(index_folder(folder / "train"))
    sampler = EpochSampler(len(source), 8, 0, 1, seed=5, accumulation=2)
    options = WorkerOptions(num_workers, prefetch_batches)
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


@pytest.fixture(scope="module")
def reference(image_folder: Path) -> list[TrainBatch]:
    """Epoch 1, made from the keys without a loader."""
    source, transform = FolderSource(index_folder(image_folder / "train")), TrainTransform(AUGMENT)
    sampler = EpochSampler(len(source), 8, 0, 1, seed=5, accumulation=2)
    sampler.set_epoch(1)
    samples = []
    for epoch, index, repeat in sampler:
        image, target = source.load(index)
        key = hash_key("sample", 5, epoch, index, repeat)
        seed_generators(key)
        samples.append((transform(image, epoch, [key])[0][0], target))
    chunks = [samples[i : i + 4] for i in range(0, len(samples), 4)]
    return [
        TrainBatch(torch.stack([image for image, _ in c]), torch.tensor([t for _, t in c]))
        for c in chunks
    ]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_loader_same_bits_for_any_number_of_workers(
    image_folder: Path, reference: list[tuple[torch.Tensor, ...]], num_workers: int
) -> None:
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
    loader.close()
    assert same(list(loader.epoch(1)), reference)
    loader.close()


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
    seed_generators(99)
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    seed_generators(99)
    loader = train_loader(image_folder, num_workers)
    list(loader.epoch(0))
    loader.close()
    source = FolderSource(index_folder(image_folder / "val"))
    list(
        eval_batches(source, EvalTransform(EVAL), range(len(source)), 4, WorkerOptions(num_workers))
    )
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_with_a_bad_image_raises_data_error(
    tmp_path: Path, image_folder: Path, num_workers: int
) -> None:
    images = sorted((image_folder / "train" / "eel").iterdir())
    for number, image in enumerate(images[:16]):
        (tmp_path / "train" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        content = image.read_bytes()
        (tmp_path / "train" / "ab"[number % 2] / image.name).write_bytes(
            content[:200] if number == 11 else content
        )
    bad = f"{tmp_path}/train/b/011.JPEG (image 13)"
    loader = train_loader(tmp_path, num_workers)
    for _ in range(2):  # the loader can be used again
        with pytest.raises(DataError) as error:
            list(loader.epoch(0))
        assert bad in str(error.value) and len(str(error.value).splitlines()) <= 3
    loader.close()
    source = FolderSource(index_folder(tmp_path / "train"))
    with pytest.raises(DataError) as error:
        list(eval_batches(source, EvalTransform(EVAL), [12, 13], 4, WorkerOptions(num_workers)))
    assert bad in str(error.value)


@pytest.mark.parametrize(("num_workers", "world_size"), [(0, 1), (2, 2)])
def test_eval_batches_have_every_image_once(
    image_folder: Path, num_workers: int, world_size: int
) -> None:
    source, transform = FolderSource(index_folder(image_folder / "val")), EvalTransform(EVAL)
    seen: list[int] = []
    for rank in range(world_size):
        shard = shard_for_eval(len(source), rank, world_size)
        for images, targets, indices in eval_batches(
            source, transform, shard, 4, WorkerOptions(num_workers)
        ):
            assert len(images) == len(targets) == len(indices) <= 4
            for image, target, index in zip(images, targets, indices.tolist(), strict=True):
                pixels, expected = source.load(index)
                assert torch.equal(image, transform(pixels)) and int(target) == expected
            seen.extend(indices.tolist())
    assert sorted(seen) == list(range(len(source)))


def test_workers_ignore_signals_of_the_process_group_and_end_at_close(image_folder: Path) -> None:
    loader = train_loader(image_folder, 2, prefetch_batches=1)
    epoch = loader.epoch(0)
    next(epoch)
    next(epoch)  # the second worker's first batch: both have started
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            os.kill(worker.pid, number)
    time.sleep(0.2)
    assert len(list(epoch)) == 8
    loader.close()
    assert not multiprocessing.active_children()


def test_synthetic_batches_are_a_function_of_their_key() -> None:
    device = torch.device("cpu")

    def epoch(rank: int, seed: int, number: int = 0, start: int = 0) -> list[TrainBatch]:
        sampler = EpochSampler(1000, 16, rank, 2, seed, accumulation=2)
        return list(
            SyntheticLoader(10, sampler, AugmentConfig(16), seed, device).epoch(number, start)
        )

    first = epoch(0, 1)
    assert (
        len(first) == 62 * 2
        and first[0][0].shape == (4, 3, 16, 16)
        and first[0][0].dtype == torch.uint8
    )
    assert same(first, epoch(0, 1)) and same(first[10:], epoch(0, 1, start=5))
    assert (
        not same(first, epoch(1, 1))
        and not same(first, epoch(0, 2))
        and not same(first, epoch(0, 1, number=1))
    )
    assert len({tuple(batch.images.flatten().tolist()) for batch in first}) == 4
    batches = list(synthetic_eval_batches(10, range(3, 13), 4, 16, 1, device))
    assert [len(images) for images, _, _ in batches] == [4, 4, 2]
    assert torch.cat([indices for _, _, indices in batches]).tolist() == list(range(3, 13))
