"""`test.py` and `report.py` on runs with several labels for an
image (`data.labels` multi): numbers equal those of scikit-learn and of the evaluation of the run.
"""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import MULTILABEL, arguments, evaluations, succeeds, train_here
from sklearn import metrics
from torchvision.transforms.functional import to_pil_image

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.data.builtin import ComposedDigits
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.files import OUTPUT_MARK

THRESHOLD = 0.25
ALLOW = ["--allow-import", "helpers:plain"]
ALLOW += ["--allow-import", "imagenet_cls.data.builtin:ComposedDigits"]
FIRST_COLOR = (0x1F, 0x77, 0xB4)  # of matplotlib


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    options = {
        "log__plots": "true",
        "log__report": "true",
        "optimizer__lr": 0.1,
        "eval__threshold": THRESHOLD,
    }
    train_here([*arguments(folder, folder / "run", **options), *MULTILABEL])
    return folder / "run"


@pytest.fixture(scope="module")
def written(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the raw weights, in place of an earlier one, and their rows and results.

    From a threshold of nearly 0 on all probabilities are in `all.json`.
    """
    folder = tmp_path_factory.mktemp("written")
    for name in ("report.html", "report.json", "confusion.csv"):
        (folder / name).write_text(OUTPUT_MARK)
    words = [run, *ALLOW]
    files = ["--out", folder / "rows.json", "--results", folder / "results.json"]
    succeeds(evaluate_command, *words, *files, "--report", folder)
    succeeds(evaluate_command, *words, "eval.threshold=1e-9", "--out", folder / "all.json")
    return folder


def rows_in(file: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, file.read_text().splitlines()))


def test_statistics_equal_those_of_scikit_learn(written: Path, run: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    targets = ComposedDigits("", "val").targets.double().numpy()
    rows, all_classes = rows_in(written / "rows.json"), rows_in(written / "all.json")
    names = [[str(digit) for digit in np.flatnonzero(row)] for row in targets]
    assert [row["target"] for row in rows] == names
    assert [row["top"] for row in rows] == [
        [pair for pair in row["top"] if pair[1] >= THRESHOLD] for row in all_classes
    ]
    shares = np.array([[dict(row["top"])[str(k)] for k in range(10)] for row in all_classes])
    predicted = shares >= THRESHOLD
    *scores, images = metrics.precision_recall_fscore_support(
        targets, predicted, zero_division=np.nan
    )
    keys = ("precision_pct", "recall_pct", "f1_pct", "images", "predicted")
    table = np.array([[row[key] for key in keys] for row in report["classes"]], float)
    np.testing.assert_allclose(table[:, :3].T, 100 * np.array(scores))
    assert table[:, 3:].tolist() == np.stack([images, predicted.sum(0)], axis=1).tolist()

    result = report["metrics"]["raw"]
    assert result == json.loads((written / "results.json").read_text())["raw"]
    last = evaluations(run)[-1]
    for key in ("map_pct", "micro_f1_pct", "loss"):
        assert result[key] == pytest.approx(last[key], rel=1e-5)
    assert result["map_pct"] == pytest.approx(np.mean([row["ap_pct"] for row in report["classes"]]))

    losses = -(targets * np.log(shares) + (1 - targets) * np.log1p(-shares)).mean(1)
    assert losses.mean() == pytest.approx(result["loss"], rel=1e-4)
    mistakes = report["mistakes"]
    highest = [losses[row["index"]] for row in mistakes]
    assert highest == pytest.approx(np.sort(losses)[:-13:-1], rel=1e-4)


def test_page_has_the_numbers_of_the_evaluation_and_no_confusion(written: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    assert not (written / "confusion.csv").exists()
    page = (written / "report.html").read_text()
    assert len(page) < 500_000  # without Plotly
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    result = report["metrics"]["raw"]
    keys = ("map_pct", "micro_f1_pct", "macro_f1_pct")
    assert cells[:4] == ["raw", *(f"{result[key]:.3f}" for key in keys)]
    numbers = re.findall(r"<strong>(.*?)</strong>", page)
    assert numbers == [f"{result[key]:.2f}" for key in (*keys, "best_threshold")]
    row = report["classes"][3]
    shares = [row[key] for key in ("ap_pct", "precision_pct", "recall_pct", "f1_pct")]
    texts = ["–" if share is None else f"{share:.2f}" for share in shares]
    texts = [row["name"], *texts, str(row["images"]), str(row["predicted"])]
    first = cells.index(texts[1]) - 1
    assert cells[first : first + 7] == texts
    assert page.count('class="tile"') == 12
    for row in report["mistakes"]:
        assert f"<span>true: {'; '.join(row['target'])}</span>" in page


def test_list_as_test_set_need_not_have_all_labels(
    run: Path, written: Path, tmp_path: Path
) -> None:
    """A class that no image has is in the table, without an average precision."""
    images = ComposedDigits("", "val")
    rows = [row for row in rows_in(written / "rows.json")[:100] if "9" not in row["target"]]
    lines = []
    for row in rows:
        name = f"{row['index']}.png"
        to_pil_image(images[row["index"]][0]).save(tmp_path / name)
        lines.append(f"{name} {';'.join(row['target'])}\n")
    (tmp_path / "test.txt").write_text("".join(lines))
    words = ["--data", tmp_path / "test.txt", "--out", tmp_path / "rows.csv"]
    out = succeeds(evaluate_command, run, *ALLOW, *words)
    assert f"{len(rows)} images of 9 classes" in out
    table = [line.split() for line in out.partition("class (")[2].splitlines()]
    assert table[10][:3] == ["9", "0", "-"]
    with (tmp_path / "rows.csv").open() as file:
        for found, row in zip(csv.DictReader(file), rows, strict=True):
            assert found["target"] == "; ".join(row["target"])
            assert found["labels"] == "; ".join(name for name, _ in row["top"])


def test_page_and_curves_of_a_run(run: Path, tmp_path: Path) -> None:
    succeeds(report_command, run, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    results = evaluations(run)
    best = max(results, key=lambda record: record["map_pct"])
    assert f"<span>best mAP, %</span>\n<strong>{best['map_pct']:.2f}</strong>" in page
    assert f">step-{best['step']:07d}</a>, best" in page and "top-1" not in page
    titles = re.findall("<h3>(.*?)</h3>", page)
    assert "mAP, %" in titles and titles[-2:] == [
        *("Average precision by class, epoch 2", "First images of the training")
    ]
    assert (run / "plots" / "curves.png").is_file()
