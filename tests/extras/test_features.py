"""Features: equal to timm's, written by predict.py, and classified by k-NN and a linear probe as by
scikit-learn.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
import torchvision
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import arguments, fails, plain, succeeds, write_files
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

import imagenet_cls
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.engine.evaluate import compute_logits
from imagenet_cls.errors import UsageError
from imagenet_cls.extras.weights.feature_classifiers import (
    evaluate_features,
    knn_classes,
    linear_probe,
)
from imagenet_cls.extras.weights.feature_model import FeatureModel
from imagenet_cls.inference.load_weights import WeightsSource
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


def test_full_disk_leaves_no_output(
    run: Path, threes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    fails(5, predict_command, run, threes[0], "--features", tmp_path / "out.npz")
    fails(5, evaluate_command, run, "--out", tmp_path / "rows.csv")
    assert not list(tmp_path.iterdir())


def split_digits() -> tuple[Tensor, Tensor, Tensor]:
    """Pixels as features of 1,400 digits, their targets, and features of the other digits."""
    values, targets = map(torch.from_numpy, load_digits(return_X_y=True))
    return values[:1400].float(), targets[:1400], values[1400:].float()


@pytest.mark.parametrize("neighbors", [20, 1400])
def test_knn_is_that_of_scikit_learn(neighbors: int) -> None:
    train, targets, val = split_digits()
    got = knn_classes(train, targets, val, neighbors, torch.device("cpu"))
    reference = KNeighborsClassifier(
        neighbors,
        metric="cosine",
        algorithm="brute",
        weights=lambda distance: np.exp((1 - distance) / 0.07),
    )
    reference.fit(train.double(), targets)
    # Rounding decides about votes that are nearly equal, and about images as near as the last one.
    votes = np.sort(reference.predict_proba(val.double()))
    is_clear = votes[:, -1] - votes[:, -2] > 1e-3
    if neighbors < len(train):
        distances = reference.kneighbors(val.double(), neighbors + 1)[0]
        is_clear &= distances[:, -1] - distances[:, -2] > 1e-6
    assert is_clear.mean() > 0.9
    assert np.array_equal(got[is_clear], reference.predict(val.double())[is_clear])


@pytest.mark.parametrize("c", [0.316, 1e-6])
def test_linear_probe_is_that_of_scikit_learn(c: float) -> None:
    train, targets, val = split_digits()
    got, note = linear_probe(train, targets, val, c)
    reference = LogisticRegression(C=c, max_iter=1000, solver="lbfgs")
    reference.fit(train.numpy(), targets.numpy())
    assert np.array_equal(got, reference.predict(val.numpy()))
    assert note == f"{reference.n_iter_[0]} iterations"
    for bad in (train / 0, train[:1].expand_as(train)):
        with pytest.raises(UsageError):
            linear_probe(bad, 0 * targets, val, c)


def largest_pixels(num_classes: int) -> nn.Module:
    """Its features are the same to the last bit in any batch."""
    return nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), nn.Linear(48, num_classes))


def lines_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    context = join_ranks(rank, ranks, folder / f"store{ranks}")
    changes = {"model__name": f"{__name__}:largest_pixels", "data__fraction": 0.2}
    file, *overrides = arguments(folder / "digits", folder, **changes)[:-2]
    overrides += [f"model.checkpoint={folder}/weights.safetensors"]
    config = load_config(file, overrides).config
    lines = evaluate_features(config, WeightsSource(), context, neighbors=20, probe_c=0.1)
    if rank == 0:
        (folder / f"lines{ranks}").write_text("\n".join(lines))
    if ranks > 1:
        destroy_process_groups(context)


def test_result_does_not_depend_on_the_ranks(
    digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    (tmp_path / "digits").symlink_to(digits)
    torch.manual_seed(0)
    # a head for other classes
    save_file(largest_pixels(7).state_dict(), tmp_path / "weights.safetensors")
    lines_on_ranks(0, 1, tmp_path)
    rank_server.call(lines_on_ranks, 3, tmp_path)
    expected, lines = ((tmp_path / f"lines{ranks}").read_text().splitlines() for ranks in (1, 3))
    assert lines == expected and len(lines) == 4 and "newly initialized" in lines[1]
    assert ") over 359 images" in lines[2]


def test_command_evaluates_raw_and_ema_weights(run: Path, tmp_path: Path) -> None:
    out = succeeds(evaluate_command, run, "--linear-probe", "1", "--knn", 20)
    lines = [line.partition(" top-1")[0] for line in out.splitlines()[2:]]
    assert lines == ["raw: k-NN", "raw: linear probe", "ema: k-NN", "ema: linear probe"]
    out = succeeds(evaluate_command, run, "data.fraction=0.02", "--linear-probe")
    assert "C=0.316" in out and "k-NN" not in out
    rows, same = tmp_path / "rows.csv", tmp_path / "a.json"
    for words in (
        ("--knn", 1439),  # there are 1438 training images
        ("--knn", 2, "--out", rows),
        ("--knn", 2, "--results", rows),
        ("--out", same, "--results", same),
    ):
        fails(2, evaluate_command, run, *words)


def test_missing_training_images_and_features_that_are_not_finite_are_errors(
    digits: Path, tmp_path: Path
) -> None:
    weights = {name: torch.nan * tensor for name, tensor in plain(10).state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    words = [*arguments(digits, tmp_path)[:-2], tmp_path / "weights.safetensors", "--knn", "5"]
    assert "NaN" in fails(4, evaluate_command, *words, "data.fraction=0.02")
    missing = "data.name=folder data.train=a data.val=train data.val_fraction=null"
    assert "digits/a" in fails(3, evaluate_command, *words, *missing.split())
