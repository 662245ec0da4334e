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
    fails,
    plain,
    saved_bytes,
    state_of,
    succeeds,
    train_here,
)
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.transforms.v2 import functional as F

import imagenet_cls
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.commands.train import train_command
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


@pytest.mark.parametrize("mode", ["squash", "pad"])
def test_evaluation_and_prediction_prepare_images_as_eval_mode_says(
    tmp_path: Path, mode: str
) -> None:
    folder, run, mean = write_folder(tmp_path / "photos"), tmp_path / "run", [0.2, 0.5, 0.8]
    loss = train_on(
        folder,
        run,
        **{"eval.mode": mode, "data.mean": mean, "data.std": [1, 1, 1], "eval.crop_pct": 1},
    )
    predictor, files = (
        imagenet_cls.Predictor(run, allow_import=["helpers:plain"]),
        sorted((folder / "val").glob("*/*.png")),
    )
    transform = EvalTransform(EvalConfig(mode, 16, 1.0), mean)
    images = torch.stack([transform(F.pil_to_tensor(Image.open(file))) for file in files])
    expected = images / 255 - torch.tensor(mean).view(3, 1, 1)
    torch.testing.assert_close(predictor.prepare(files), expected, rtol=0, atol=1e-6)
    targets = torch.tensor([int(file.parent.name == "b") for file in files])
    assert loss == pytest.approx(float(cross_entropy(predictor.logits(files), targets)), abs=1e-5)
    assert abs(loss - math.log(2)) > 1e-3, "else any images would do"


GRAY = {"data.channels": 1, "data.mean": "null", "data.std": "null"}


@pytest.mark.parametrize(
    ("name", "mean_std"),
    [(f"{__name__}:gray_plain", [[0.449], [0.226]]), ("test_resnet", [[0.5], [0.5]])],
)
def test_gray_images_train_resume_evaluate_and_predict_alike(
    tmp_path: Path, name: str, mean_std: list[list[float]]
) -> None:
    folder, run = write_folder(tmp_path / "photos"), tmp_path / "whole"
    settings = GRAY | {
        "model.name": name,
        "augment.erasing.prob": 0.5,
        "mix.mixup_alpha": 0.2,
        "eval.flip_tta": "true",
    }
    assert_resumes(folder, tmp_path, 1, **(DATA | STEPS | settings))
    loss = evaluations(run)[-1]["loss"]
    stored = state_of(run)["preprocessing"]
    assert [stored["mean"], stored["std"]] == [pytest.approx(numbers) for numbers in mean_std]
    predictor, files = (
        imagenet_cls.Predictor(run, allow_import=[name]),
        sorted((folder / "val").glob("*/*.png")),
    )
    gray = [F.pil_to_tensor(Image.open(file).convert("L")) for file in files]
    expected = torch.stack(
        [
            EvalTransform(EvalConfig(crop_px=16, crop_pct=1.0))(image.expand(3, -1, -1))
            for image in gray
        ]
    )
    torch.testing.assert_close(
        predictor.prepare(files),
        (expected[:, :1] / 255 - stored["mean"][0]) / stored["std"][0],
        rtol=0,
        atol=1e-5,
    )
    targets = torch.tensor([int(file.parent.name == "b") for file in files])
    assert loss == pytest.approx(float(cross_entropy(predictor.logits(files), targets)), abs=1e-5)
    out = succeeds(evaluate_command, run / "config.yaml", run, "--allow-import", name)
    assert f"loss {loss:.4f}" in out


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.name": f"{__name__}:gray_plain"}, "augment.size_px: "),
        (GRAY, "images of 1 channel and 16 px"),
    ],
)
def test_model_for_another_number_of_channels_is_a_config_error(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    settings = DATA | {"train.global_batch_size": 8} | changes
    err = fails(
        2,
        train_command,
        *arguments(write_folder(tmp_path / "photos"), tmp_path / "run", **settings),
    )
    assert named in err


def save_on_its_side(image: Image.Image, path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)


def test_rotated_files_with_exif_apply_equal_upright_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upright, rotated = (
        write_folder(tmp_path / "upright"),
        write_folder(tmp_path / "rotated", save_on_its_side),
    )
    expected = train_on(upright, tmp_path / "run")
    assert "EXIF" not in capsys.readouterr().out
    assert train_on(rotated, tmp_path / "ignored") != expected
    assert (
        "16 of 16 training images that were examined have an EXIF orientation"
        in capsys.readouterr().out
    )
    run = tmp_path / "applied"
    assert train_on(rotated, run, **{"data.exif": "apply", "data.num_workers": 2}) == expected
    assert "EXIF" not in capsys.readouterr().out and saved_bytes(run) == saved_bytes(
        tmp_path / "run"
    )
    predictor = imagenet_cls.Predictor(run, allow_import=["helpers:plain"])
    files = [folder / "val" / "b" / "1.png" for folder in (rotated, upright)]
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
        {
            "model.name": "vit_tiny_patch16_224",
            "model.kwargs": "{depth: 1, patch_size: 8, img_size: [16, 24]}",
        },
    ],
)
def test_images_of_height_and_width_train_resume_and_predict(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder, run = write_folder(tmp_path / "photos"), tmp_path / "whole"
    assert_resumes(folder, tmp_path, 1, **(DATA | STEPS | WIDE | changes))
    loss = evaluations(run)[-1]["loss"]
    predictor, files = imagenet_cls.Predictor(run), sorted((folder / "val").glob("*/*.png"))
    assert predictor.prepare(files).shape == (8, 3, 16, 24)
    targets = torch.tensor([int(file.parent.name == "b") for file in files])
    assert loss == pytest.approx(float(cross_entropy(predictor.logits(files), targets)), abs=1e-5)


def test_evaluation_at_another_height_and_width_resizes_position_embeddings(tmp_path: Path) -> None:
    folder, run = write_folder(tmp_path / "photos"), tmp_path / "run"
    vit = {
        "model.name": "vit_tiny_patch16_224",
        "model.kwargs": "{depth: 1, patch_size: 8, img_size: 16}",
    }
    train_on(folder, run, **vit)
    out = succeeds(evaluate_command, run / "config.yaml", run, "eval.crop_px=[16, 24]")
    assert "position embeddings were resized for 16 x 24 px" in out
    settings = DATA | {"train.global_batch_size": 8} | vit | {"eval.crop_px": "[16, 24]"}
    err = fails(2, train_command, *arguments(folder, tmp_path / "other", **settings))
    assert "eval.crop_px" in err
