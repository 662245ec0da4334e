"""`test.py --report`: statistics on three ranks equal those of scikit-learn, and the page shows
them.
"""

import html
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import DEMO, plain, succeeds
from PIL import Image
from safetensors.torch import save_file
from sklearn import metrics
from sklearn.calibration import calibration_curve

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.extras.pages.evaluation_page import evaluation_page, evaluation_statistics
from imagenet_cls.extras.pages.evaluation_report import EvaluationReport, report_statistics
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
    """Evaluate with a report, and write what it shows and the rows of the predictions beside it."""
    context = join_ranks(rank, ranks, folder / "store")
    config = load_config(DEMO, words(folder)[1:]).config
    evaluation = evaluate_weights(config, WeightsSource(), context, record=True)
    if rank == 0:
        EvaluationReport(folder / "new" / "page.html").write(evaluation)
        found = report_statistics(evaluation), list(prediction_rows(evaluation))
        (folder / "found.pickle").write_bytes(pickle.dumps(found))
    destroy_process_groups(context)


@pytest.fixture(scope="module")
def found(folder: Path, rank_server: RankServer) -> Any:
    """Statistics and rows."""
    rank_server.call(report_on_ranks, 3, folder)
    return pickle.loads((folder / "found.pickle").read_bytes())


def test_statistics_equal_those_of_scikit_learn(found: Any) -> None:
    report, rows = found
    target, predicted = ([row["target"] for row in rows], [row["top"][0][0] for row in rows])
    correct = np.array(target) == np.array(predicted)
    assert 1 < len(set(predicted)) < len(CLASSES)  # precision is undefined for some
    result = report["metrics"]["raw"]
    assert result["top1_pct"] == pytest.approx(100 * correct.mean())
    matrix = metrics.confusion_matrix(target, predicted, labels=CLASSES)
    assert report["confusion"].tolist() == matrix.tolist()
    balanced = metrics.balanced_accuracy_score(target, predicted)
    assert result["balanced_accuracy_pct"] == pytest.approx(100 * balanced)
    assert [row["name"] for row in report["classes"]] == CLASSES
    *scores, images = metrics.precision_recall_fscore_support(
        target, predicted, labels=CLASSES, zero_division=np.nan
    )
    columns = np.array([list(row.values())[1:] for row in report["classes"]], float).T
    expected = [*(100 * np.array(scores)), images, matrix.sum(0)]
    np.testing.assert_allclose(columns, np.array(expected))

    confidence = np.array([row["top"][0][1] for row in rows])
    accuracies, confidences = calibration_curve(correct, confidence, n_bins=15)
    bins = report["calibration"]
    assert [row["accuracy_pct"] for row in bins] == pytest.approx(100 * accuracies)
    assert [row["confidence"] for row in bins] == pytest.approx(confidences, rel=1e-5)
    counts = np.histogram(confidence, np.linspace(0, 1, 16))[0]
    error = np.average(np.abs(accuracies - confidences), weights=counts[counts > 0])
    assert report["ece_pct"] == pytest.approx(100 * error, rel=1e-4)

    order = np.argsort(-confidence)
    images = [rows[i]["image"] for i in order[~correct[order]]]
    assert [row["image"] for row in report["mistakes"]] == images[:24]


def tables_of(page: str) -> list[list[list[str]]]:
    """The texts of the cells, by table and row."""
    cell = r"<t[dh][^>]*>(?:<button[^>]*>)?(.*?)(?:</button>)?</t[dh]>"
    return [
        [list(map(html.unescape, re.findall(cell, row))) for row in table.split("<tr")[1:]]
        for table in page.split("<table")[1:]
    ]


def test_page_shows_the_statistics(found: Any, folder: Path) -> None:
    report, _ = found
    page = (folder / "new" / "page.html").read_text()
    formats = ("", ".2f", ".2f", ".2f", ",d", ",d")
    rows = [map(format_cell, row.values(), formats) for row in report["classes"]]
    table = next(rows for rows in tables_of(page) if rows[0][0] == "class")
    assert sorted(table[1:]) == sorted(list(row) for row in rows)
    captions = [
        (f"{row['prediction']} ({row['confidence']:.4f})", f"true: {row['target']}", row["image"])
        for row in report["mistakes"]
    ]
    shown = re.findall(r"<b>(.*?)</b>\n<span>(.*?)</span>\n<small>(.*?)</small>", page)
    assert [tuple(map(html.unescape, texts)) for texts in shown] == captions
    titles = re.findall("<h3>(.*?)</h3>", page)
    assert titles == ["Confusion matrix", "Most confused classes", "Reliability diagram"]
    assert "top-5" not in page  # there are 7 classes
    # names are escaped, and nothing is loaded
    body = re.sub("<svg.*?</svg>", "", page.partition("<body>")[2], flags=re.DOTALL)
    body = body.partition("<script")[0]
    assert "<i>" not in body and body.count("<b>") == body.count('class="tile"')
    addresses = re.findall(r'\b(?:src|href)="(.*?)"', page.partition("<script")[0])
    assert addresses and all(address.startswith(("data:", "#")) for address in addresses)


def test_page_of_many_classes_has_no_confusion_matrix() -> None:
    draws = np.random.default_rng(0)
    count = 240
    rows = np.zeros(2000, image_dtype(1))
    rows["index"] = np.arange(len(rows))
    rows["target"], rows["top"][:, 0] = draws.integers(0, count, (2, 2000))
    rows["top"][:1000, 0] = rows["target"][:1000]
    names = [f"name{number}" for number in range(count - 1)]  # the head has one output more
    statistics = evaluation_statistics(rows, names, lambda index: names[index % 4])
    result = {"top1_pct": 1.0, "top5_pct": 2.0, "balanced_accuracy_pct": 3.0, "loss": 3.0}
    result |= {"images": 2000, "seconds": 1.0}
    about: dict[str, Any] = {"model": "<b>m", "origin": "<b>run", "messages": [], "settings": {}}
    about |= {"weights": "raw", "metrics": {"raw": result | {"own": 0.25}, "ema": result}}
    thumbnails = dict.fromkeys(range(len(rows)), b"")
    page = evaluation_page(statistics | about, thumbnails).decode()
    assert page.count("<svg") == 1 and "class 239" in page
    assert len(page) < 600_000
    assert [row[0] for row in tables_of(page)[0]] == ["weights", "raw", "ema"]
    assert "own 0.25" in tables_of(page)[0][1][1]


def test_masked_evaluation_is_stated_and_has_only_the_present_classes(
    folder: Path, tmp_path: Path
) -> None:
    images = {}
    for name in ("cat", "owl", "pig"):
        copy = shutil.copytree(folder / "images/val" / name, folder / "images/some" / name)
        images[name] = str(len(list(copy.iterdir())))
    page = tmp_path / "page.html"
    succeeds(evaluate_command, *words(folder, "some"), "eval.classes=present", "--report", page)
    tables = tables_of(page.read_text())
    table = next(rows for rows in tables if rows[0][0] == "class")
    assert {row[0]: row[4] for row in table[1:]} == images
    assert sum(int(row[5]) for row in table[1:]) == sum(map(int, images.values()))
    assert "3 of 7" in tables[0][1][1]
