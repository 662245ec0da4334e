"""Features: equal to timm's, written by predict.py, and classified by k-NN and a linear probe as by
scikit-learn.
"""

import errno
import os
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import arguments, call, fails, plain, succeeds, train_here
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

import imagenet_cls
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.config.schema import DataConfig
from imagenet_cls.data.datasets import has_training_part
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
    for _ in range(2):  # the input of one pass is not that of another
        assert torch.allclose(features(images), expected, rtol=1e-4, atol=1e-5)
    assert (
        torch.equal(features(images[:1]), features(images[:1])) and len(features(images[:1])) == 1
    )


class Scaled(nn.Module):
    """A model of one's own: something follows its last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = plain(12), nn.Linear(12, 7)

    def forward(self, images: Tensor) -> Tensor:
        return 10 * self.last(self.body(images)).log_softmax(dim=1)


@torch.no_grad()
def test_classifier_is_found_beside_a_layer_whose_name_begins_like_its_own() -> None:
    model = nn.Sequential(
        OrderedDict(fc=nn.Linear(12, 7), act=nn.ReLU(), fc2=nn.Linear(7, 7))
    ).eval()
    x = torch.randn(2, 12)
    assert torch.equal(FeatureModel(model, 7)(x), model[:2](x))


@torch.no_grad()
def test_features_of_other_models() -> None:
    images = torch.randn(2, 3, 64, 64)
    resnet = torchvision.models.resnet18(num_classes=7).eval()
    got = FeatureModel(resnet, 7)(images)
    resnet.fc = nn.Identity()
    assert torch.equal(got, resnet(images))
    # a convolution at each position
    squeezenet = torchvision.models.squeezenet1_1(num_classes=7).eval()
    assert torch.allclose(
        FeatureModel(squeezenet, 7)(images), squeezenet.features(images).mean((2, 3))
    )
    scaled = Scaled().eval()
    features = FeatureModel(scaled, 7)
    assert torch.equal(features(images[..., :16, :16]), scaled.body(images[..., :16, :16]))
    flipped = compute_logits(features, images[..., :16, :16], flip=True)
    mirrored = scaled.body(images[..., :16, :16].flip(3))
    assert torch.allclose(flipped, (scaled.body(images[..., :16, :16]) + mirrored) / 2)
    with pytest.raises(UsageError, match="Sequential has none that is known"):
        FeatureModel(nn.Sequential(nn.Conv2d(3, 8, 3)), 7)(images)


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of a small network of timm, with EMA."""
    folder = tmp_path_factory.mktemp("features") / "run"
    changes = {"model__name": "test_resnet", "ema__decay": 0.5, "eval__flip_tta": "true"}
    words = arguments(
        digits, folder, **changes, train__max_steps=3, augment__size_px=32, eval__crop_px=32
    )
    train_here(words)
    return folder


def test_predict_writes_features_of_the_good_images(
    run: Path, digits: Path, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number, file in enumerate(sorted((digits / "train/3").iterdir())[:40]):
        shutil.copy(file, images / f"{number:02}.jpg")
    (images / "05.jpg").write_bytes(b"no image")
    code, out, err = call(predict_command, run, images, "--features", tmp_path / "out.npy")
    assert (
        code == 3
        and "05.jpg" in err
        and out == f"wrote 96 features of 39 images to {tmp_path / 'out.npy'}\n"
    )
    with np.load(tmp_path / "out.npy", allow_pickle=False) as written:
        names, features = written["images"], written["features"]
    assert names.tolist() == [str(images / f"{n:02}.jpg") for n in range(40) if n != 5]
    assert features.shape == (39, 96) and features.dtype == np.float32
    predictor = imagenet_cls.Predictor(run)
    pixels = predictor.prepare(names.tolist())
    with torch.no_grad():
        expected = [
            predictor.model.forward_features(x).mean((2, 3)) for x in (pixels, pixels.flip(3))
        ]
    assert np.allclose(features, sum(expected) / 2, rtol=1e-4, atol=1e-5)
    assert np.allclose(features[:3], predictor.features(names[:3].tolist()), rtol=1e-4, atol=1e-5)


def test_predict_writes_no_features_that_are_not_finite(
    run: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = sorted((digits / "train/3").iterdir())[:2]

    def with_nan(predictor: Predictor, model: nn.Module, crops: list[Tensor]) -> Tensor:
        return torch.tensor([[1.0, 2.0], [1.0, torch.nan]])

    monkeypatch.setattr(Predictor, "_compute", with_nan)
    code, out, err = call(predict_command, run, *images, "--features", tmp_path / "out.npz")
    assert (code, out) == (4, "") and str(images[1]) in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [("--top", "2"), ("--threshold", "0.5")])
def test_predict_refuses_options_of_classes_beside_features(
    run: Path, digits: Path, tmp_path: Path, option: tuple[str, str]
) -> None:
    image = next((digits / "train/3").iterdir())
    err = fails(2, predict_command, run, image, "--features", tmp_path / "out.npz", *option)
    assert option[0] in err and not list(tmp_path.iterdir())


def test_predict_keeps_existing_files(run: Path, digits: Path, tmp_path: Path) -> None:
    image = next((digits / "train/3").iterdir())
    (tmp_path / "out.npz").write_text("mine")
    err = fails(2, predict_command, run, image, "--features", tmp_path / "out.npz")
    assert (
        "already exists" in err
        and "--features" in err
        and (tmp_path / "out.npz").read_text() == "mine"
    )
    err = fails(2, predict_command, run, image, "--features", tmp_path / "none/out.npz")
    assert "--features" in err
    (tmp_path / "model.onnx").write_text("")
    err = fails(
        2, predict_command, tmp_path / "model.onnx", image, "--features", tmp_path / "new.npz"
    )
    assert "no features" in err and not (tmp_path / "new.npz").exists()


@pytest.mark.parametrize("command", ["predict", "test"])
def test_full_disk_leaves_no_output(
    command: str,
    run: Path,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    image = next((digits / "train/3").iterdir())
    if command == "predict":
        code, _, err = call(predict_command, run, image, "--features", tmp_path / "out.npz")
    else:
        code, _, err = call(evaluate_command, run, "--out", tmp_path / "rows.csv")
    assert code == 5 and "No space" in err and not list(tmp_path.iterdir())


def split_digits() -> tuple[Tensor, Tensor, Tensor]:
    """Pixels as features of 1,400 digits, their targets, and features of the other digits."""
    values, targets = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
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
    unweighted = KNeighborsClassifier(neighbors, metric="cosine").fit(train, targets).predict(val)
    assert neighbors == 20 or not np.array_equal(got, unweighted)


@pytest.mark.parametrize("c", [0.316, 1e-6])
def test_linear_probe_is_that_of_scikit_learn(c: float) -> None:
    train, targets, val = split_digits()
    got, note = linear_probe(train, targets, val, c)
    reference = LogisticRegression(C=c, max_iter=1000, solver="lbfgs").fit(
        train.numpy(), targets.numpy()
    )
    assert np.array_equal(got, reference.predict(val.numpy()))
    assert note == f"{reference.n_iter_[0]} iterations"


def test_linear_probe_errors() -> None:
    values, targets = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    for features in (values, values / 0):
        with pytest.raises(UsageError, match="scikit-learn can't fit"):
            linear_probe(features, targets, values, 1.0)


def largest_pixels(num_classes: int) -> nn.Module:
    """Its features are the same to the last bit in any batch."""
    return nn.Sequential(nn.MaxPool2d(4), nn.Flatten(), nn.Linear(48, num_classes))


def lines_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    context = join_ranks(rank, ranks, folder / f"store{ranks}")
    changes = {"model__name": f"{__name__}:largest_pixels", "data__fraction": 0.2}
    file, *overrides = arguments(folder / "digits", folder, **changes)[:-2]
    config = load_config(
        file, [*overrides, f"model.checkpoint={folder}/weights.safetensors"]
    ).config
    lines = evaluate_features(config, WeightsSource(), context, neighbors=20, probe_c=0.1)
    if rank == 0:
        (folder / f"lines{ranks}").write_text("\n".join(lines))
    if ranks > 1:
        destroy_process_groups(context)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.nightly)])
def test_result_does_not_depend_on_the_ranks(
    ranks: int, digits: Path, tmp_path: Path, rank_server: RankServer
) -> None:
    (tmp_path / "digits").symlink_to(digits)
    torch.manual_seed(0)
    # a head for other classes
    save_file(largest_pixels(7).state_dict(), tmp_path / "weights.safetensors")
    lines_on_ranks(0, 1, tmp_path)
    rank_server.call(lines_on_ranks, ranks, tmp_path)
    expected, lines = (
        (tmp_path / f"lines{number}").read_text().splitlines() for number in (1, ranks)
    )
    assert lines == expected and len(lines) == 4 and "newly initialized" in lines[1]
    assert lines[0].startswith("359 images of 10 classes")
    assert all("over 359 images" in line for line in lines[2:])


def test_command_evaluates_raw_and_ema_weights(run: Path, tmp_path: Path) -> None:
    out = succeeds(evaluate_command, run, "--linear-probe", "1", "--knn", 20)
    assert [line.partition(" top-1")[0] for line in out.splitlines()[2:]] == [
        "raw: k-NN",
        "raw: linear probe",
        "ema: k-NN",
        "ema: linear probe",
    ]
    out = succeeds(evaluate_command, run, "data.fraction=0.02", "--linear-probe")
    assert "C=0.316" in out and "k-NN" not in out
    for words, message in {
        ("--knn", 1439): "there are 1438 training images",
        ("--knn", 0): "0",
        ("--linear-probe", "-1"): "number, more than 0",
        ("--knn", 2, "--out", tmp_path / "rows.csv"): "no --out",
        ("--knn", 2, "--results", tmp_path / "results.json"): "no --out, no --results",
        ("--out", tmp_path / "a.json", "--results", tmp_path / "a.json"): "the same file",
    }.items():
        err = fails(2, evaluate_command, run, *words)
        assert message in err


def test_command_needs_training_images(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "val").symlink_to(digits / "train")
    save_file(plain(10).state_dict(), tmp_path / "weights.safetensors")
    words = arguments(
        tmp_path, tmp_path, data__name="folder", data__val="val", data__val_fraction="null"
    )[:-2]
    err = fails(3, evaluate_command, *words, tmp_path / "weights.safetensors", "--knn", 5)
    assert str(tmp_path / "train") in err


def test_features_that_are_not_finite_are_an_error(digits: Path, tmp_path: Path) -> None:
    weights = plain(10).state_dict()
    weights["0.weight"][:] = torch.nan
    save_file(weights, tmp_path / "weights.safetensors")
    words = arguments(digits, tmp_path, data__fraction=0.02)[:-2]
    err = fails(4, evaluate_command, *words, tmp_path / "weights.safetensors", "--knn", 5)
    assert "NaN" in err


def test_archive_is_a_training_part(tmp_path: Path) -> None:
    data = DataConfig(name="folder", root=str(tmp_path), train="train-*.tar", val="val")
    assert not has_training_part(data)
    (tmp_path / "train-0.tar").touch()
    assert has_training_part(data)
