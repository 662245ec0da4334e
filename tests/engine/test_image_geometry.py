"""Runs whose images are not square or not RGB: training, evaluation and prediction prepare them
alike.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    arguments,
    assert_resumes,
    evaluations,
    plain,
    saved_bytes,
    state_of,
    succeeds,
    train_here,
)
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.transforms.v2 import functional as F

import imagenet_cls
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.schema import EvalConfig
from imagenet_cls.data.transforms import EvalTransform

SaveImage = Callable[[Image.Image, Path], object]


def write_folder(
    photographs: list[Image.Image], root: Path, save: SaveImage = Image.Image.save
) -> Path:
    """Class folders a and b with 8 training and 4 validation images each, wide and tall."""
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


def gray_plain(num_classes: int) -> nn.Module:
    """`helpers.plain` for images of one channel."""
    network = plain(num_classes)
    network[0] = nn.Conv2d(1, 16, 3, stride=2, padding=1)
    return network


DATA = {
    "data.name": "folder",
    "data.train": "train",
    "data.val": "val",
    "data.val_fraction": "null",
}


STEPS = {"train.epochs": 1, "train.global_batch_size": 8}


def train_on(folder: Path, run: Path, **changes: Any) -> float:
    """Train for two steps. Returns the loss of the evaluation."""
    train_here(arguments(folder, run, **(DATA | STEPS | changes)))
    return evaluations(run)[-1]["loss"]


@pytest.fixture(scope="module")
def photos(photographs: list[Image.Image], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(photographs, tmp_path_factory.mktemp("data") / "photos")


def prepared_and_loss(photos: Path, run: Path, name: str) -> tuple[torch.Tensor, float]:
    """The validation images as `Predictor` prepares them, and the loss of its outputs."""
    predictor = imagenet_cls.Predictor(run, allow_import=[name])
    files = validation_files(photos)
    targets = torch.tensor([int(file.parent.name == "b") for file in files])
    return predictor.prepare(files), float(cross_entropy(predictor.logits(files), targets))


def validation_files(photos: Path) -> list[Path]:
    return sorted((photos / "val").glob("*/*.png"))


@pytest.mark.parametrize("mode", ["squash", "pad"])
def test_evaluation_and_prediction_prepare_images_as_eval_mode_says(
    photos: Path, tmp_path: Path, mode: str
) -> None:
    run, mean = tmp_path / "run", [0.2, 0.5, 0.8]
    changes = {"eval.mode": mode, "data.mean": mean, "data.std": [1, 1, 1], "eval.crop_pct": 1}
    loss = train_on(photos, run, **changes)
    prepared, loss_of_predictions = prepared_and_loss(photos, run, "helpers:plain")
    transform = EvalTransform(EvalConfig(mode, 16, 1.0), mean)
    images = [transform(F.pil_to_tensor(Image.open(file))) for file in validation_files(photos)]
    expected = torch.stack(images) / 255 - torch.tensor(mean).view(3, 1, 1)
    torch.testing.assert_close(prepared, expected, rtol=0, atol=1e-6)
    assert loss == pytest.approx(loss_of_predictions, abs=1e-5)
    assert abs(loss - math.log(2)) > 1e-3, "else any images would do"


GRAY = {"data.channels": 1, "data.mean": "null", "data.std": "null"}


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [(f"{__name__}:gray_plain", 0.449, 0.226), ("test_resnet", 0.5, 0.5)],
)
def test_gray_images_train_resume_evaluate_and_predict_alike(
    photos: Path, tmp_path: Path, name: str, mean: float, std: float
) -> None:
    run = tmp_path / "whole"
    settings = GRAY | {
        "model.name": name,
        "augment.erasing.prob": 0.5,
        "mix.mixup_alpha": 0.2,
        "eval.flip_tta": "true",
    }
    assert_resumes(photos, tmp_path, 1, **(DATA | STEPS | settings))
    loss = evaluations(run)[-1]["loss"]
    stored = state_of(run)["preprocessing"]
    assert stored["mean"] + stored["std"] == pytest.approx([mean, std])
    prepared, loss_of_predictions = prepared_and_loss(photos, run, name)
    transform = EvalTransform(EvalConfig(crop_px=16, crop_pct=1.0), [mean])
    images = [F.pil_to_tensor(Image.open(file).convert("L")) for file in validation_files(photos)]
    expected = torch.stack([transform(image.expand(3, -1, -1)) for image in images])
    torch.testing.assert_close(prepared, (expected / 255 - mean) / std, rtol=0, atol=1e-5)
    assert loss == pytest.approx(loss_of_predictions, abs=1e-5)
    out = succeeds(evaluate_command, run / "config.yaml", run, "--allow-import", name)
    assert f"loss {loss:.4f}" in out


def save_on_its_side(image: Image.Image, path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)


def test_rotated_files_with_exif_apply_equal_upright_ones(
    photos: Path, photographs: list[Image.Image], tmp_path: Path
) -> None:
    rotated = write_folder(photographs, tmp_path / "rotated", save_on_its_side)
    expected = train_on(photos, tmp_path / "run")
    assert train_on(rotated, tmp_path / "ignored") != expected
    run = tmp_path / "applied"
    assert train_on(rotated, run, **{"data.exif": "apply", "data.num_workers": 2}) == expected
    assert saved_bytes(run) == saved_bytes(tmp_path / "run")
    predictor = imagenet_cls.Predictor(run, allow_import=["helpers:plain"])
    files = [folder / "val" / "b" / "1.png" for folder in (rotated, photos)]
    assert torch.equal(*(predictor.logits([file]) for file in files))
    assert torch.equal(predictor.logits([Image.open(files[0])]), predictor.logits([files[1]]))


WIDE = {
    "augment.size_px": "[16, 24]",
    "eval.crop_px": "[16, 24]",
    "eval.crop_pct": 1,
    "model.name": "test_resnet",
}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "augment.erasing.prob": 0.7,
            "augment.policy": "rand-m9-mstd0.5",
            "mix.mixup_alpha": 0.2,
            "mix.cutmix_alpha": 1,
        },
        {"augment.crop": "pad_crop", "data.num_workers": 1, "eval.mode": "squash"},
    ],
)
def test_images_of_height_and_width_train_resume_and_predict(
    photos: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run = tmp_path / "whole"
    assert_resumes(photos, tmp_path, 1, **(DATA | STEPS | WIDE | changes))
    prepared, loss = prepared_and_loss(photos, run, "test_resnet")
    assert prepared.shape == (8, 3, 16, 24)
    assert evaluations(run)[-1]["loss"] == pytest.approx(loss, abs=1e-5)
