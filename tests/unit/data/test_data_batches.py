"""Batches with policies, erasing, repeats, splits and growing images: the same bits for any number
of workers.
"""

import random
from pathlib import Path

import pytest
import torch
from test_data_loader import same

from imagenet_cls.config.schema import (
    AugmentConfig,
    ColorJitterConfig,
    ErasingConfig,
    ProgressiveConfig,
)
from imagenet_cls.data.builtin import SyntheticLoader
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.loader import TrainBatch, TrainLoader, WorkerOptions
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.sources import FolderSource
from imagenet_cls.data.transforms import TrainTransform, draw_boxes
from imagenet_cls.seeding import hash_key, seed_generators


@pytest.mark.parametrize(
    "policy",
    ["rand-m9-mstd0.5-inc1", "torchvision:aug_mix", "test_data_policies:sprinkle"],
)
def test_policy_same_bits_for_any_number_of_workers(image_folder: Path, policy: str) -> None:
    augment = AugmentConfig(
        size_px=24,
        policy=policy,
        interpolation="random",
        color_jitter=ColorJitterConfig(prob=0.5, hue=0.1),
        grayscale_prob=0.1,
        erasing=ErasingConfig(prob=0.5, mode="pixel", max_count=2),
    )
    source = FolderSource(index_folder(image_folder / "train"))

    def epoch(num_workers: int) -> list[TrainBatch]:
        sampler = EpochSampler(len(source), 4, 0, 1, seed=5, repeats=2)
        loader = TrainLoader(
            source, TrainTransform(augment), sampler, 5, WorkerOptions(num_workers)
        )
        batches = list(loader.epoch(1))
        loader.close()
        return batches

    alone = epoch(0)
    assert same(alone, epoch(2)) and len(alone) == 10
    images, _, boxes, keys = (torch.cat(tensors) for tensors in zip(*alone, strict=True))
    assert keys.dtype == torch.int64 and len(set(keys.tolist())) == 40
    assert boxes.dtype == torch.int32 and boxes.shape == (40, 2, 4)
    assert 8 <= boxes.any(-1).any(-1).sum() <= 32
    assert (images[::2] != images[1::2]).flatten(1).any(1).all(), "repeats"


def test_images_are_ordered_by_split_and_only_later_ones_are_augmented(image_folder: Path) -> None:
    augment = AugmentConfig(
        size_px=24, policy="rand-m9", erasing=ErasingConfig(prob=1.0, mode="rand"), splits=3
    )
    source, transform = FolderSource(index_folder(image_folder / "train")), TrainTransform(augment)
    order = EpochSampler(40, 4, 0, 1, 5, repeats=2)
    order.set_epoch(1)
    samples = list(order)
    loader = TrainLoader(
        source, transform, EpochSampler(40, 4, 0, 1, 5, repeats=2), 5, WorkerOptions()
    )
    for number, batch in enumerate(loader.epoch(1)):
        assert batch.images.shape == (12, 3, 24, 24) and batch.targets.shape == (4,)
        images, boxes, keys = batch.images.split(4), batch.boxes.split(4), batch.keys.split(4)
        for place, (epoch, index, repeat) in enumerate(samples[number * 4 : number * 4 + 4]):
            expected = [
                hash_key("sample", 5, epoch, index, repeat * 3 + split) for split in range(3)
            ]
            assert [int(split_keys[place]) for split_keys in keys] == expected
            image, target = source.load(index)
            seed_generators(expected[0])
            base = transform.crop_and_flip(image, epoch)
            assert torch.equal(images[0][place], base) and int(batch.targets[place]) == target
            for split in (1, 2):
                seed_generators(expected[split])
                assert torch.equal(images[split][place], transform.color_transforms(base))
                assert boxes[split][place].tolist() == [
                    list(box) for box in draw_boxes(augment.erasing, 24)
                ]
        assert not boxes[0].any() and boxes[1].any() and boxes[2].any()


def test_image_size_grows_between_epochs_with_the_same_workers(image_folder: Path) -> None:
    augment = AugmentConfig(
        size_px=32,
        policy="3a",
        progressive=ProgressiveConfig([0.0, 2.0], [16, 32], 8),
        erasing=ErasingConfig(prob=0.9),
    )
    source = FolderSource(index_folder(image_folder / "train"))
    ours, alone = (
        TrainLoader(
            source,
            TrainTransform(augment),
            EpochSampler(40, 4, 0, 1, 5),
            5,
            WorkerOptions(num_workers),
        )
        for num_workers in (2, 0)
    )
    for epoch, side in enumerate((16, 24, 32, 32)):
        batches = list(ours.epoch(epoch, start_step=epoch))
        assert {batch.images.shape[2:] for batch in batches} == {(side, side)}
        for batch in batches:
            assert (batch.boxes[..., :2] + batch.boxes[..., 2:]).max() <= side
        assert same(batches, list(alone.epoch(epoch, start_step=epoch)))
    ours.close()


def test_synthetic_batches_have_sizes_splits_and_boxes() -> None:
    augment = AugmentConfig(
        size_px=32,
        progressive=ProgressiveConfig([0.0, 1.0], [16, 32], 16),
        splits=2,
        erasing=ErasingConfig(prob=0.5),
    )
    device = torch.device("cpu")

    def loader() -> SyntheticLoader:
        return SyntheticLoader(
            10, EpochSampler(64, 16, 0, 1, 1, accumulation=2), augment, 1, device
        )

    seed_generators(3)
    expected = random.random()
    seed_generators(3)
    ours = loader()
    for epoch, side in enumerate((16, 32, 32)):
        batches = list(ours.epoch(epoch))
        assert len(batches) == 8 and same(batches, list(loader().epoch(epoch)))
        for images, targets, boxes, keys in batches:
            assert images.shape == (16, 3, side, side) and targets.shape == (8,)
            assert boxes.shape == (16, 1, 4) and not boxes[:8].any() and boxes[8:].any()
            assert len(set(keys.tolist())) == 16
    assert random.random() == expected
    assert len(list(ours.epoch(0, 2))) == 4
    for rank, counts in ((0, [4, 4]), (1, [4, 3])):
        sampler = EpochSampler(64, 15, rank, 2, 1, accumulation=2)
        batches = list(SyntheticLoader(10, sampler, augment, 1, device).epoch(0, 2))
        assert [len(batch.targets) for batch in batches] == counts * 2
        assert [len(batch.images) for batch in batches] == [2 * count for count in counts] * 2
