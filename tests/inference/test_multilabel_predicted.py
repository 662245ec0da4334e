"""Inference with `data.labels` multi: the classes from the threshold on, in predict.py, the API,
exported files and published folders.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REPOSITORY, altered, call, fails, newest, state_of, succeeds, train_here
from torchvision.transforms.functional import to_pil_image

import imagenet_cls
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.data.builtin import ComposedDigits
from imagenet_cls.data.lists import index_list
from imagenet_cls.errors import CheckpointError
from imagenet_cls.extras.weights.export import export_command
from imagenet_cls.extras.weights.exported_model import METADATA
from imagenet_cls.extras.weights.publish import publish_command
from imagenet_cls.inference.predictor import OnnxPredictor, Predictor

CONFIG = REPOSITORY / "configs/quick/resnet_multilabel.yaml"


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
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    dataset = ComposedDigits("", "val")
    files = [folder / f"{i}.png" for i in range(9)]
    for i, file in enumerate(files):
        to_pil_image(dataset[i][0]).save(file)
    return files


@pytest.fixture(scope="module")
def onnx_file(run: Path) -> Path:
    succeeds(export_command, run)
    return run / "model.onnx"


@pytest.fixture(scope="module")
def middle(run: Path, images: list[Path]) -> float:
    """A threshold with more classes for some images than for others."""
    return round(Predictor(run).logits(images).sigmoid().median().item(), 3)


def check_rows(
    predictor: Predictor, images: list[Path], threshold: float, top: int | None = None
) -> None:
    """Rows have the classes whose sigmoid is at least the threshold, likeliest first."""
    assert predictor.threshold == threshold
    for row in predictor.predict(images, top, with_logits=True):
        shares = torch.tensor(row["logits"]).sigmoid()
        expected = [int(i) for i in shares.argsort(descending=True) if shares[i] >= threshold]
        assert [name for name, _ in row["top"]] == [str(i) for i in expected[:top]]
        found = torch.tensor([share for _, share in row["top"]])
        assert torch.allclose(found, shares[expected[:top]], atol=1e-6)


def test_rows_have_the_classes_from_the_threshold_on(
    run: Path, images: list[Path], middle: float
) -> None:
    predictor = imagenet_cls.TrainedRun(run).predictor(threshold=middle)
    assert len({len(row["top"]) for row in predictor(images)}) > 2
    check_rows(predictor, images, middle)
    check_rows(predictor, images, middle, top=2)


def test_default_is_the_best_threshold_of_an_evaluated_checkpoint(
    run: Path, images: list[Path], tmp_path: Path
) -> None:
    best = state_of(run)["progress"]["latest"]["raw"]["best_threshold"]
    assert best != 0.25
    check_rows(Predictor(newest(run)), images, best)

    def make_older(state: dict[str, Any]) -> None:
        state["progress"]["evaluated_step"] -= 1

    assert Predictor(altered(newest(run), tmp_path / "older", make_older)).threshold == 0.25

    def spoil(state: dict[str, Any]) -> None:
        state["progress"]["latest"]["raw"]["best_threshold"] = "high"

    fails(4, predict_command, altered(newest(run), tmp_path / "spoilt", spoil), *images)


def test_csv_is_a_list_to_train_with(
    run: Path, images: list[Path], middle: float, tmp_path: Path
) -> None:
    _, out, _ = call(predict_command, run, images[0], "--threshold", 1)
    assert out == f"{images[0]}: none\n"
    _, out, _ = call(predict_command, run, *images, "--threshold", middle, "--csv")
    (tmp_path / "list.csv").write_text(out)
    index = index_list(tmp_path / "list.csv", "", list("0123456789"), multilabel=True)
    expected = Predictor(run).logits(images).sigmoid() >= middle
    assert index.targets.tolist() == expected.int().tolist()


def test_threshold_that_does_not_fit_is_a_usage_error(
    run: Path, onnx_file: Path, images: list[Path], tmp_path: Path
) -> None:
    def make_single(state: dict[str, Any]) -> None:
        del state["config"]["data"]["labels"]

    single = altered(newest(run), tmp_path / "single", make_single)
    assert Predictor(single).threshold is None
    for source, threshold in ((run, 1.5), (onnx_file, 1.5), (single, 0.5)):
        fails(2, predict_command, source, images[0], "--threshold", threshold)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_outputs_without_probabilities_are_an_error(
    run: Path, images: list[Path], monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    logits = torch.tensor([[value] * 9 + [2.0]])
    monkeypatch.setattr(Predictor, "_logits", lambda self, crops: logits)
    with pytest.raises(CheckpointError):
        Predictor(run)(images[:1])


def test_exported_files_have_the_threshold(
    run: Path, onnx_file: Path, images: list[Path], tmp_path: Path
) -> None:
    predictor = Predictor(run, "cpu")
    exported = OnnxPredictor(onnx_file)
    assert torch.allclose(exported.logits(images), predictor.logits(images), atol=1e-4)
    check_rows(exported, images, predictor.threshold)

    archive = tmp_path / "model.pt2"
    succeeds(export_command, run, "--out", archive)
    extra = {METADATA: ""}
    torch.export.load(archive, extra_files=extra)
    values = json.loads(extra[METADATA])
    assert (values["labels"], values["threshold"]) == ("multi", predictor.threshold)


def test_published_folder_has_the_threshold_and_the_results(run: Path, tmp_path: Path) -> None:
    succeeds(publish_command, run, tmp_path)
    threshold = Predictor(run, "cpu").threshold
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert config["threshold"] == threshold
    card = (tmp_path / "README.md").read_text()
    assert "mAP" in card and "top-1" not in card
