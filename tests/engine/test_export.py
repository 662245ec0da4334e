"""tools/export.py: the same top-1 as tools/test.py through onnxruntime and torch.export, and models that fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import arguments, train_here
from torch import nn

from imagenet_cls.commands.export import export_command
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.engine import export
from imagenet_cls.engine.inference import Predictor, read_image

TRUST = ("--allow-import", "helpers:plain")


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits, with images that are resized and cropped."""
    work_dir = tmp_path_factory.mktemp("export") / "run"
    train_here(arguments(digits, work_dir, eval__resize_px=20, train__epochs=4))
    return work_dir


def held_out(call: Callable, digits: Path, run: Path, *options: str) -> tuple[list[Path], list[str]]:
    """The held-out images, and their top-1 classes of tools/test.py."""
    out = run.parent / f"{run.name}.jsonl"
    out.unlink(missing_ok=True)
    assert call(evaluate_command, run, "--out", out, *options)[0] == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return [digits / "train" / row["image"] for row in rows], [row["top"][0][0] for row in rows]


def check_same_top1(call: Callable, digits: Path, run: Path, *trust: str) -> None:
    """For both formats, with preprocessing in the graph and outside of it."""
    files, expected = held_out(call, digits, run, *trust)
    assert len(files) == 359 and len(set(expected)) > 5
    predictor = Predictor(run, "cpu", allow_import=trust[1:])
    pixels = torch.stack([predictor.transform(read_image(file)) for file in files])
    for options in ((), ("--preprocess",)):
        file = run.parent / f"{run.name}{len(options)}.onnx"
        code, out, err = call(export_command, run, "--format", "onnx", "--out", file, *options, *trust)
        assert code == 0 and "7 held-out images, in batches of 1 and 7: logits differ by up to" in out, (out, err)
        rows = list(export.OnnxPredictor(file).predict(files))
        assert [row["top"][0][0] for row in rows] == expected
        archive = file.with_suffix(".pt2")
        assert call(export_command, run, "--format", "torch", "--out", archive, *options, *trust)[0] == 0
        extra = {export.METADATA: ""}
        program = torch.export.load(archive, extra_files=extra).module()
        classes = json.loads(extra[export.METADATA])["classes"]
        logits = program(pixels if options else predictor.preprocess(pixels))
        assert [classes[index] for index in logits.argmax(dim=1)] == expected


def test_exported_model_has_the_top1_of_test(call: Callable, digits: Path, run: Path) -> None:
    check_same_top1(call, digits, run, *TRUST)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model", [{"model__name": "resnet10t"}, {"model__name": "vit_tiny_patch16_224", "model__kwargs.img_size": 32}]
)
def test_timm_model_has_the_top1_of_test(model: dict[str, Any], call: Callable, digits: Path, tmp_path: Path) -> None:
    sizes = {"augment__size_px": 32, "eval__crop_px": 32, "train__epochs": 6}
    train_here(arguments(digits, tmp_path / "run", **model, **sizes))
    check_same_top1(call, digits, tmp_path / "run")


def test_predict_prints_the_same_for_an_onnx_file(call: Callable, digits: Path, run: Path, tmp_path: Path) -> None:
    images = sorted((digits / "train/3").iterdir())[:40]  # two batches
    file = tmp_path / "model.onnx"
    for options in ((), ("--preprocess", "--opset", 18)):
        file.unlink(missing_ok=True)
        assert call(export_command, run, "--format", "onnx", "--out", file, *options, *TRUST)[0] == 0
        assert call(predict_command, file, *images)[:2] == call(predict_command, run, *images, *TRUST)[:2]
    import onnx

    model = onnx.load(file)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 18
    stored = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert stored["input_size"] == [3, 16, 16] and stored["eval"]["resize_px"] == 20
    assert stored["classes"] == [str(digit) for digit in range(10)]
    assert "set of weights" in call(predict_command, file, images[0], "--weights", "ema")[2]
    file.write_bytes(b"no model")
    code, _, err = call(predict_command, file, images[0])
    assert code == 4 and "export.py" in err


def values_decide(num_classes: int) -> nn.Module:
    class Model(nn.Flatten):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images)[:, :10] if images.sum() > 1e9 else images.mean((2, 3)).repeat(1, 4)[:, :10]

    return nn.Sequential(Model(), nn.Linear(10, num_classes))


def bessel(num_classes: int) -> nn.Module:
    class Model(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.special.bessel_j0(images.mean((2, 3)).detach()))

    return Model(3, num_classes)


@pytest.mark.parametrize(("model", "reason"), [("values_decide", "data-dependent"), ("bessel", "bessel_j0")])
def test_model_that_can_not_be_exported_is_explained(
    model: str, reason: str, call: Callable, digits: Path, tmp_path: Path
) -> None:
    name = f"{__name__}:{model}"
    train_here(arguments(digits, tmp_path / "run", train__max_steps=1, model__name=name))
    file = tmp_path / "model.onnx"
    code, _, err = call(export_command, tmp_path / "run", "--format", "onnx", "--out", file, "--allow-import", name)
    assert code == 4 and reason in err and not file.exists()


def test_other_logits_are_an_error_and_leave_no_file(
    call: Callable, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = export.OnnxModel.forward
    monkeypatch.setattr(export.OnnxModel, "forward", lambda self, images: -forward(self, images))
    file = tmp_path / "model.onnx"
    code, _, err = call(export_command, run, "--format", "onnx", "--out", file, *TRUST)
    assert code == 4 and "tolerance" in err and "lower in PyTorch" in err
    assert list(tmp_path.iterdir()) == []


def test_random_images_replace_missing_data(call: Callable, run: Path, digits: Path, tmp_path: Path) -> None:
    away = digits.rename(digits.with_name("away"))
    try:
        code, out, _ = call(export_command, run, "--format", "torch", "--out", tmp_path / "model.pt2", *TRUST)
    finally:
        away.rename(digits)
    assert code == 0 and "7 random images (no " in out


def test_missing_package_is_named(call: Callable, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else name)
    code, _, err = call(export_command, run, "--format", "onnx", "--out", tmp_path / "model.onnx", *TRUST)
    assert code == 2 and "pip install onnxscript" in err
