"""tools/export.py: the same top-1 as tools/test.py through onnxruntime and torch.export, and models
that fail.
"""

import json
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import REPOSITORY, call, fails, has_clear_class, succeeds
from PIL import Image
from torch import nn

from imagenet_cls import lookup
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.extras.weights import exported_model as export
from imagenet_cls.extras.weights.export import export_command
from imagenet_cls.inference.predictor import OnnxModel, OnnxPredictor, Predictor, read_image

TRUST = ("--allow-import", "helpers:plain")


@pytest.fixture(scope="module")
def run(train_on_digits: Callable[..., Path]) -> Path:
    """A short run on digits, with images that are resized and cropped."""
    return train_on_digits(eval__resize_px=20, train__epochs=4)


def check_same_logits(run: Path, files: list[Path], preprocess: str, *trust: str) -> None:
    """For both formats. preprocess: the value of --preprocess."""
    predictor = Predictor(run, "cpu", allow_import=trust[1:])
    expected = predictor.logits(files)
    file = run.parent / f"{preprocess}.onnx"
    options = ("--preprocess", preprocess, *trust)
    succeeds(export_command, run, "--out", file, *options)
    onnx = OnnxPredictor(file)
    assert onnx.weights == predictor.weights
    torch.testing.assert_close(onnx.logits(files), expected, rtol=1e-4, atol=1e-4)
    archive = file.with_suffix(".pt2")
    succeeds(export_command, run, "--out", archive, *options)
    extra = {export.METADATA: ""}
    program = torch.export.load(archive, extra_files=extra).module()
    assert json.loads(extra[export.METADATA])["classes"] == list(predictor.classes)
    pixels = torch.stack([predictor.transform(read_image(file)) for file in files])
    inputs = {"none": predictor.normalize(pixels), "normalize": pixels}[preprocess]
    torch.testing.assert_close(program(inputs), expected, rtol=1e-4, atol=1e-4)


def test_exported_model_has_the_top1_of_test(digits: Path, run: Path, tmp_path: Path) -> None:
    succeeds(evaluate_command, run, "--out", tmp_path / "rows.jsonl", *TRUST)
    rows = list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()))
    files = [digits / "train" / row["image"] for row in rows]
    for mode in ("none", "normalize"):
        check_same_logits(run, files, mode, *TRUST)
    logits = Predictor(run, "cpu", allow_import=TRUST[1:]).logits(files)
    clear, found = has_clear_class(logits), logits.argmax(dim=1)
    assert clear.double().mean() > 0.9 and len(found.unique()) > 5
    expected = torch.tensor([int(row["top"][0][0]) for row in rows])
    assert torch.equal(found[clear], expected[clear])
    for out in ([], ["--out", run / "model.onnx"]):  # an earlier model of the run is replaced
        succeeds(export_command, run, *out, *TRUST)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ({"model__name": "resnet10t"}, "none"),
        ({"model__name": "vit_tiny_patch16_224", "model__kwargs.img_size": 32}, "normalize"),
    ],
)
def test_timm_model_has_the_same_logits(
    model: dict[str, Any], mode: str, digits: Path, train_on_digits: Callable[..., Path]
) -> None:
    sizes = {"augment__size_px": 32, "eval__crop_px": 32, "train__max_steps": 5}
    check_same_logits(
        train_on_digits(**model, **sizes), sorted((digits / "train/3").iterdir()), mode
    )


def test_example_of_the_page(
    digits: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The one with onnxruntime alone, for files of several sizes."""
    monkeypatch.chdir(tmp_path)
    words = [run, "--preprocess", "--out", "digits.onnx"]
    succeeds(export_command, *words, *TRUST)
    page = (REPOSITORY / "docs" / "export.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]
    predictor = Predictor(run, "cpu", allow_import=TRUST[1:])
    for number, size in (("3", (32, 32)), ("5", (80, 50)), ("8", (24, 61)), ("9", (32, 32))):
        image = Image.open(sorted((digits / "train" / number).iterdir())[0]).resize(size)
        if number == "9":  # gray of 16 bits
            image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
        image.save("digit.jpg", "PNG")
        capsys.readouterr()
        exec(example, {})
        (row,) = predictor.predict(["digit.jpg"])
        assert capsys.readouterr().out == f"{row['top'][0][0]}\n"


def test_predict_prints_the_same_for_an_onnx_file(digits: Path, run: Path, tmp_path: Path) -> None:
    images = sorted((digits / "train/3").iterdir())[:40]  # two batches
    file = tmp_path / "model.onnx"
    for options in ((), ("--preprocess",)):
        file.unlink(missing_ok=True)
        succeeds(export_command, run, "--out", file, *options, *TRUST)
        _, expected, _ = call(predict_command, run, *images, *TRUST)
        assert call(predict_command, file, *images)[:2] == (0, expected)
    import onnx

    model = onnx.load(file)
    stored = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert stored["input_size"] == [3, 16, 16] and stored["resize_size"] == [20, 20]
    assert stored["eval"]["crop_px"] == 16 and stored["preprocess"] == "normalize"
    fails(2, predict_command, file, images[0], "--weights", "ema")
    (classes,) = (entry for entry in model.metadata_props if entry.key == "classes")
    for names, code in (("0123456789a", 4), ("012345678", 0)):
        classes.value = json.dumps(list(names))
        onnx.save(model, file)
        found, out, _ = call(predict_command, file, images[0], "--top", 10, "--json")
        assert found == code
    assert {name for name, _ in json.loads(out)["top"]} == {*names, "class 9"}
    file.write_bytes(b"no model")
    assert "export.py" in fails(4, predict_command, file, images[0])


def test_onnx_file_with_other_or_undefined_outputs_exits_with_4(
    digits: Path, run: Path, tmp_path: Path
) -> None:
    import onnx

    images = sorted((digits / "train/3").iterdir())[:2]
    succeeds(export_command, run, "--out", tmp_path / "model.onnx", *TRUST)
    for operator, attributes in (
        ("Flatten", {"axis": 0}),  # one row for all images
        ("Transpose", {}),
        ("ReduceMax", {"keepdims": 0}),
        ("Log", {}),  # NaN for negative logits
    ):
        model = onnx.load(tmp_path / "model.onnx")
        (output,) = model.graph.output
        node = onnx.helper.make_node(operator, [output.name], ["others"], **attributes)
        model.graph.node.append(node)
        output.name = "others"
        output.type.tensor_type.ClearField("shape")
        onnx.save(model, tmp_path / "other.onnx")
        assert "other.onnx" in fails(4, predict_command, tmp_path / "other.onnx", *images)


def test_predict_prepares_gray_images_and_mirror_images_for_the_graph(
    train_on_digits: Callable[..., Path], photographs: list[Image.Image], tmp_path: Path
) -> None:
    """Of an odd width: the mirror image is that of the crop."""
    changes = {"data__channels": 1, "eval__flip_tta": True, "eval__mode": "pad"}
    changes |= {"eval__interpolation": "bicubic", "model__name": f"{__name__}:gray"}
    run, file = train_on_digits(**changes, train__max_steps=2), tmp_path / "model.onnx"
    trust = ("--allow-import", f"{__name__}:gray")
    succeeds(export_command, run, "--preprocess", "--out", file, *trust)
    images = [photo.resize(size) for photo, size in product(photographs, ((640, 427), (91, 333)))]
    expected = Predictor(run, "cpu", allow_import=trust[1:]).logits(images)
    found = OnnxPredictor(file).logits(images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def gray(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, num_classes))


def eigenvalues(num_classes: int) -> nn.Module:
    class Model(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.linalg.eigvals(images.mean(1)[:, :4, :4].detach()).abs())

    return Model(4, num_classes)


def test_model_that_can_not_be_exported_is_explained(
    train_on_digits: Callable[..., Path], tmp_path: Path
) -> None:
    name = f"{__name__}:eigenvalues"
    run = train_on_digits(train__max_steps=1, model__name=name)
    file = tmp_path / "model.onnx"
    err = fails(4, export_command, run, "--out", file, "--allow-import", name)
    assert "aten.linalg_eig" in err and not file.exists()
    assert logging.root.manager.disable == logging.NOTSET


def test_other_logits_are_an_error_and_leave_no_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = OnnxModel.forward
    monkeypatch.setattr(OnnxModel, "forward", lambda self, images: -forward(self, images))
    file = tmp_path / "model.onnx"
    fails(4, export_command, run, "--out", file, *TRUST)
    assert list(tmp_path.iterdir()) == []


def test_missing_package_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "find_spec", lambda name: None if name == "onnxscript" else name)
    assert "onnxscript" in fails(2, export_command, run, *TRUST)
