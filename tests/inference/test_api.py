"""The Python API: the example of docs/api.md, and the same numbers as tools/predict.py for every
kind of image.
"""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import REPOSITORY, call, losses, train_here
from PIL import Image

import imagenet_cls
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.errors import CheckpointError, DataError
from imagenet_cls.inference.predictor import read_image


@pytest.fixture(scope="module")
def folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory after a short training of the demo."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "data").mkdir()
    (folder / "data" / "digits").symlink_to(digits)
    words = ["demo", "train.max_steps=2", "data.num_workers=0", "model.name=resnet10t"]
    words += [f"data.root={digits}", "log.tensorboard=false", "log.plots=false"]
    train_here([*words, "--work-dir", str(folder / "work_dirs/demo")])
    return folder


def test_example_of_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "api.md").read_text()
    (folder / "use_model.py").write_text(
        re.findall(r"```python\n(# use_model.*?)```", page, re.S)[0]
    )
    monkeypatch.chdir(folder)
    names = runpy.run_path("use_model.py")
    assert names["logits"].shape == (3, 10)
    assert names["losses"] == losses(folder / "work_dirs/demo")


@pytest.mark.filterwarnings("error")  # also of torch, about an array that is not writable
def test_every_kind_of_image_has_the_numbers_of_predict(folder: Path) -> None:
    file = next((folder / "data/digits/train/3").iterdir())
    _, out, _ = call(predict_command, folder / "work_dirs/demo", file, "--json", "--logits")
    expected = json.loads(out)
    array = np.asarray(Image.open(file).convert("RGB"))  # not writable
    kinds = [str(file), file, Image.open(file), array, torch.tensor(array).permute(2, 0, 1)]
    predictor = imagenet_cls.Predictor(folder / "work_dirs/demo")
    for image in kinds:
        (row,) = predictor.predict([image], with_logits=True)
        assert row["image"] == (str(file) if isinstance(image, str | Path) else 0)
        assert row["logits"] == pytest.approx(expected["logits"], abs=1e-5)
        assert [name for name, _ in row["top"]] == [name for name, _ in expected["top"]]
    many = [row["image"] for row in predictor.predict(kinds * 8)]
    assert many[-5:] == [str(file), str(file), 37, 38, 39]


def test_wrong_arguments_raise(folder: Path) -> None:
    predictor = imagenet_cls.Predictor(folder / "work_dirs/demo")
    for shape in ((8, 9), (8, 9, 4)):
        with pytest.raises(TypeError, match=re.escape(str(shape))):
            read_image(np.zeros(shape, np.uint8))
    with pytest.raises(TypeError, match="uint8"):
        predictor.logits([np.zeros((8, 8, 3))])
    for function, argument in (
        (predictor, 5),
        (predictor.logits, "none.jpg"),
        (predictor.features, []),
        (lambda images: next(predictor.predict(images)), "none.jpg"),
    ):
        with pytest.raises(TypeError, match="list"):
            function(argument)
    assert predictor([]) == []
    pixels = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(ValueError, match="top"):
        predictor(pixels, 0)
    for empty in (pixels[:, :0], Image.new("RGB", (0, 8)), torch.zeros(3, 0, 0).byte()):
        with pytest.raises(ValueError, match="no pixels"):
            predictor(empty)
    with pytest.raises(DataError, match=r"none\.jpg"):
        predictor.logits(["none.jpg"])
    for read in (imagenet_cls.load_model, imagenet_cls.read_metrics):
        with pytest.raises(CheckpointError, match="nowhere"):
            read(folder / "nowhere")
    with pytest.raises(AttributeError):
        imagenet_cls.no_such_name  # noqa: B018


def test_error_of_the_model_is_raised_unless_it_is_about_the_size(folder: Path) -> None:
    predictor = imagenet_cls.Predictor(folder / "work_dirs/demo")
    for error, expected in (
        (KeyError("block4"), KeyError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), CheckpointError),
    ):
        with patch.object(predictor.model, "forward", side_effect=error), pytest.raises(expected):
            predictor.logits([np.zeros((8, 8, 3), np.uint8)])


def test_batches_hold_crops_and_not_whole_images(folder: Path) -> None:
    predictor = imagenet_cls.Predictor(folder / "work_dirs/demo")
    images = [np.zeros((height, 300, 3), np.uint8) for height in (50, 900)]
    (batch,) = predictor.read_batches(images)
    crop = (3, *predictor.transform.crop)
    assert [tuple(pixels.shape) for pixels in batch.crops] == [crop, crop]
    assert batch.crops[1].untyped_storage().nbytes() < images[1].nbytes / 10


def test_import_of_the_package_imports_no_torch() -> None:
    program = (
        "import sys, imagenet_cls; imagenet_cls.read_metrics; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
