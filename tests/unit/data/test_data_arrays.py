"""Datasets of torchvision that hold all images in one array: the bits of the path by Pillow."""

import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets
from test_data_loader import same

from imagenet_cls.config.schema import (
    AugmentConfig,
    ColorJitterConfig,
    DataConfig,
    ErasingConfig,
    EvalConfig,
)
from imagenet_cls.data.datasets import open_datasets
from imagenet_cls.data.loader import TrainBatch, TrainLoader, WorkerOptions, eval_batches
from imagenet_cls.data.samplers import EpochSampler
from imagenet_cls.data.sources import ArraySource, ImageSource, MapSource
from imagenet_cls.data.transforms import EvalTransform, TrainTransform
from imagenet_cls.errors import DataError

NUM_IMAGES, SIZE_PX = 40, 28


class Colored(torchvision.datasets.CIFAR10):
    """CIFAR-10 with random pixels, without its files. As there, the array is a view of planes."""

    def __init__(self, root: str, train: bool = True, download: bool = False):
        torchvision.datasets.VisionDataset.__init__(self, root)
        draws = np.random.RandomState(0)
        planes = draws.randint(0, 256, (NUM_IMAGES, 3, SIZE_PX, SIZE_PX)).astype(np.uint8)
        self.data = planes.transpose(0, 2, 3, 1)
        self.targets = draws.randint(0, 10, NUM_IMAGES).tolist()
        self.classes = list("abcdefghij")


class Mirrored(Colored):
    """Its items are not the images of the array."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image.transpose(0), target


def write_idx(folder: Path) -> None:
    """Files of Fashion-MNIST with random pixels and targets."""
    folder.mkdir(parents=True)
    draws = np.random.RandomState(1)
    for part in ("train", "t10k"):
        pixels = draws.randint(0, 256, (NUM_IMAGES, SIZE_PX, SIZE_PX)).astype(np.uint8)
        targets = draws.randint(0, 10, NUM_IMAGES).astype(np.uint8)
        images_header = struct.pack(">4i", 0x803, *pixels.shape)
        targets_header = struct.pack(">2i", 0x801, NUM_IMAGES)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images_header + pixels.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(targets_header + targets.tobytes())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_idx(tmp_path / "FashionMNIST" / "raw")
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Colored)
    return tmp_path


def open_both(name: str, root: Path) -> tuple[ArraySource, MapSource]:
    """The training part as it is opened, and the same dataset read by its `__getitem__`."""
    source = open_datasets(DataConfig(name=f"torchvision:{name}", root=str(root))).train
    assert isinstance(source, ArraySource)
    return source, MapSource(source.dataset, source.dataset_name, source.classes)


@pytest.mark.parametrize("name", ["FashionMNIST", "CIFAR10"])
def test_array_source_equals_items_of_the_dataset(name: str, root: Path) -> None:
    source, by_items = open_both(name, root)
    assert len(source) == NUM_IMAGES and source.digest() == by_items.digest()
    for i in range(NUM_IMAGES):
        image, target = source.load(i)
        expected, expected_target = by_items.load(i)
        assert torch.equal(image, expected) and target == expected_target
        assert image.dtype == torch.uint8 and type(target) is int


def test_dataset_with_other_items_is_read_by_items(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Mirrored)
    source = open_datasets(DataConfig(name="torchvision:CIFAR10", root=str(root))).train
    assert isinstance(source, MapSource)
    array = torch.as_tensor(source.dataset.data[0]).permute(2, 0, 1)
    assert torch.equal(source.load(0)[0], array.flip(2))


def test_target_without_a_class_raises(root: Path) -> None:
    dataset = Colored(str(root))
    dataset.targets[3] = 10
    with pytest.raises(DataError):
        ArraySource(dataset, "colored", tuple(dataset.classes))


ERASING = ErasingConfig(prob=0.6, max_count=2)
AUGMENTS = {
    "pad_crop": AugmentConfig(size_px=28, crop="pad_crop", pad_px=2, erasing=ERASING),
    "pad_crop reflect": AugmentConfig(
        size_px=28, crop="pad_crop", pad_mode="reflect", vflip_prob=0.5
    ),
    "pad_crop edge": AugmentConfig(size_px=28, crop="pad_crop", pad_px=3, pad_mode="edge"),
    "pad_crop without padding": AugmentConfig(size_px=28, crop="pad_crop", pad_px=0),
    "pad_crop of another size": AugmentConfig(size_px=[24, 32], crop="pad_crop", erasing=ERASING),
    "random_resized": AugmentConfig(size_px=28, erasing=ERASING),
    "random_resized bicubic": AugmentConfig(size_px=32, interpolation="bicubic"),
    "random interpolation": AugmentConfig(size_px=20, interpolation="random"),
    "resize": AugmentConfig(size_px=28, crop="resize"),
    "jitter": AugmentConfig(
        size_px=28, crop="pad_crop", color_jitter=ColorJitterConfig(0.7, 0.4, 0.3)
    ),
    "policy": AugmentConfig(size_px=28, crop="pad_crop", policy="rand-m9-mstd0.5-inc1"),
    "splits": AugmentConfig(
        size_px=28, crop="pad_crop", policy="augmix-m3-w3", splits=3, erasing=ERASING
    ),
}
MEANS = {1: [0.3], 3: [0.5, 0.4, 0.3]}


def train_loader(
    source: ImageSource, augment: AugmentConfig, channels: int, num_workers: int
) -> TrainLoader:
    sampler = EpochSampler(len(source), 8, 0, 1, seed=5, accumulation=2)
    transform = TrainTransform(augment, MEANS[channels])
    return TrainLoader(source, transform, sampler, 5, WorkerOptions(num_workers))


def two_epochs(loader: TrainLoader) -> list[TrainBatch]:
    """Epoch 0, and epoch 1 from its third step on, as after a resume."""
    batches = [*loader.epoch(0), *loader.epoch(1, start_step=2)]
    loader.close()
    return batches


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize(
    ("name", "channels"), [("FashionMNIST", 1), ("FashionMNIST", 3), ("CIFAR10", 1), ("CIFAR10", 3)]
)
def test_train_batches_equal_the_path_by_pillow(
    name: str, channels: int, augment: str, root: Path
) -> None:
    source, by_items = open_both(name, root)
    batches = two_epochs(train_loader(source, AUGMENTS[augment], channels, 0))
    assert len(batches) == 2 * (5 + 3) and batches[0].images.shape[1] == channels
    assert (batches[0].boxes is not None) == (AUGMENTS[augment].erasing.prob > 0)
    assert same(batches, two_epochs(train_loader(by_items, AUGMENTS[augment], channels, 0)))


@pytest.mark.parametrize("name", ["FashionMNIST", "CIFAR10"])
def test_train_batches_are_the_same_with_workers(name: str, root: Path) -> None:
    source, by_items = open_both(name, root)
    augment = AUGMENTS["pad_crop"]
    expected = two_epochs(train_loader(by_items, augment, 1, 0))
    assert same(two_epochs(train_loader(source, augment, 1, 2)), expected)
    loader = train_loader(source, augment, 1, 2)
    assert same(list(loader.epoch(0, start_step=3)), expected[6:10])
    loader.close()


EVALS = {
    "whole": EvalConfig(crop_px=28, resize_px=28),
    "resized": EvalConfig(crop_px=24, resize_px=36),
    "padded": EvalConfig(crop_px=[24, 32], resize_px=None, crop_pct=1, mode="pad"),
}


@pytest.mark.parametrize("config", EVALS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_eval_batches_equal_the_path_by_pillow(
    num_workers: int, channels: int, config: str, root: Path
) -> None:
    transform = EvalTransform(EVALS[config], MEANS[channels])
    for name in ("FashionMNIST", "CIFAR10"):
        ours, expected = (
            list(eval_batches(source, transform, range(NUM_IMAGES), 16, WorkerOptions(num_workers)))
            for source in open_both(name, root)
        )
        assert len(ours) == 3 and same(ours, expected)


def invert_in_place() -> Any:
    return lambda image: image.bitwise_not_()


@pytest.mark.parametrize(("name", "channels"), [("FashionMNIST", 1), ("CIFAR10", 3)])
def test_policy_that_writes_into_its_image_does_not_change_the_dataset(
    name: str, channels: int, root: Path
) -> None:
    source, _ = open_both(name, root)
    before = source.images.clone()
    augment = AugmentConfig(size_px=28, crop="resize", hflip_prob=0.0)
    plain = two_epochs(train_loader(source, augment, channels, 0))
    policy = replace(augment, policy="test_data_arrays:invert_in_place")
    inverted = two_epochs(train_loader(source, policy, channels, 0))
    assert torch.equal(source.images, before)
    assert same([batch._replace(images=~batch.images) for batch in inverted], plain)


# ---- files


def test_packed_files_that_torchvision_does_not_accept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy of the error is a command that unpacks them."""
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:1/"])
    data = DataConfig(name="torchvision:FashionMNIST", root=str(root))
    expected = open_both("FashionMNIST", root)[0].digest()
    subprocess.run(["gzip", *(root / "FashionMNIST" / "raw").iterdir()], check=True)
    with pytest.raises(DataError) as raised:
        open_datasets(data)
    command = raised.value.remedy.partition(": ")[2]
    assert command.startswith("gunzip")
    subprocess.run(["sh", "-c", command], check=True)
    source = open_datasets(data).train
    assert source.digest() == expected
