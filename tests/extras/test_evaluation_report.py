"""`test.py --report`: figures on three ranks equal those of scikit-learn, and the page
shows only those.
"""

import csv
import json
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import DEMO, call, fails, plain, succeeds, write_report_and_rows
from PIL import Image
from safetensors.torch import save_file
from sklearn import metrics
from sklearn.calibration import calibration_curve

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.extras.pages.evaluation_page import evaluation_page, evaluation_statistics
from imagenet_cls.extras.pages.figures import similarity_order
from imagenet_cls.inference.evaluate_weights import (
    evaluate_weights,
    image_dtype,
)
from imagenet_cls.inference.load_weights import WeightsSource

CLASSES = ["a <b>&", "$x$", "cat", "dog", "猫", "owl", "pig"]
NUM_IMAGES = 61


def words(folder: Path, val: str = "val") -> list[str]:
    """A config for the images in `folder`, without workers."""
    settings = {
        "data.name": "folder",
        "data.root": folder / "images",
        "data.train": "val",
        "data.val": val,
    }
    settings |= {
        "data.num_workers": 0,
        "eval.crop_px": 16,
        "eval.batch_size": 7,
        "ema.decay": "null",
    }
    settings |= {"eval.metrics": "[helpers:mean_target]"}
    settings |= {"model.name": "helpers:plain", "model.checkpoint": folder / "weights.safetensors"}
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
        width, height = draws.integers(16, 60, 2).tolist()
        Image.new("RGB", (width, height), tuple(draws.integers(0, 256, 3).tolist())).save(path)
    torch.manual_seed(1)
    save_file(
        {name: 3 * value for name, value in plain(len(CLASSES)).state_dict().items()},
        folder / "weights.safetensors",
    )
    return folder


def report_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    """Evaluate with a report, and write the rows of the predictions beside it."""
    context = join_ranks(rank, ranks, folder / "store")
    config = load_config(DEMO, words(folder)[1:]).config
    evaluation = evaluate_weights(config, WeightsSource(), context, record=True)
    if rank == 0:
        write_report_and_rows(evaluation, folder / "written")
    destroy_process_groups(context)


@pytest.fixture(scope="module")
def written(folder: Path, rank_server: RankServer) -> Path:
    rank_server.call(report_on_ranks, 3, folder)
    return folder / "written"


def test_figures_equal_those_of_scikit_learn(written: Path, folder: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    results, rows = json.loads((written / "rows.json").read_text())
    target, predicted = ([row["target"] for row in rows], [row["top"][0][0] for row in rows])
    correct = np.array(target) == np.array(predicted)
    classes = sorted(CLASSES)
    assert 1 < len(set(predicted)) < len(classes)  # precision is undefined for some
    assert report["images"] == NUM_IMAGES == len(rows)
    assert report["correct"] == correct.sum() and report["top1_pct"] == pytest.approx(
        results["raw"]["top1_pct"]
    )

    matrix = metrics.confusion_matrix(target, predicted, labels=classes)
    head, *table = csv.reader((written / "confusion.csv").open(newline=""))
    assert head[1:] == [row[0] for row in table] == classes
    counts = np.array([row[1:] for row in table], dtype=int)
    assert np.array_equal(counts, matrix) and counts.sum() == NUM_IMAGES

    scores = metrics.classification_report(
        target, predicted, labels=classes, output_dict=True, zero_division=np.nan
    )
    for row, name in zip(report["classes"], classes, strict=True):
        expected = scores[name]
        assert (row["name"], row["images"], row["predicted"]) == (
            name,
            expected["support"],
            predicted.count(name),
        )
        for key, column in (
            ("precision", "precision_pct"),
            ("recall", "recall_pct"),
            ("f1-score", "f1_pct"),
        ):
            value = np.nan if row[column] is None else row[column]
            assert value == pytest.approx(100 * expected[key], nan_ok=True)
    assert report["balanced_accuracy_pct"] == pytest.approx(
        100 * metrics.balanced_accuracy_score(target, predicted)
    )
    assert report["nll"] == pytest.approx(results["raw"]["loss"], rel=1e-5)

    confidence = np.array([row["top"][0][1] for row in rows])
    accuracies, confidences = calibration_curve(correct, confidence, n_bins=15)
    bins = report["calibration"]
    assert [row["accuracy_pct"] for row in bins] == pytest.approx(100 * accuracies)
    assert [row["confidence"] for row in bins] == pytest.approx(confidences, rel=1e-5)
    weights = np.histogram(confidence, np.linspace(0, 1, 16))[0]
    gaps = np.abs(accuracies - confidences)
    assert report["ece"] == pytest.approx(
        (weights[weights > 0] * gaps).sum() / NUM_IMAGES, rel=1e-4
    )

    wrong = sorted(
        (row for row, hit in zip(rows, correct, strict=True) if not hit),
        key=lambda row: -row["top"][0][1],
    )
    assert [row["image"] for row in report["mistakes"]] == [row["image"] for row in wrong[:12]]
    assert {row["image"] for row in report["hits"]} <= {
        r["image"] for r, hit in zip(rows, correct, strict=True) if hit
    }


class Tables(HTMLParser):
    """The texts of all cells by table and row, of other elements by tag, all tags, and the
    addresses in attributes.
    """

    def __init__(self, page: str):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: set[str] = set()
        self.texts: list[tuple[str, str]] = []
        self.tag = ""
        self.addresses: list[str] = []
        self.in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.tag = tag if tag != "br" else self.tag
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        is_cell = tag in ("td", "th")
        self.in_cell = is_cell or (self.in_cell and tag == "button")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif is_cell:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = False

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.tables[-1][-1][-1] += data
        elif data.strip():
            self.texts.append((self.tag, data.strip()))


def figures_of(page: str) -> list[dict[str, Any]]:
    """The data of the figures of a page."""
    start = '<script type="application/json" id="figures">'
    return json.loads(page.partition(start)[2].partition("</script>")[0])


def leaves(value: Any) -> Iterator[Any]:
    items = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    for item in [] if items is None else items:
        yield from leaves(item)
    if items is None:
        yield value


def test_every_figure_of_the_page_is_in_the_json_file(written: Path) -> None:
    report, text = (
        json.loads((written / "report.json").read_text()),
        (written / "report.html").read_text(),
    )
    page = Tables(text)
    numbers = [value for value in leaves(report) if isinstance(value, int | float)]
    texts = {str(value) for value in leaves(report) if isinstance(value, str)} | {
        *report["settings"],
        "raw",
    }
    found = 0
    for rows in page.tables:
        for cell in (cell for row in rows[1:] for cell in row[1 if len(rows[0]) == 2 else 0 :]):
            if cell == "–" or cell in texts:
                continue
            decimals = len(cell.partition(".")[2])
            assert any(f"{number:.{decimals}f}" == cell.replace(",", "") for number in numbers), (
                cell
            )
            found += 1
    assert found > 60
    mean = np.mean(
        [
            sorted(CLASSES).index(row["target"])
            for row in json.loads((written / "rows.json").read_text())[1]
        ]
    )
    assert page.tables[0][0][-1] == "mean_target" and page.tables[0][1][-1] == f"{mean:.4f}"
    examples = [*report["mistakes"], *report["hits"]]
    captions = [data for tag, data in page.texts if tag in ("b", "span", "small")]
    assert captions[-3 * len(examples) :] == [
        line
        for row in examples
        for line in (
            f"{row['prediction']} ({row['confidence']:.4f})",
            f"true: {row['target']}",
            row["image"],
        )
    ]
    matrix, reliability, histogram = figures_of(text)
    counts = [row[1:] for row in csv.reader((written / "confusion.csv").open(newline=""))][1:]
    assert matrix["counts"] == [[int(cell) for cell in row] for row in counts]
    names = sorted(CLASSES)
    assert matrix["labels"] == names and not matrix["has_blocks"]
    bins = report["calibration"]
    assert reliability["bins"] == histogram["bins"] == bins
    by_name = {row["name"]: row for row in report["classes"]}
    table = next(rows for rows in page.tables if rows[0][0] == "class")
    assert len(table) == 1 + len(CLASSES)
    columns = ["precision_pct", "recall_pct", "f1_pct", "images", "predicted"]
    for name, *cells in table[1:]:
        expected = [by_name[name][key] for key in (*columns, "mistaken_for", "mistaken_images")]
        assert cells == [
            "–" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in expected
        ]
        mistakes = dict(zip(names, map(int, counts[names.index(name)]), strict=True))
        mistakes[name] = 0
        assert by_name[name]["mistaken_images"] == max(mistakes.values())
        assert max(mistakes.values()) == mistakes.get(by_name[name]["mistaken_for"], 0)


def test_page_escapes_names_and_loads_nothing(written: Path) -> None:
    text = (written / "report.html").read_text()
    page = Tables(text)
    body = text.partition("<body>")[2].partition("<script")[0]
    assert not page.tags & {"i", "iframe"} and body.count("<b>") == body.count('class="tile"')
    assert page.addresses and all(address.startswith(("data:", "#")) for address in page.addresses)


def test_page_of_many_classes_has_blocks_of_similar_classes_and_no_labels() -> None:
    draws, count = np.random.default_rng(0), 240
    rows = np.zeros(2000, image_dtype(1))
    rows["index"] = np.arange(2000)
    rows["target"], prediction = draws.integers(0, count, (2, 2000))
    rows["top"][:, 0] = np.where(draws.random(2000) < 0.5, rows["target"], prediction)
    rows["probabilities"][:, 0] = draws.random(2000)
    names = [f"name{number}" for number in range(count - 1)]  # the head has one output more
    statistics, confusion = evaluation_statistics(rows, names, str)
    assert confusion.shape == (count, count) and confusion.sum() == 2000
    assert statistics["classes"][-1]["name"] == "class 239"
    result = {"top1_pct": 1.0, "top5_pct": 2.0, "loss": 3.0, "images": 2000}
    # metrics of the user
    metrics = {"raw": result | {"top-1 %": 0.25}, "ema": result | {"only_ema": 0.75}}
    about: dict[str, Any] = {"model": "m", "origin": "runs/a", "messages": [], "settings": {}}
    about |= {"weights": "ema", "metrics": metrics}
    shown = {row["index"]: b"" for key in ("mistakes", "hits") for row in statistics[key]}
    page = evaluation_page(statistics | about, confusion, shown).decode()
    matrix, *_ = figures_of(page)
    assert len(matrix["counts"]) == len(matrix["labels"]) == 120 and matrix["has_blocks"]
    assert sum(map(sum, matrix["counts"])) == 2000 - statistics["correct"]
    blocks = [name for block in matrix["labels"] for name in block]
    assert sorted(blocks) == sorted([*names, "class 239"])
    assert "average linkage" in page and "The sections below show the EMA weights." in page
    assert len(page) < 6_000_000 and "<h1>Evaluation of m (runs/a)</h1>" in page
    assert Tables(page).tables[0] == [
        ["weights", "top-1 %", "top-5 %", "loss", "images", "top-1 %", "only_ema"],
        ["raw", "1.000", "2.000", "3.0000", "2,000", "0.2500", "–"],
        ["ema", "1.000", "2.000", "3.0000", "2,000", "–", "0.7500"],
    ]


def test_classes_that_are_confused_are_neighbors_in_the_order_by_similarity() -> None:
    """Three groups of classes, whose members are confused, are hidden in a random order."""
    draws = np.random.default_rng(0)
    groups = draws.permutation(np.repeat(np.arange(3), 20))
    is_same = groups[:, None] == groups
    confusion = draws.poisson(np.where(is_same, 5, 0.2)) + 50 * np.eye(60, dtype=int)
    order = similarity_order(confusion)
    assert sorted(order) == list(range(60))
    changes = np.count_nonzero(np.diff(groups[order]))
    assert changes == 2


def test_missing_plotly_is_an_error_before_the_evaluation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, out, err = call(evaluate_command, *words(folder), "--report", tmp_path / "report")
    assert code == 2 and out == "" and "pip install plotly" in err


def test_command_writes_a_report_and_replaces_only_its_own(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "new" / "report"
    options = ["--report", report]
    out = succeeds(evaluate_command, *words(folder), *options)
    assert f"wrote {tmp_path}/new/report/report.html" in out
    assert sorted(path.name for path in report.iterdir()) == [
        "confusion.csv",
        "report.html",
        "report.json",
    ]
    assert "top-5" not in out + (report / "report.html").read_text()  # there are 7 classes
    (report / "report.html").write_text("old")
    fails(2, evaluate_command, *words(folder), "--link-js")
    succeeds(evaluate_command, *words(folder), *options, "--link-js")
    assert '<script src="plotly.min.js"></script>' in (report / "report.html").read_text()
    assert (report / "plotly.min.js").stat().st_size > 1_000_000
    (report / "report.json").unlink()  # as beside a page of report.py
    err = fails(2, evaluate_command, *words(folder), *options)
    assert "report.html" in err
    (report / "report.html").unlink()  # then `confusion.csv` may be the user's
    err = fails(2, evaluate_command, *words(folder), *options)
    assert "confusion.csv" in err


def test_masked_evaluation_is_stated_and_has_only_the_present_classes(
    folder: Path, tmp_path: Path
) -> None:
    some = {"cat", "owl", "pig"}
    for name in some:
        shutil.copytree(
            folder / "images" / "val" / name, folder / "images" / "some" / name, dirs_exist_ok=True
        )
    succeeds(evaluate_command, *words(folder, "some"), "eval.classes=present", "--report", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_classes"] == 3 and {row["name"] for row in report["classes"]} == some
    images = {name: len(list((folder / "images" / "some" / name).iterdir())) for name in some}
    assert {row["name"]: row["images"] for row in report["classes"]} == images
    assert sum(row["predicted"] for row in report["classes"]) == sum(images.values())
    assert report["top1_pct"] == pytest.approx(report["metrics"]["raw"]["top1_pct"])
    assert "3 of 7 classes" in (tmp_path / "report.html").read_text()
