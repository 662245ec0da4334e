"""The recipes of small datasets train on generated images in place of a download."""

from pathlib import Path

import numpy as np
import pytest
from helpers import train_here
from PIL import Image

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def write_images(folder: Path, px: int, suffix: str) -> None:
    folder.mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 255, (px, px, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}{suffix}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["cifar/resnet18_cifar10", "cifar/wrn28_10_cifar100", "imagenette/resnet50_imagenette"]
)
def test_recipe_of_a_small_set_trains(name: str, tmp_path: Path) -> None:
    words = [
        str(CONFIGS / f"{name}.yaml"),
        "--work-dir",
        str(tmp_path / "run"),
        "data.num_workers=0",
    ]
    words += [
        "train.global_batch_size=4",
        "train.max_steps=2",
        "log.tensorboard=false",
        "log.every_steps=1",
    ]
    if "cifar" in name:
        words += [f"data.root={tmp_path}", "data.name=folder", "data.val=test"]
        folders = [
            tmp_path / part / label for part in ("train", "test") for label in ("cat", "dog")
        ]
    else:  # as torchvision unpacks the archive
        words += [f"data.root={tmp_path / 'data'}"]
        folders = [
            tmp_path / "data/imagenette2-160" / part / "n01440764" for part in ("train", "val")
        ]
    for folder in folders:
        write_images(
            folder, px=32 if "cifar" in name else 160, suffix=".png" if "cifar" in name else ".JPEG"
        )
    train_here(words)
    assert (tmp_path / "run/checkpoints/step-0000002").is_dir()
