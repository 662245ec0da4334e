"""Inference with `data.labels` multi: the classes from the threshold on, in predict.py, the API,
exported files, published folders and averages.
"""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers import (
    REPOSITORY,
    arguments,
    call,
    edit_state,
    fails,
    newest,
    state_of,
    succeeds,
    train_here,
)
from PIL import Image

import imagenet_cls
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.data.builtin import ComposedDigits
from imagenet_cls.data.lists import index_list
from imagenet_cls.errors import UsageError
from imagenet_cls.extras.weights.average_checkpoints import average_command, choose
from imagenet_cls.extras.weights.export import export_command
from imagenet_cls.extras.weights.exported_model import METADATA
from imagenet_cls.extras.weights.publish import publish_command
from imagenet_cls.inference.predictor import OnnxPredictor, Predictor

CONFIG = REPOSITORY / "configs/quick/resnet_multilabel.yaml"
IMAGES = 40  # more than a batch


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short epochs of the recipe, each evaluated and saved."""
    folder = tmp_path_factory.mktemp("labels") / "run"
    settings = ["data.fraction=0.1", "data.num_workers=0", "train.epochs=2", "log.plots=false"]
    settings += ["log.tensorboard=false", "checkpoint.keep_last=null", "eval.threshold=0.25"]
    settings += ["checkpoint.every_epochs=1", "eval.every_epochs=1"]
    train_here([str(CONFIG), *settings, "--work-dir", str(folder)])
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    dataset = ComposedDigits("", "val")
    for i in range(IMAGES):
        pixels, _ = dataset[i]
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{i:02d}.png")
    return folder


@pytest.fixture(scope="module")
def onnx_file(run: Path) -> Path:
    succeeds(export_command, run, "--format", "onnx")
    return run / "model.onnx"


def rows_of(source: Path, images: Path, *options: object) -> tuple[list[dict[str, Any]], str]:
    """The rows of predict.py, and its message."""
    code, out, err = call(predict_command, source, images, "--json", "--logits", *options)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == IMAGES
    return rows, err


def check_rows(rows: list[dict[str, Any]], threshold: float, top: int = 10) -> None:
    """Rows have the classes whose sigmoid is at least the threshold, likeliest first."""
    for row in rows:
        shares = torch.tensor(row["logits"]).sigmoid()
        expected = [int(i) for i in shares.argsort(descending=True) if shares[i] >= threshold]
        assert [name for name, _ in row["top"]] == [str(i) for i in expected[:top]]
        found = torch.tensor([share for _, share in row["top"]])
        assert torch.allclose(found, shares[expected[:top]], atol=1e-6)


def altered(run: Path, copy: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the newest checkpoint of a run with another `state.json`."""
    shutil.copytree(newest(run), copy)
    edit_state(copy, edit)
    return copy


def middle_threshold(run: Path, images: Path) -> float:
    """A threshold with more classes for some images than for others."""
    logits = Predictor(run).logits(sorted(images.iterdir()))
    return round(logits.sigmoid().median().item(), 3)


def test_rows_have_the_classes_from_the_threshold_on(run: Path, images: Path) -> None:
    threshold = middle_threshold(run, images)
    rows, err = rows_of(run, images, "--threshold", threshold)
    check_rows(rows, threshold)
    assert len({len(row["top"]) for row in rows}) > 2
    assert f"threshold {threshold:g}" in err
    check_rows(rows_of(run, images, "--threshold", threshold, "--top", 2)[0], threshold, 2)
    predictor = imagenet_cls.Predictor(run, threshold=threshold)
    found = predictor(str(images / "*.png"))
    assert [[list(pair) for pair in row["top"]] for row in found] == [row["top"] for row in rows]
    (row,) = predictor.predict([images / "03.png"], top=1)
    assert [name for name, _ in row["top"]] == [found[3]["top"][0][0]]


def test_default_is_the_best_threshold_of_an_evaluated_checkpoint(
    run: Path, images: Path, tmp_path: Path
) -> None:
    best = state_of(run)["progress"]["latest"]["raw"]["best_threshold"]
    assert best != 0.25
    rows, err = rows_of(newest(run), images)
    check_rows(rows, best)
    assert f"threshold {best:g}" in err

    def make_older(state: dict[str, Any]) -> None:
        state["progress"]["evaluated_step"] -= 1

    older = altered(run, tmp_path / "older", make_older)
    assert Predictor(older).threshold == 0.25
    check_rows(rows_of(older, images)[0], 0.25)

    def spoil(state: dict[str, Any]) -> None:
        state["progress"]["latest"]["raw"]["best_threshold"] = "high"

    fails(4, predict_command, altered(run, tmp_path / "spoilt", spoil), images)


def test_text_and_csv_of_images_without_a_class(run: Path, images: Path, tmp_path: Path) -> None:
    _, out, _ = call(predict_command, run, images, "--threshold", 1)
    assert out.splitlines() == [f"{images}/{i:02d}.png: none" for i in range(IMAGES)]
    threshold = middle_threshold(run, images)
    code, out, _ = call(predict_command, run, images, "--threshold", threshold, "--csv")
    assert code == 0
    rows = list(csv.DictReader(out.splitlines()))
    expected = list(Predictor(run, threshold=threshold).predict(sorted(images.iterdir())))
    for row, same in zip(rows, expected, strict=True):
        shares = [float(text) for text in row["probabilities"].split(";") if text]
        assert shares == [share for _, share in same["top"]]
    # the columns are those of a list to train with
    (tmp_path / "list.csv").write_text(out)
    index = index_list(tmp_path / "list.csv", images, list("0123456789"), multilabel=True)
    names = [{name for name, _ in row["top"]} for row in expected]
    assert [set(map(str, np.flatnonzero(row))) for row in index.targets] == names
    _, out, _ = call(predict_command, run, images, "--threshold", 1, "--csv")
    assert next(csv.DictReader(out.splitlines()))["labels"] == ""


def test_threshold_that_does_not_fit_is_exit_code_2(
    run: Path, images: Path, digits: Path, tmp_path: Path
) -> None:
    fails(2, predict_command, run, images, "--threshold", 1.5)
    with pytest.raises(UsageError):
        Predictor(run, threshold=1.5)
    train_here(arguments(digits, tmp_path / "run", train__max_steps=1))
    trust = ("--allow-import", "helpers:plain")
    fails(2, predict_command, tmp_path / "run", images, "--threshold", 0.5, *trust)
    assert Predictor(tmp_path / "run", allow_import=trust[1:]).threshold is None


def test_nan_is_an_error_and_infinity_below_is_a_probability_of_0(
    run: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.full((IMAGES, 10), -torch.inf)
    logits[:, 3] = 2.0
    monkeypatch.setattr(Predictor, "_logits", lambda self, crops: logits[: len(crops)])
    rows, _ = rows_of(run, images)
    assert [[name for name, _ in row["top"]] for row in rows] == [["3"]] * IMAGES
    logits[:, 4] = torch.nan
    fails(4, predict_command, run, images)


def test_exported_files_have_the_threshold(
    run: Path, onnx_file: Path, images: Path, tmp_path: Path
) -> None:
    predictor = Predictor(run, "cpu")
    files = sorted(images.iterdir())
    exported = OnnxPredictor(onnx_file)
    assert exported.threshold == predictor.threshold
    assert torch.allclose(exported.logits(files), predictor.logits(files), atol=1e-4)
    rows, err = rows_of(onnx_file, images)
    check_rows(rows, predictor.threshold)
    assert f"threshold {predictor.threshold:g}" in err
    check_rows(rows_of(onnx_file, images, "--threshold", 0.3)[0], 0.3)

    archive = tmp_path / "model.pt2"
    succeeds(export_command, run, "--format", "torch", "--out", archive)
    extra = {METADATA: ""}
    torch.export.load(archive, extra_files=extra)
    values = json.loads(extra[METADATA])
    assert (values["labels"], values["threshold"]) == ("multi", predictor.threshold)


def test_onnx_metadata_without_or_with_a_wrong_threshold(
    onnx_file: Path, images: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.onnx"
    onnx = pytest.importorskip("onnx")
    model = onnx.load(onnx_file)
    values = {entry.key: entry.value for entry in model.metadata_props}
    for wrong in ("7", "null", '"high"'):
        onnx.helper.set_model_props(model, values | {"threshold": wrong})
        onnx.save(model, file)
        fails(4, predict_command, file, images)
    older = {key: values[key] for key in values if key not in ("labels", "threshold")}
    onnx.helper.set_model_props(model, older)
    onnx.save(model, file)
    rows, _ = rows_of(file, images, "--top", 10)
    for row in rows:
        assert sum(share for _, share in row["top"]) == pytest.approx(1)
    fails(2, predict_command, file, images, "--threshold", 0.5)


def test_published_folder_loads_in_timm_and_has_the_threshold(
    run: Path, images: Path, tmp_path: Path
) -> None:
    succeeds(publish_command, run, tmp_path)
    predictor = Predictor(run, "cpu")
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    pixels = predictor.prepare(sorted(images.iterdir()))
    with torch.no_grad():
        assert torch.equal(model(pixels), predictor.model(pixels))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert config["threshold"] == predictor.threshold
    card = (tmp_path / "README.md").read_text()
    assert "mAP" in card and "top-1" not in card
    assert "sigmoid" in card and f"{predictor.threshold:g}" in card


def test_features_are_written_and_not_classified(run: Path, images: Path, tmp_path: Path) -> None:
    call(predict_command, run, images, "--features", tmp_path / "features.npz")
    assert len(np.load(tmp_path / "features.npz")["features"]) == IMAGES
    for option in (("--knn", 3), ("--linear-probe",)):
        fails(2, evaluate_command, run / "config.yaml", run, *option)


def test_averages_are_chosen_by_map(run: Path, images: Path, tmp_path: Path) -> None:
    for step, map_pct in enumerate((30.0, 20.0, 40.0), start=1):

        def edit(state: dict[str, Any], map_pct: float = map_pct) -> None:
            state["progress"]["latest"]["raw"]["map_pct"] = map_pct

        altered(run, tmp_path / f"checkpoints/step-{step:07d}", edit)
    chosen = [path.name for path in choose(tmp_path, "best", 2, "raw")]
    assert chosen == ["step-0000001", "step-0000003"]

    succeeds(average_command, run, "--best", 2, "--out", tmp_path / "average")
    (average,) = (tmp_path / "average").iterdir()
    assert Predictor(average).threshold == 0.25  # it was not evaluated
    check_rows(rows_of(average, images)[0], 0.25)

    def make_single(state: dict[str, Any]) -> None:
        del state["config"]["data"]["labels"]

    single = altered(run, tmp_path / "single", make_single)
    fails(4, average_command, newest(run), single, "--out", tmp_path / "mixed")


def test_api_of_the_run(run: Path) -> None:
    trained = imagenet_cls.TrainedRun(run)
    best = max(record["map_pct"] for record in trained.metrics if record["kind"] == "eval")
    assert trained.best["map_pct"] == best
    assert trained.predictor(threshold=0.75).threshold == 0.75
