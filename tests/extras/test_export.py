"""tools/export.py: the same top-1 as tools/test.py through onnxruntime and torch.export, and models
that fail.
"""

import json
import logging
from collections.abc import Callable, Sequence
from itertools import compress, product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    REPOSITORY,
    arguments,
    call,
    fails,
    has_clear_class,
    succeeds,
    train_here,
)
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn

from imagenet_cls import lookup
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.errors import CheckpointError
from imagenet_cls.extras.weights import exported_model as export
from imagenet_cls.extras.weights.export import export_command
from imagenet_cls.inference.predictor import OnnxModel, OnnxPredictor, Predictor, read_image

TRUST = ("--allow-import", "helpers:plain")


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits, with images that are resized and cropped."""
    work_dir = tmp_path_factory.mktemp("export") / "run"
    train_here(arguments(digits, work_dir, eval__resize_px=20, train__epochs=4))
    return work_dir


def held_out(digits: Path, run: Path, *options: str) -> tuple[list[Path], list[str]]:
    """The held-out images, and their top-1 classes of tools/test.py."""
    out = run.parent / f"{run.name}.jsonl"
    out.unlink(missing_ok=True)
    succeeds(evaluate_command, run, "--out", out, *options)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return [digits / "train" / row["image"] for row in rows], [row["top"][0][0] for row in rows]


def check_same_top1(digits: Path, run: Path, modes: Sequence[str], *trust: str) -> None:
    """For both formats. modes: values of --preprocess."""
    files, expected = held_out(digits, run, *trust)
    assert len(files) == 359 and len(set(expected)) > 5
    predictor = Predictor(run, "cpu", allow_import=trust[1:])
    clear = has_clear_class(predictor.logits(files))
    assert clear.double().mean() > 0.9
    pixels = torch.stack([predictor.transform(read_image(file)) for file in files])

    def is_same(found: Sequence[str]) -> bool:
        return list(compress(found, clear)) == list(compress(expected, clear))

    inputs = {"none": predictor.normalize(pixels), "normalize": pixels}
    for preprocess in modes:
        file = run.parent / f"{run.name}_{preprocess}.onnx"
        options = ("--preprocess", preprocess, *trust)
        code, out, err = call(export_command, run, "--format", "onnx", "--out", file, *options)
        assert (
            code == 0
            and "logits differ by up to" in out
            and "random images, in batches of 1 and 7" in out
        ), err
        onnx = OnnxPredictor(file)
        assert onnx.weights == predictor.weights
        rows = list(onnx.predict(files))
        assert is_same([row["top"][0][0] for row in rows])
        archive = file.with_suffix(".pt2")
        succeeds(export_command, run, "--format", "torch", "--out", archive, *options)
        extra = {export.METADATA: ""}
        program = torch.export.load(archive, extra_files=extra).module()
        classes = json.loads(extra[export.METADATA])["classes"]
        assert is_same([classes[index] for index in program(inputs[preprocess]).argmax(dim=1)])


def test_exported_model_has_the_top1_of_test(digits: Path, run: Path) -> None:
    check_same_top1(digits, run, ("none", "normalize"), *TRUST)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ({"model__name": "resnet10t"}, "none"),
        ({"model__name": "vit_tiny_patch16_224", "model__kwargs.img_size": 32}, "normalize"),
    ],
)
def test_timm_model_has_the_top1_of_test(
    model: dict[str, Any], mode: str, digits: Path, tmp_path: Path
) -> None:
    sizes = {"augment__size_px": 32, "eval__crop_px": 32, "train__epochs": 4}
    train_here(arguments(digits, tmp_path / "run", **model, **sizes))
    check_same_top1(digits, tmp_path / "run", [mode])


def test_example_of_the_page(
    digits: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The one with onnxruntime alone, for files of several sizes."""
    monkeypatch.chdir(tmp_path)
    options = ("--preprocess", "normalize", *TRUST)
    succeeds(export_command, run, "--format", "onnx", "--out", "digits.onnx", *options)
    example = (
        (REPOSITORY / "docs" / "export.md")
        .read_text()
        .partition("```python\n")[2]
        .partition("```")[0]
    )
    predictor = Predictor(run, "cpu", allow_import=TRUST[1:])
    for number, size in (("3", (32, 32)), ("5", (80, 50)), ("8", (24, 61))):
        Image.open(sorted((digits / "train" / number).iterdir())[0]).resize(size).save("digit.jpg")
        capsys.readouterr()
        exec(example, {})
        (row,) = predictor.predict(["digit.jpg"])
        assert capsys.readouterr().out == f"{row['top'][0][0]}\n"


def test_predict_prints_the_same_for_an_onnx_file(digits: Path, run: Path, tmp_path: Path) -> None:
    images = sorted((digits / "train/3").iterdir())[:40]  # two batches
    file = tmp_path / "model.onnx"
    for options in ((), ("--preprocess", "--opset", 18)):
        file.unlink(missing_ok=True)
        succeeds(export_command, run, "--format", "onnx", "--out", file, *options, *TRUST)
        assert (
            call(predict_command, file, *images)[:2]
            == call(predict_command, run, *images, *TRUST)[:2]
        )
    import onnx

    model = onnx.load(file)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 18
    stored = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert stored["input_size"] == [3, 16, 16] and stored["resize_size"] == [20, 20]
    assert stored["eval"] == {
        "mode": "crop",
        "crop_px": 16,
        "crop_pct": 1.0,
        "resize_px": 20,
        "interpolation": "bilinear",
        "flip_tta": False,
    }
    assert (
        stored["classes"] == [str(digit) for digit in range(10)]
        and stored["preprocess"] == "normalize"
    )
    assert "set of weights" in call(predict_command, file, images[0], "--weights", "ema")[2]
    file.write_bytes(b"no model")
    err = fails(4, predict_command, file, images[0])
    assert "export.py" in err


def test_file_with_a_resize_in_the_graph_is_an_error(
    call: Callable, digits: Path, run: Path, tmp_path: Path
) -> None:
    """Earlier versions wrote such files."""
    import onnx

    file = tmp_path / "model.onnx"
    assert (
        call(export_command, run, "--format", "onnx", "--out", file, "--preprocess", *TRUST)[0] == 0
    )
    model = onnx.load(file)
    for entry in model.metadata_props:
        if entry.key == "preprocess":
            entry.value = '"resize"'
    onnx.save(model, file)
    code, _, err = call(predict_command, file, digits / "train/3")
    assert code == 4 and "expected: (tensor(uint8))" in err and len(err.splitlines()) <= 3


def test_predict_prepares_gray_images_and_mirror_images_for_the_graph(
    digits: Path, tmp_path: Path
) -> None:
    """Of an odd width: the mirror image is that of the crop."""
    changes = {
        "data__channels": 1,
        "eval__flip_tta": True,
        "eval__mode": "pad",
        "eval__interpolation": "bicubic",
    }
    train_here(
        arguments(
            digits, tmp_path / "run", **changes, model__name=f"{__name__}:gray", train__max_steps=2
        )
    )
    trust = ("--allow-import", f"{__name__}:gray")
    for number, (pixels, size) in enumerate(
        product(load_sample_images().images, ((640, 427), (91, 333)))
    ):
        Image.fromarray(pixels).resize(size).save(tmp_path / f"{number}.png")
    file = tmp_path / "model.onnx"
    options = ("--preprocess", "normalize", "--opset", 18)
    succeeds(export_command, tmp_path / "run", "--format", "onnx", "--out", file, *options, *trust)
    rows = [
        [
            json.loads(line)["logits"]
            for line in call(predict_command, *given, "--json", "--logits")[1].splitlines()
        ]
        for given in ((file, tmp_path / "*.png"), (tmp_path / "run", tmp_path / "*.png", *trust))
    ]
    assert len(rows[0]) == 4
    torch.testing.assert_close(torch.tensor(rows[0]), torch.tensor(rows[1]), rtol=1e-4, atol=1e-4)


def gray(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, num_classes))


def values_decide(num_classes: int) -> nn.Module:
    class Model(nn.Flatten):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return (
                super().forward(images)[:, :10]
                if images.sum() > 1e9
                else images.mean((2, 3)).repeat(1, 4)[:, :10]
            )

    return nn.Sequential(Model(), nn.Linear(10, num_classes))


def eigenvalues(num_classes: int) -> nn.Module:
    class Model(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.linalg.eigvals(images.mean(1)[:, :4, :4].detach()).abs())

    return Model(4, num_classes)


@pytest.mark.parametrize(
    ("model", "form", "reasons"),
    [
        (
            "values_decide",
            "torch",
            ["data-dependent", "test_export.py, line", "if images.sum() > 1e9"],
        ),
        ("eigenvalues", "onnx", ["aten.linalg_eig", "--format torch"]),
    ],
)
def test_model_that_can_not_be_exported_is_explained(
    model: str, form: str, reasons: list[str], digits: Path, tmp_path: Path
) -> None:
    name = f"{__name__}:{model}"
    train_here(arguments(digits, tmp_path / "run", train__max_steps=1, model__name=name))
    file = tmp_path / ("model.onnx" if form == "onnx" else "model.pt2")
    err = fails(
        4, export_command, tmp_path / "run", "--format", form, "--out", file, "--allow-import", name
    )
    assert all(reason in err for reason in reasons) and not file.exists(), err


def test_other_logits_are_an_error_and_leave_no_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = OnnxModel.forward
    monkeypatch.setattr(OnnxModel, "forward", lambda self, images: -forward(self, images))
    file = tmp_path / "model.onnx"
    err = fails(4, export_command, run, "--format", "onnx", "--out", file, *TRUST)
    assert "tolerance" in err
    assert list(tmp_path.iterdir()) == []


def test_opset_that_is_not_exported_is_an_error(run: Path, tmp_path: Path) -> None:
    for form, opset, expected in (
        ("onnx", 7, "--opset 18"),
        ("onnx", 99, "--opset 18"),
        ("torch", 18, "--format onnx"),
    ):
        out = tmp_path / ("model.onnx" if form == "onnx" else "model.pt2")
        err = fails(
            2, export_command, run, "--format", form, "--opset", opset, "--out", out, *TRUST
        )
        assert f"--opset {opset}" in err and expected in err and not out.exists()


def test_export_of_a_run_is_written_into_its_folder(call: Callable, run: Path) -> None:
    code, out, _ = call(export_command, run, "--format", "torch", *TRUST)
    file = run / "model.pt2"
    assert code == 0 and out.endswith(f"to {file}\n")
    assert file.stat().st_size > 0
    file.unlink()


def test_missing_package_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "find_spec", lambda name: None if name == "onnxscript" else name)
    err = fails(
        2, export_command, run, "--format", "onnx", "--out", tmp_path / "model.onnx", *TRUST
    )
    assert "pip install onnxscript" in err


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_out_of_memory_is_no_checkpoint_error_and_the_log_level_is_restored(
    error: type[Exception], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(torch.export, "export", out_of_memory)
    logging.disable(logging.INFO)
    try:
        with pytest.raises(error):
            export.export_model(
                Predictor(run, "cpu", allow_import=TRUST[1:]), "torch", "none", None
            )
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)


def test_weights_with_nan_are_named_as_the_cause(run: Path) -> None:
    predictor = Predictor(run, "cpu", allow_import=TRUST[1:])
    next(predictor.model.parameters()).data.fill_(float("nan"))
    exported = export.export_model(predictor, "torch", "none", None)
    with pytest.raises(CheckpointError, match="logits of PyTorch are NaN"):
        export.compare(predictor, exported)
