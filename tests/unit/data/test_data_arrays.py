"""Datasets of torchvision that hold all images in one array: the bits of the path by Pillow."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets
from test_data_loader import same

from imagenet_cls.config.schema import (
    AugmentConfig,
    DataConfig,
    ErasingConfig,
)
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.loader import TrainBatch, TrainLoader, WorkerOptions
from imagenet_cls.data.map_style import ArrayImages, MapImages
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.transforms import TrainTransform

DRAWS = np.random.RandomState(0)
PIXELS = DRAWS.randint(0, 256, (40, 3, 28, 28)).astype(np.uint8)
TARGETS = DRAWS.randint(0, 10, 40)


class Colored(torchvision.datasets.CIFAR10):
    """CIFAR-10 with random pixels, without its files. As there, the array is a view of planes."""

    def __init__(self, root: str, train: bool = True, download: bool = False):
        torchvision.datasets.VisionDataset.__init__(self, root)
        self.data = PIXELS.transpose(0, 2, 3, 1)
        self.targets = TARGETS.tolist()
        self.classes = list("abcdefghij")


class Gray(torchvision.datasets.FashionMNIST):
    """Fashion-MNIST with random pixels, without its files."""

    def __init__(self, root: str, train: bool = True, download: bool = False):
        torchvision.datasets.VisionDataset.__init__(self, root)
        self.data = torch.from_numpy(PIXELS[:, 0])
        self.targets = torch.from_numpy(TARGETS)


class Mirrored(Colored):
    """Its items are not the images of the array."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image.transpose(0), target


@pytest.fixture(autouse=True)
def sets_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Colored)
    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", Gray)


def open_both(name: str) -> tuple[ImageSet, ImageSet]:
    """The training part as it is opened, and the same dataset read by its `__getitem__`."""
    source = open_datasets(DataConfig(name=f"torchvision:{name}")).train
    images = source.images
    assert isinstance(images, ArrayImages)
    by_items = MapImages(
        images.dataset, images.dataset_name, images.classes, images.targets, "single"
    )
    return source, replace(source, images=by_items)


def test_dataset_with_other_items_is_read_by_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Mirrored)
    assert type(open_datasets(DataConfig(name="torchvision:CIFAR10")).train.images) is MapImages


ERASING = ErasingConfig(prob=0.6, max_count=2)
AUGMENTS = {
    "pad_crop": AugmentConfig(size_px=28, crop="pad_crop", pad_px=2, erasing=ERASING),
    "random_resized": AugmentConfig(size_px=28, erasing=ERASING),
    "splits": AugmentConfig(size_px=28, crop="resize", policy="augmix-m3-w3", splits=3),
}
MEANS = {1: [0.3], 3: [0.5, 0.4, 0.3]}


def batches_of(
    source: ImageSet, augment: AugmentConfig, channels: int, num_workers: int = 0
) -> list[TrainBatch]:
    """Epoch 1 from its third step on, as after a resume."""
    sampler = EpochSampler(len(source), 8, 0, 1, seed=5, accumulation=2)
    transform = TrainTransform(augment, MEANS[channels])
    loader = TrainLoader(source, transform, sampler, 5, WorkerOptions(num_workers))
    batches = list(loader.epoch(1, start_step=2))
    loader.close()
    return batches


@pytest.mark.parametrize(
    ("augment", "num_workers"),
    [("pad_crop", 2), ("random_resized", 0), ("splits", 0)],
)
@pytest.mark.parametrize(
    ("name", "channels"), [("FashionMNIST", 1), ("FashionMNIST", 3), ("CIFAR10", 1), ("CIFAR10", 3)]
)
def test_train_batches_equal_the_path_by_pillow(
    name: str, channels: int, augment: str, num_workers: int
) -> None:
    source, by_items = open_both(name)
    assert source.digest == by_items.digest
    batches = batches_of(source, AUGMENTS[augment], channels, num_workers)
    assert len(batches) == 2 * 3 and batches[0].images.shape[1] == channels
    assert same(batches, batches_of(by_items, AUGMENTS[augment], channels))


def invert_in_place() -> Any:
    return lambda image: image.bitwise_not_()


@pytest.mark.parametrize(("name", "channels"), [("FashionMNIST", 1), ("CIFAR10", 3)])
def test_policy_that_writes_into_its_image_does_not_change_the_dataset(
    name: str, channels: int
) -> None:
    source, _ = open_both(name)
    images = source.images
    assert isinstance(images, ArrayImages)
    before = images.pixels.clone()
    policy = "test_data_arrays:invert_in_place"
    augment = AugmentConfig(size_px=28, crop="resize", hflip_prob=0.0, policy=policy)
    batches_of(source, augment, channels)
    assert torch.equal(images.pixels, before)
