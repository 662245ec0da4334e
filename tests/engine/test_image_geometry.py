"""Runs whose images are not square or not RGB: training, evaluation and prediction prepare them alike."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, evaluations, train_here
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.nn.functional import cross_entropy
from torchvision.transforms.v2 import functional as F

import imagenet_cls
from imagenet_cls.config.schema import EvalConfig
from imagenet_cls.data.transforms import EvalTransform

SaveImage = Callable[[Image.Image, Path], object]


def write_folder(root: Path, save: SaveImage = lambda image, path: image.save(path)) -> Path:
    """Class folders a and b with 8 training and 4 validation images each, wide and tall."""
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for part, count in (("train", 8), ("val", 4)):
        for name, photograph in zip("ab", photographs, strict=True):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                size = (50, 30 + i) if i % 2 else (20 + i, 40)
                save(
                    photograph.crop((40 * i, 20 * i, 40 * i + 200, 20 * i + 200)).resize(size),
                    root / part / name / f"{i}.png",
                )
    return root


def train_on(folder: Path, run: Path, **changes: Any) -> float:
    """Train for two steps. Returns the loss of the evaluation."""
    data = {"data.name": "folder", "data.train": "train", "data.val": "val", "data.val_fraction": "null"}
    steps = {"train.epochs": 1, "train.global_batch_size": 8}
    train_here(arguments(folder, run, **(data | steps | changes)))
    return evaluations(run)[-1]["loss"]


@pytest.mark.parametrize("mode", ["squash", "pad"])
def test_evaluation_and_prediction_prepare_images_as_eval_mode_says(tmp_path: Path, mode: str) -> None:
    folder, run, mean = write_folder(tmp_path / "photos"), tmp_path / "run", [0.2, 0.5, 0.8]
    loss = train_on(folder, run, **{"eval.mode": mode, "data.mean": mean, "data.std": [1, 1, 1], "eval.crop_pct": 1})
    predictor, files = (
        imagenet_cls.Predictor(run, allow_import=["helpers:plain"]),
        sorted((folder / "val").glob("*/*.png")),
    )
    transform = EvalTransform(EvalConfig(mode, 16, 1.0), mean)  # type: ignore[arg-type]
    images = torch.stack([transform(F.pil_to_tensor(Image.open(file))) for file in files])
    expected = images / 255 - torch.tensor(mean).view(3, 1, 1)
    torch.testing.assert_close(predictor.prepare(files), expected, rtol=0, atol=1e-6)
    targets = torch.tensor([int(file.parent.name == "b") for file in files])
    assert loss == pytest.approx(float(cross_entropy(predictor.logits(files), targets)), abs=1e-5)
    assert abs(loss - math.log(2)) > 1e-3, "else any images would do"
