"""The Python API: the example of docs/api.md, and the same numbers as tools/predict.py for every
kind of image.
"""

import itertools
import json
import re
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import REPOSITORY, call, environment, losses, train_here
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
        with pytest.raises(TypeError, match=r"list|iterable"):
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
    for read in (imagenet_cls.Predictor, imagenet_cls.read_metrics):
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


def test_predictor_may_be_used_from_several_threads(folder: Path, tmp_path: Path) -> None:
    predictor = imagenet_cls.Predictor(folder / "work_dirs/demo")
    generator = np.random.default_rng(0)
    images = [Image.fromarray(generator.integers(0, 256, (40, 50, 3), np.uint8)) for _ in range(8)]
    files = [tmp_path / f"{number}.png" for number in range(8)]  # which Pillow decodes
    for image, file in zip(images, files, strict=True):
        image.save(file)
    features = [predictor.features([file]) for file in files]
    logits = [predictor.logits([file]) for file in files]
    used = imagenet_cls.Predictor(folder / "work_dirs/demo")
    forward = used.model.forward

    def slow_forward(pixels: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = forward(pixels)
        time.sleep(0.02)  # other threads go on before the features are taken
        return result

    filters = [*warnings.filters]
    with patch.object(used.model, "forward", slow_forward), ThreadPoolExecutor(8) as pool:
        found = [pool.submit(used.features, [file]) for file in files * 4]
        found += [pool.submit(used.logits, [file]) for file in files * 4]
    for expected, result in zip(features * 4 + logits * 4, found, strict=True):
        torch.testing.assert_close(result.result(), expected)
    assert warnings.filters == filters


def test_iter_reads_one_batch_ahead_of_an_endless_generator(folder: Path) -> None:
    predictor = imagenet_cls.Predictor(folder / "work_dirs/demo")
    files = sorted((folder / "data/digits/train/3").iterdir())[:5]
    taken = []

    def camera() -> Iterator[Any]:
        for number in itertools.count():
            taken.append(number)
            file = files[number % 5]
            yield file if number % 2 else np.asarray(Image.open(file).convert("RGB"))

    rows = predictor.iter(camera(), batch_size=3, workers=2)
    found = [next(rows) for _ in range(7)]
    assert len(taken) == 12  # three batches, and one that is read
    del rows
    expected = [*predictor.predict(files)]
    for number, row in enumerate(found):
        assert row["image"] == (str(files[number % 5]) if number % 2 else number)
        for (name, share), (other, known) in zip(
            row["top"], expected[number % 5]["top"], strict=True
        ):
            assert name == other and share == pytest.approx(known, abs=1e-5)
    broken = predictor.iter([*files[:2], "none.jpg"], batch_size=2)
    assert [next(broken)["image"] for _ in range(2)] == [*map(str, files[:2])]
    with pytest.raises(DataError, match=r"none\.jpg"):
        next(broken)


def test_mistakes_are_the_images_that_an_evaluation_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    for folder_of_class in (folder / "data/digits/train").iterdir():
        (tmp_path / folder_of_class.name).mkdir()
        for file in sorted(folder_of_class.iterdir())[:2]:
            (tmp_path / folder_of_class.name / file.name).symlink_to(file)
    run = imagenet_cls.TrainedRun(folder / "work_dirs/demo")
    results = run.evaluate(tmp_path, device="cpu")
    mistakes = run.mistakes(tmp_path, device="cpu")
    predictor = run.predictor(device="cpu")
    right = results[predictor.weights]["top1_pct"] / 100 * 20
    assert len(mistakes) == 20 - round(right) > 0
    for mistake in mistakes:
        path = Path(mistake["path"])
        (row,) = predictor.predict([path])
        (name, confidence), *_ = row["top"]
        assert mistake["true"] == path.parent.name != mistake["predicted"] == name
        assert mistake["confidence"] == pytest.approx(confidence, abs=1e-4)
    shares = [mistake["confidence"] for mistake in mistakes]
    assert shares == sorted(shares, reverse=True)


def test_on_eval_stops_a_run_that_can_be_resumed(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    values = {"data.root": digits, "data.num_workers": 0, "model.name": "helpers:noisy"}
    values |= {"model.kwargs": {"pause_sec": 0.2}, "log.tensorboard": False, "log.report": False}
    train = partial(imagenet_cls.train, "demo", values, size=16, epochs=50, work_dir=tmp_path)
    calls: list[dict[str, Any]] = []

    def stop(record: dict[str, Any]) -> bool:
        calls.append(record)
        return True

    run = train(on_eval=stop)
    evaluations = [record for record in run.metrics if record["kind"] == "eval"]
    assert calls == evaluations[: len(calls)] and calls[0]["epoch"] == 0
    first = max(record["step"] for record in run.metrics)
    assert calls[-1]["step"] <= first < 50 * calls[0]["step"]
    with pytest.raises(ZeroDivisionError):
        train(resume=True, on_eval=lambda record: 1 / 0)
    assert max(record["step"] for record in run.metrics) > first
    saved = imagenet_cls.read_metrics(tmp_path)[-1]["step"]
    assert (tmp_path / "checkpoints" / f"step-{saved:07}").is_dir()


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
