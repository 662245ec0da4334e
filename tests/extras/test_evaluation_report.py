"""`test.py --report`: figures on three ranks equal those of scikit-learn, and the page
shows only those.
"""

import csv
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import DEMO, fails, plain, succeeds
from PIL import Image
from safetensors.torch import save_file
from sklearn import metrics
from sklearn.calibration import calibration_curve

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.extras.pages.evaluation_page import evaluation_page, evaluation_statistics
from imagenet_cls.extras.pages.evaluation_report import EvaluationReport
from imagenet_cls.extras.pages.render import format_cell
from imagenet_cls.inference.evaluate_weights import evaluate_weights, prediction_rows
from imagenet_cls.inference.load_weights import WeightsSource
from imagenet_cls.tasks.single_label import image_dtype

CLASSES = sorted(["a <b>&", "$x$", "cat", "dog", "猫", "owl", "pig"])
NUM_IMAGES = 61


def words(folder: Path, val: str = "val") -> list[str]:
    """A config for the images in `folder`, without workers."""
    settings = {
        "data.name": "folder",
        "data.root": folder / "images",
        "data.train": "val",
        "data.val": val,
        "data.num_workers": 0,
        "eval.crop_px": 16,
        "eval.batch_size": 7,
        "eval.metrics": "[helpers:mean_target]",
        "ema.decay": "null",
        "model.name": "helpers:plain",
        "model.checkpoint": folder / "weights.safetensors",
    }
    return [DEMO, *(f"{key}={value}" for key, value in settings.items())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one random color each and of many sizes, and random weights that predict several
    classes.
    """
    folder = tmp_path_factory.mktemp("report")
    draws = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        name = CLASSES[int(draws.integers(len(CLASSES))) if number >= len(CLASSES) else number]
        path = folder / "images" / "val" / name / f"<i>{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = draws.integers(16, 60, 2).tolist()
        Image.new("RGB", size, tuple(draws.integers(0, 256, 3).tolist())).save(path)
    torch.manual_seed(1)
    state = {name: 3 * value for name, value in plain(len(CLASSES)).state_dict().items()}
    save_file(state, folder / "weights.safetensors")
    return folder


def report_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    """Evaluate with a report, and write the results and the rows of the predictions beside it."""
    context = join_ranks(rank, ranks, folder / "store")
    config = load_config(DEMO, words(folder)[1:]).config
    evaluation = evaluate_weights(config, WeightsSource(), context, record=True)
    if rank == 0:
        EvaluationReport(folder / "written").write(evaluation)
        rows = [evaluation.results, list(prediction_rows(evaluation))]
        (folder / "written" / "rows.json").write_text(json.dumps(rows))
    destroy_process_groups(context)


@pytest.fixture(scope="module")
def written(folder: Path, rank_server: RankServer) -> Path:
    rank_server.call(report_on_ranks, 3, folder)
    return folder / "written"


def counts_in(folder: Path) -> list[list[int]]:
    """The confusion matrix; asserts that its rows and columns have the names of the classes."""
    head, *table = csv.reader((folder / "confusion.csv").open(newline=""))
    assert head[1:] == [row[0] for row in table] == CLASSES
    return [list(map(int, row[1:])) for row in table]


def test_figures_equal_those_of_scikit_learn(written: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    results, rows = json.loads((written / "rows.json").read_text())
    target, predicted = ([row["target"] for row in rows], [row["top"][0][0] for row in rows])
    correct = np.array(target) == np.array(predicted)
    assert 1 < len(set(predicted)) < len(CLASSES)  # precision is undefined for some
    assert report["images"] == len(rows) and report["correct"] == correct.sum()
    assert report["top1_pct"] == pytest.approx(results["raw"]["top1_pct"])
    assert report["nll"] == pytest.approx(results["raw"]["loss"], rel=1e-5)
    matrix = metrics.confusion_matrix(target, predicted, labels=CLASSES)
    assert counts_in(written) == matrix.tolist()

    assert [row["name"] for row in report["classes"]] == CLASSES
    *scores, images = metrics.precision_recall_fscore_support(
        target, predicted, labels=CLASSES, zero_division=np.nan
    )
    keys = ("precision_pct", "recall_pct", "f1_pct", "images", "predicted", "mistaken_images")
    table = np.array([[row[key] for key in keys] for row in report["classes"]], float)
    np.testing.assert_allclose(table[:, :3].T, 100 * np.array(scores))
    mistakes = matrix - np.diag(matrix.diagonal())
    expected = np.stack([images, matrix.sum(0), mistakes.max(1)], axis=1)
    assert table[:, 3:].tolist() == expected.tolist()
    for row, counts in zip(report["classes"], mistakes, strict=True):
        if row["mistaken_images"]:
            assert counts[CLASSES.index(row["mistaken_for"])] == row["mistaken_images"]
    balanced = metrics.balanced_accuracy_score(target, predicted)
    assert report["balanced_accuracy_pct"] == pytest.approx(100 * balanced)

    confidence = np.array([row["top"][0][1] for row in rows])
    accuracies, confidences = calibration_curve(correct, confidence, n_bins=15)
    bins = report["calibration"]
    assert [row["accuracy_pct"] for row in bins] == pytest.approx(100 * accuracies)
    assert [row["confidence"] for row in bins] == pytest.approx(confidences, rel=1e-5)
    counts = np.histogram(confidence, np.linspace(0, 1, 16))[0]
    error = np.average(np.abs(accuracies - confidences), weights=counts[counts > 0])
    assert report["ece"] == pytest.approx(error, rel=1e-4)

    order = np.argsort(-confidence)
    for key, numbers in (
        ("mistakes", order[~correct[order]]),
        ("hits", order[correct[order]][::-1]),
    ):
        images = [rows[i]["image"] for i in numbers]
        assert [row["image"] for row in report[key]] == images[:12]


def tables_of(page: str) -> list[list[list[str]]]:
    """The texts of the cells, by table and row."""
    cell = r"<t[dh][^>]*>(?:<button[^>]*>)?(.*?)(?:</button>)?</t[dh]>"
    return [
        [list(map(html.unescape, re.findall(cell, row))) for row in table.split("<tr")[1:]]
        for table in page.split("<table")[1:]
    ]


def test_figures_of_the_page_are_those_in_the_json_file(written: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    page = (written / "report.html").read_text()
    tables = tables_of(page)
    formats = ("", ".2f", ".2f", ".2f", "", "", "", "")
    rows = [map(format_cell, row.values(), formats) for row in report["classes"]]
    expected = [list(map(str, row)) for row in rows]
    table = next(rows for rows in tables if rows[0][0] == "class")
    assert sorted(table[1:]) == sorted(expected)
    captions = [
        (f"{row['prediction']} ({row['confidence']:.4f})", f"true: {row['target']}", row["image"])
        for row in (*report["mistakes"], *report["hits"])
    ]
    found = re.findall(r"<b>(.*?)</b>\n<span>(.*?)</span>\n<small>(.*?)</small>", page)
    assert [tuple(map(html.unescape, texts)) for texts in found] == captions
    titles = re.findall("<h3>(.*?)</h3>", page)
    assert titles == [
        *("Confusion matrix", "Most confused classes", "Reliability diagram", "Confidences")
    ]
    # names are escaped, and nothing is loaded
    body = re.sub("<svg.*?</svg>", "", page.partition("<body>")[2], flags=re.DOTALL)
    body = body.partition("<script")[0]
    assert "<i>" not in body and body.count("<b>") == body.count('class="tile"')
    addresses = re.findall(r'\b(?:src|href)="(.*?)"', page.partition("<script")[0])
    assert addresses and all(address.startswith(("data:", "#")) for address in addresses)


def page_of(targets: Any, predictions: Any, names: list[str], own: dict[str, Any]) -> str:
    """The page of an evaluation with these targets and predictions. own: metrics of the user, by
    kind of weights.
    """
    result = {"top1_pct": 1.0, "top5_pct": 2.0, "loss": 3.0, "images": 2000}
    rows = np.zeros(len(targets), image_dtype(1))
    rows["index"] = np.arange(len(rows))
    rows["target"], rows["top"][:, 0] = targets, predictions
    statistics, confusion = evaluation_statistics(rows, names, lambda index: names[index % 4])
    about: dict[str, Any] = {"model": "<b>m", "origin": "<b>run", "messages": [], "settings": {}}
    about |= {"weights": "raw", "metrics": {kind: result | own[kind] for kind in own}}
    thumbnails = dict.fromkeys(range(len(rows)), b"")
    return evaluation_page(statistics | about, confusion, thumbnails).decode()


def test_page_of_many_classes_has_no_confusion_matrix() -> None:
    draws = np.random.default_rng(0)
    count = 240
    targets, predictions = draws.integers(0, count, (2, 2000))
    predictions[:1000] = targets[:1000]
    names = [f"name{number}" for number in range(count - 1)]  # the head has one output more
    own = {"raw": {"top-1 %": 0.25}, "ema": {"only_ema": 0.75}}
    page = page_of(targets, predictions, names, own)
    assert page.count("<svg") == 2 and "class 239" in page
    assert len(page) < 600_000
    assert tables_of(page)[0] == [
        ["weights", "top-1 %", "top-5 %", "loss", "images", "top-1 %", "only_ema"],
        ["raw", "1.000", "2.000", "3.0000", "2,000", "0.2500", "–"],
        ["ema", "1.000", "2.000", "3.0000", "2,000", "–", "0.7500"],
    ]


def test_command_writes_a_report_and_replaces_only_its_own(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "new" / "report"
    line = [*words(folder), "--report", report]
    out = succeeds(evaluate_command, *line)
    assert len(list(report.iterdir())) == 3
    assert "top-5" not in out + (report / "report.html").read_text()  # there are 7 classes
    succeeds(evaluate_command, *line)
    (report / "report.html").write_text("my own")
    assert "report.html" in fails(2, evaluate_command, *line)
    (report / "report.html").unlink()  # then the other files may be the user's
    assert "report.json" in fails(2, evaluate_command, *line)


def test_masked_evaluation_is_stated_and_has_only_the_present_classes(
    folder: Path, tmp_path: Path
) -> None:
    images = {}
    for name in ("cat", "owl", "pig"):
        copy = shutil.copytree(folder / "images/val" / name, folder / "images/some" / name)
        images[name] = len(list(copy.iterdir()))
    succeeds(evaluate_command, *words(folder, "some"), "eval.classes=present", "--report", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["name"]: row["images"] for row in report["classes"]} == images
    assert sum(row["predicted"] for row in report["classes"]) == sum(images.values())
    assert report["top1_pct"] == pytest.approx(report["metrics"]["raw"]["top1_pct"])
    assert "3 of 7 classes" in (tmp_path / "report.html").read_text()
