"""Batches with policies, erasing, repeats, splits and growing images: the same bits for any number
of workers.
"""

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
from imagenet_cls.data.image_set import indexed_images
from imagenet_cls.data.index import index_folder
from imagenet_cls.data.loader import TrainLoader, WorkerOptions
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.transforms import TrainTransform, draw_boxes
from imagenet_cls.seeding import hash_key, seed_generators


def test_images_are_ordered_by_split_and_only_later_ones_are_augmented(image_folder: Path) -> None:
    augment = AugmentConfig(
        size_px=24, policy="rand-m9", erasing=ErasingConfig(prob=1.0, mode="rand"), splits=3
    )
    source, transform = (
        indexed_images(index_folder(image_folder / "train")),
        TrainTransform(augment),
    )
    order = EpochSampler(40, 4, 0, 1, 5, repeats=2)
    order.set_epoch(1)
    samples = list(order)
    loader = TrainLoader(
        source, transform, EpochSampler(40, 4, 0, 1, 5, repeats=2), 5, WorkerOptions()
    )
    for number, batch in enumerate(loader.epoch(1)):
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
        assert not boxes[0].any()


@pytest.mark.parametrize(
    "policy",
    ["rand-m9-mstd0.5-inc1", "torchvision:aug_mix", "test_data_policies:sprinkle"],
)
def test_augmented_batches_same_bits_for_any_number_of_workers(
    image_folder: Path, policy: str
) -> None:
    """With repeats, and images that grow between epochs, from any step on."""
    augment = AugmentConfig(
        size_px=32,
        policy=policy,
        interpolation="random",
        color_jitter=ColorJitterConfig(prob=0.5, hue=0.1),
        grayscale_prob=0.1,
        erasing=ErasingConfig(prob=0.5, mode="pixel", max_count=2),
        progressive=ProgressiveConfig([0.0, 2.0], [16, 32], 8),
    )
    source = indexed_images(index_folder(image_folder / "train"))

    def loader(num_workers: int) -> TrainLoader:
        sampler = EpochSampler(len(source), 4, 0, 1, seed=5, repeats=2)
        return TrainLoader(source, TrainTransform(augment), sampler, 5, WorkerOptions(num_workers))

    ours, alone = loader(2), loader(0)
    for epoch, side in enumerate((16, 24, 32)):
        batches = list(ours.epoch(epoch, start_step=epoch))
        assert same(batches, list(alone.epoch(epoch, start_step=epoch)))
        images, _, boxes, keys = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        count = 40 - 4 * epoch
        assert images.shape == (count, 3, side, side) and boxes.shape == (count, 2, 4)
        assert len(set(keys.tolist())) == count
        assert boxes.any()
        assert (images[::2] != images[1::2]).flatten(1).any(1).all(), "repeats"
    ours.close()
