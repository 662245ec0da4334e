"""tools/publish.py: the folder loads in timm, offline, with the same logits and preprocessing."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import timm
import torch
from helpers import fails, newest, saved_bytes, succeeds
from PIL import Image
from safetensors import SafetensorError

from imagenet_cls.config.schema import Config, EvalConfig
from imagenet_cls.data.transforms import EvalTransform
from imagenet_cls.extras.weights import timm_folder as publish
from imagenet_cls.extras.weights.publish import publish_command
from imagenet_cls.extras.weights.timm_folder import timm_crop_pct
from imagenet_cls.inference.predictor import Predictor


@pytest.fixture(scope="module")
def train_vit(train_on_digits: Callable[..., Path]) -> Callable[..., Path]:
    """A ViT that needs model.kwargs to be built, with its own mean and std."""
    kwargs = {"model__kwargs": "{img_size: 16, patch_size: 4, depth: 1}"}
    mean_std = {"data__mean": "[0.1, 0.2, 0.3]", "data__std": "[0.4, 0.5, 0.6]"}
    settings = {"train__max_steps": 2, "eval__resize_px": 19, "eval__mode": "squash"}
    settings |= {"model__name": "vit_tiny_patch16_224.augreg_in21k"}
    settings |= {"eval__interpolation": "bicubic"}
    settings |= kwargs | mean_std
    return lambda **changes: train_on_digits(**settings | changes)


@pytest.fixture(scope="module")
def run(train_vit: Callable[..., Path]) -> Path:
    return train_vit()


def test_folder_loads_in_timm_with_equal_logits(run: Path, digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "vit-digits"
    succeeds(publish_command, run, folder, "--license", "mit")
    assert {path.name for path in folder.iterdir()} == set(publish.FILES)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    predictor = Predictor(run, "cpu")
    images = predictor.prepare(sorted((digits / "train/5").iterdir())[:9])
    with torch.no_grad():
        assert torch.equal(model(images), predictor.model(images))
    data = timm.data.resolve_model_data_config(model)
    assert (*data["mean"], *data["std"]) == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert data["crop_mode"] == "squash" and data["interpolation"] == "bicubic"
    assert math.floor(16 / data["crop_pct"]) == 19
    config = json.loads((folder / "config.json").read_text())
    assert config["label_names"] == [str(digit) for digit in range(10)]
    pretrained = config["pretrained_cfg"]
    assert pretrained["license"] == "mit" and pretrained["classifier"] == "head"
    assert "tag" not in pretrained  # of the published weights
    card = (folder / "README.md").read_text()
    parts = (
        "359 images",
        "top-1",
        "license: mit",
        "# Model card for vit-digits",
        "**train.max_steps:** 2",
    )
    assert all(part in card for part in parts)
    assert str(digits) not in card and str(run) not in card


@pytest.mark.nightly
def test_folder_loads_in_transformers_with_equal_logits_and_pixels(
    run: Path, digits: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    succeeds(publish_command, run, tmp_path)
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert model.config.id2label == {i: str(i) for i in range(10)}
    of_timm = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(of_timm))
    files = sorted((digits / "train/5").iterdir())[:9]
    images = [Image.open(path).convert("RGB") for path in files]
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(pixels, torch.stack([transform(image) for image in images]))
    with torch.no_grad():
        assert torch.equal(model(pixels).logits, of_timm(pixels))


def test_card_names_initial_weights_and_what_timm_lacks(
    run: Path, train_vit: Callable[..., Path], tmp_path: Path
) -> None:
    changes = {"data__channels": 1, "data__mean": "[0.1]", "data__std": "[0.4]"}
    changes |= {"eval__flip_tta": "true", "data__exif": "apply"}
    tuned = train_vit(model__checkpoint=run, **changes)
    succeeds(publish_command, tuned, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "**Initial weights:** run; see their license" in card and str(run) not in card
    assert "but in the result:** eval.flip_tta, data.exif" in card
    assert 'convert("L")' in card and "transformers.pipeline" not in card


def test_folder_is_not_overwritten_without_the_option(run: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    err = fails(2, publish_command, run, tmp_path)
    assert "--overwrite" in err and (tmp_path / "README.md").read_text() == "mine"
    succeeds(publish_command, run, tmp_path, "--overwrite")
    before = saved_bytes(run)
    fails(2, publish_command, run, newest(run), "--overwrite")
    assert saved_bytes(run) == before
    assert "license: unknown" in (tmp_path / "README.md").read_text()


def test_interrupted_overwrite_leaves_no_card_of_another_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeds(publish_command, run, tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1

    error = SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(publish.timm.models, "save_for_hf", Mock(side_effect=error))
    err = fails(5, publish_command, run, tmp_path, "--overwrite")
    assert "No space" in err and not list(tmp_path.iterdir())
    fails(2, publish_command, run, tmp_path / "new", "--license", "mit\nevil: 1")


@pytest.mark.parametrize("model", ["helpers:noisy", "torchvision:mnasnet0_5", "resnet18_cifar"])
def test_model_of_another_library_is_exit_code_2(
    model: str, train_on_digits: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = {"augment__size_px": 32, "eval__crop_px": 32, "data__val_fraction": 0.01}
    run = train_on_digits(train__max_steps=1, model__name=model, **sizes)
    err = fails(2, publish_command, run, tmp_path / "out", "--allow-import", model)
    assert model in err and not (tmp_path / "out").exists()


def test_crop_pct_gives_the_resized_size_of_the_run() -> None:
    for crop_px in range(160, 240):
        for resize_px in range(crop_px, 300):
            config = Config(eval=EvalConfig(crop_px=crop_px, resize_px=resize_px))
            predictor = SimpleNamespace(transform=EvalTransform(config.eval), config=config)
            assert math.floor(crop_px / timm_crop_pct(predictor)) == resize_px
