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
    """The page of the raw weights, in place of an earlier one, and their rows and results.

    From a threshold of nearly 0 on all probabilities are in `all.json`.
    """
    folder = tmp_path_factory.mktemp("written")
    (folder / "page.html").write_text(OUTPUT_MARK)
    words = [run, *ALLOW]
    files = ["--out", folder / "rows.json", "--results", folder / "results.json"]
    succeeds(evaluate_command, *words, *files, "--report", folder / "page.html")
    succeeds(evaluate_command, *words, "eval.threshold=1e-9", "--out", folder / "all.json")
    return folder


def rows_in(file: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, file.read_text().splitlines()))


def test_page_has_the_statistics_of_scikit_learn_and_no_confusion(written: Path, run: Path) -> None:
    targets = ComposedDigits("", "val").targets.double().numpy()
    rows, all_classes = rows_in(written / "rows.json"), rows_in(written / "all.json")
    names = [[str(digit) for digit in np.flatnonzero(row)] for row in targets]
    assert [row["target"] for row in rows] == names
    assert [row["top"] for row in rows] == [
        [pair for pair in row["top"] if pair[1] >= THRESHOLD] for row in all_classes
    ]
    shares = np.array([[dict(row["top"])[str(k)] for k in range(10)] for row in all_classes])
    predicted = shares >= THRESHOLD
    scores = metrics.precision_recall_fscore_support(targets, predicted, zero_division=np.nan)
    average = metrics.average_precision_score(targets, shares, average=None)
    page = (written / "page.html").read_text()
    assert len(page) < 500_000 and "Confusion matrix" not in page
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page.partition("<h2>Classes</h2>")[2])
    table = {cells[first]: cells[first + 1 : first + 7] for first in range(0, 70, 7)}
    for k in range(10):
        percents = [average[k], *(score[k] for score in scores[:3])]
        expected = ["–" if np.isnan(share) else f"{100 * share:.2f}" for share in percents]
        expected += [str(scores[3][k]), str(predicted[:, k].sum())]
        assert table[str(k)] == expected

    result = json.loads((written / "results.json").read_text())["raw"]
    last = evaluations(run)[-1]
    for key in ("map_pct", "micro_f1_pct", "loss"):
        assert result[key] == pytest.approx(last[key], rel=1e-5)
    assert result["map_pct"] == pytest.approx(100 * average.mean())
    numbers = re.findall(r"<strong>(.*?)</strong>", page)
    keys = ("map_pct", "micro_f1_pct", "macro_f1_pct", "best_threshold")
    assert numbers == [f"{result[key]:.2f}" for key in keys]

    losses = -(targets * np.log(shares) + (1 - targets) * np.log1p(-shares)).mean(1)
    assert losses.mean() == pytest.approx(result["loss"], rel=1e-4)
    images = re.findall(r'<figcaption title="(.*?)">', page)
    highest = [losses[[row["image"] for row in rows].index(image)] for image in images]
    assert highest == pytest.approx(np.sort(losses)[:-13:-1], rel=1e-4)


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
