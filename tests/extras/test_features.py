"""Features: equal to timm's, and written by predict.py."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from helpers import fails, plain, write_files
from torch import nn

import imagenet_cls
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.engine.evaluate import compute_logits
from imagenet_cls.errors import UsageError
from imagenet_cls.extras.weights.feature_model import FeatureModel
from imagenet_cls.inference.predictor import Predictor

SMALL = {"img_size": 32, "patch_size": 8}
MODELS = {
    "test_resnet": {},
    "test_vit": {},
    "deit_tiny_distilled_patch16_224": SMALL,  # two classifiers, whose inputs differ
    "crossvit_tiny_240": {},  # two of different widths
    "volo_d1_224": {"img_size": 64},  # an auxiliary one at each position
    "dla46_c": {},  # a convolution
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_of_timm(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **MODELS[name]).eval()
    images = torch.randn(3, *model.pretrained_cfg["input_size"])
    size = MODELS[name].get("img_size") or (None if name.startswith("crossvit") else 64)
    images = images[..., :size, :size]
    expected = model.forward_head(model.forward_features(images), pre_logits=True)
    features = FeatureModel(model, 7)
    assert len(features(images[:1])) == 1  # the input of one pass is not that of another
    assert torch.allclose(features(images), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_features_of_other_models() -> None:
    images = torch.randn(2, 3, 64, 64)
    # a convolution at each position
    squeezenet = torchvision.models.squeezenet1_1(num_classes=7).eval()
    found = FeatureModel(squeezenet, 7)(images)
    assert torch.allclose(found, squeezenet.features(images).mean((2, 3)))
    # something follows the classifier of a model of one's own
    scaled = nn.Sequential(plain(12), nn.Linear(12, 7), nn.LogSoftmax(dim=1)).eval()
    images = images[..., :16, :16]
    expected = (scaled[0](images) + scaled[0](images.flip(3))) / 2
    found = compute_logits(FeatureModel(scaled, 7), images, flip=True)
    assert torch.allclose(found, expected)
    with pytest.raises(UsageError):
        FeatureModel(nn.Sequential(nn.Conv2d(3, 8, 3)), 7)(images)


@pytest.fixture(scope="module")
def run(train_on_digits: Callable[..., Path]) -> Path:
    """A short run of a small network of timm, with EMA."""
    changes = {"augment__size_px": 32, "eval__crop_px": 32, "train__max_steps": 3}
    changes |= {"model__name": "test_resnet", "ema__decay": 0.5, "eval__flip_tta": "true"}
    return train_on_digits(**changes)


@pytest.fixture(scope="module")
def threes(digits: Path) -> list[Path]:
    return sorted((digits / "train/3").iterdir())


def test_predict_writes_features_of_the_good_images(
    run: Path, threes: list[Path], tmp_path: Path
) -> None:
    good = threes[:39]  # two batches
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    words = [run, *good[:5], bad, *good[5:], "--features", tmp_path / "out.npy"]
    assert "bad.jpg" in fails(3, predict_command, *words)
    with np.load(tmp_path / "out.npy", allow_pickle=False) as written:
        names, features = written["images"], written["features"]
    assert names.tolist() == list(map(str, good)) and features.dtype == np.float32
    predictor = imagenet_cls.Predictor(run)
    pixels = predictor.prepare(good)
    with torch.no_grad():
        both = [predictor.model.forward_features(x) for x in (pixels, pixels.flip(3))]
    expected = sum(both).mean((2, 3)) / 2
    assert np.allclose(features, expected, rtol=1e-4, atol=1e-5)
    assert np.allclose(predictor.features(good[:3]), expected[:3], rtol=1e-4, atol=1e-5)


def test_predict_writes_no_features_that_are_not_finite(
    run: Path, threes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.tensor([[1.0, 2.0], [1.0, torch.nan]])
    monkeypatch.setattr(Predictor, "_compute", lambda self, model, crops: values)
    err = fails(4, predict_command, run, *threes[:2], "--features", tmp_path / "out.npz")
    assert str(threes[1]) in err and not list(tmp_path.iterdir())


def test_predict_refuses_options_without_sense_and_keeps_existing_files(
    run: Path, threes: list[Path], tmp_path: Path
) -> None:
    files = {"mine.npz": "mine", "model.onnx": ""}
    write_files(tmp_path, files)
    new = tmp_path / "new.npz"
    for source, file, *options in (
        (run, new, "--top", "2"),
        (run, new, "--threshold", "0.5"),
        (run, tmp_path / "mine.npz"),
        (run, tmp_path / "none/out.npz"),
        (tmp_path / "model.onnx", new),
    ):
        fails(2, predict_command, source, threes[0], "--features", file, *options)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
