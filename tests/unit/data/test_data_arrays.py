"""Datasets of torchvision that hold all images in one array: the bits of the path by Pillow."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets
from test_data_loader import same

from imagenet_cls.config.schema import AugmentConfig, DataConfig
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.image_set import ImageSet
from imagenet_cls.data.loader import TrainLoader, WorkerOptions
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


def invert_in_place() -> Any:
    return lambda image: image.bitwise_not_()


@pytest.mark.parametrize(("name", "channels"), [("FashionMNIST", 1), ("CIFAR10", 3)])
@pytest.mark.parametrize("policy", ["rand-m9", "test_data_arrays:invert_in_place"])
def test_train_batches_equal_the_path_by_pillow(name: str, channels: int, policy: str) -> None:
    """Also of a policy that writes into its image, which the dataset keeps."""
    augment = AugmentConfig(size_px=28, crop="pad_crop", pad_px=0, hflip_prob=0.0, policy=policy)
    source, by_items = open_both(name)
    assert source.digest == by_items.digest
    found = []
    for images in (source, source, by_items):
        sampler = EpochSampler(len(images), 8, 0, 1, seed=5)
        transform = TrainTransform(augment, [0.5] * channels)
        found.append(list(TrainLoader(images, transform, sampler, 5, WorkerOptions()).epoch(1)))
    assert same(found[0], found[2]) and same(found[1], found[2])
