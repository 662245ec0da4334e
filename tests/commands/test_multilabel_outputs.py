"""`test.py`, `report.py`, `sweep.py --table` and `show_batch.py` on runs with several labels for an
image (`data.labels` multi): numbers equal those of scikit-learn and of the evaluation of the run.
"""

import csv
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import RankServer, destroy_process_groups, join_ranks
from helpers import (
    MULTILABEL,
    arguments,
    evaluations,
    fails,
    succeeds,
    train_here,
    write_report_and_rows,
)
from PIL import Image
from sklearn import metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchvision.transforms.functional import to_pil_image

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.config.load import load_config
from imagenet_cls.data.builtin import ComposedDigits
from imagenet_cls.extras.before_training.show_batch import describe_target, show_batch_command
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.extras.sweep.command import sweep_command
from imagenet_cls.extras.sweep.plan import SweepRun, write_runs
from imagenet_cls.inference.evaluate_weights import (
    OutputRecorder,
    evaluate_weights,
)
from imagenet_cls.inference.load_weights import WeightsSource

THRESHOLD = 0.25
ALLOW = [
    word
    for name in ("helpers:plain", "imagenet_cls.data.builtin:ComposedDigits")
    for word in ("--allow-import", name)
]
FIRST_COLOR = (0x1F, 0x77, 0xB4)  # of matplotlib


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run in `run`, and its validation images with a list of their labels in `photos`."""
    folder = tmp_path_factory.mktemp("labels")
    options: dict[str, Any] = {"log__tensorboard": "true", "log__plots": "true", "ema__decay": 0.8}
    options |= {"optimizer__lr": 0.1, "eval__threshold": THRESHOLD}
    train_here([*arguments(folder, folder / "run", **options), *MULTILABEL])
    lines = []
    dataset = ComposedDigits("", "val")
    (folder / "photos").mkdir()
    for number, labels in enumerate(labels_of(dataset.targets)):
        to_pil_image(dataset[number][0]).save(folder / "photos" / f"{number}.png")
        lines.append(f"{number}.png {labels.replace(' ', '')}\n")
    (folder / "photos" / "test.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return folder / "run"


def labels_of(targets: Iterable[torch.Tensor]) -> list[str]:
    return ["; ".join(str(int(digit)) for digit in row.nonzero()) for row in targets]


def report_on_ranks(rank: int, ranks: int, folder: Path) -> None:
    """Evaluate with a report, and write the results and the rows of the predictions beside it."""
    context = join_ranks(rank, ranks, folder / "store")
    config = load_config(folder / "run" / "config.yaml").config
    weights = WeightsSource(folder / "run", "raw", ["helpers:plain"])
    evaluation = evaluate_weights(config, weights, context, record=True)
    if rank == 0:
        write_report_and_rows(evaluation, folder / "written")
    destroy_process_groups(context)


@pytest.fixture(scope="module")
def written(folder: Path, rank_server: RankServer) -> Path:
    rank_server.call(report_on_ranks, 3, folder)
    return folder / "written"


def test_statistics_equal_those_of_scikit_learn(written: Path, run: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    results, rows = json.loads((written / "rows.json").read_text())
    targets = ComposedDigits("", "val").targets.numpy()
    assert [row["index"] for row in rows] == list(range(600))
    assert [row["target"] for row in rows] == [
        [str(k) for k in np.flatnonzero(row)] for row in targets
    ]
    predicted = np.zeros_like(targets)
    for number, row in enumerate(rows):
        shares = [share for _, share in row["top"]]
        assert shares == sorted(shares, reverse=True) and min(shares, default=1) >= THRESHOLD
        predicted[number, [int(name) for name, _ in row["top"]]] = 1
    assert 0 < predicted.mean() < 1
    expected = metrics.precision_recall_fscore_support(targets, predicted, zero_division=np.nan)
    for k, row in enumerate(report["classes"]):
        found = [row[key] for key in ("precision_pct", "recall_pct", "f1_pct")]
        shares = [np.nan if value is None else value / 100 for value in found]
        assert shares == pytest.approx([column[k] for column in expected[:3]], nan_ok=True)
        assert (row["name"], row["images"]) == (str(k), expected[3][k])
        assert row["predicted"] == predicted[:, k].sum()
    last = [record for record in evaluations(run) if record["weights"] == "raw"][-1]
    precisions = [row["ap_pct"] for row in report["classes"]]
    result = report["metrics"]["raw"]
    assert np.mean(precisions) == pytest.approx(result["map_pct"])
    for key in ("map_pct", "micro_f1_pct", "macro_f1_pct", "best_threshold", "loss"):
        assert result[key] == results["raw"][key]
    assert result["loss"] == pytest.approx(last["loss"], rel=1e-5)
    micro = metrics.f1_score(targets, predicted, average="micro")
    assert result["micro_f1_pct"] == pytest.approx(100 * micro)


def test_page_has_the_numbers_of_the_evaluation_and_no_confusion(written: Path) -> None:
    report = json.loads((written / "report.json").read_text())
    assert {path.name for path in written.iterdir()} == {"report.html", "report.json", "rows.json"}
    page = (written / "report.html").read_text()
    assert len(page) < 500_000  # without Plotly
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    result = report["metrics"]["raw"]
    first = [f"{result[key]:.3f}" for key in ("map_pct", "micro_f1_pct", "macro_f1_pct")]
    assert cells[:4] == ["raw", *first]
    numbers = re.findall(r"<strong>(.*?)</strong>", page)
    keys = ("map_pct", "micro_f1_pct", "macro_f1_pct", "best_threshold")
    assert numbers == [f"{result[key]:.2f}" for key in keys]
    keys = ("ap_pct", "precision_pct", "recall_pct", "f1_pct")
    for row in report["classes"]:
        texts = ["–" if row[key] is None else f"{row[key]:.2f}" for key in keys]
        start = next(i for i in range(len(cells)) if cells[i : i + 5] == [row["name"], *texts])
        assert cells[start + 5 : start + 7] == [str(row["images"]), str(row["predicted"])]
    rows = json.loads((written / "rows.json").read_text())[1]
    assert len(report["mistakes"]) == 12 == page.count('class="tile"')
    for row in report["mistakes"]:
        assert row == rows[row["index"]]
        assert f"<span>true: {'; '.join(row['target'])}</span>" in page


def test_images_with_the_highest_loss(run: Path, tmp_path: Path) -> None:
    """From a threshold of nearly 0 on all probabilities are in the file."""
    for name in ("report.html", "report.json", "confusion.csv"):  # of an earlier report
        (tmp_path / name).write_text("old")
    words = [run, *ALLOW, "--weights", "raw", "eval.threshold=1e-9"]
    succeeds(evaluate_command, *words, "--out", tmp_path / "rows.json", "--report", tmp_path)
    assert not (tmp_path / "confusion.csv").exists()
    rows = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    targets = ComposedDigits("", "val").targets.double().numpy()
    shares = np.array([[dict(row["top"])[str(k)] for k in range(10)] for row in rows])
    losses = -(targets * np.log(shares) + (1 - targets) * np.log1p(-shares)).mean(1)
    report = json.loads((tmp_path / "report.json").read_text())
    assert losses.mean() == pytest.approx(report["metrics"]["raw"]["loss"], rel=1e-4)
    found = [losses[row["index"]] for row in report["mistakes"]]
    assert found == pytest.approx(np.sort(losses)[:-13:-1], rel=1e-4)


def test_list_as_test_set_and_its_predictions(folder: Path, tmp_path: Path) -> None:
    words = [folder / "run", *ALLOW]
    expected = succeeds(evaluate_command, *words)
    more = ["--data", folder / "photos" / "test.txt", "--out", tmp_path / "rows.csv"]
    out = succeeds(evaluate_command, *words, *more, "--results", tmp_path / "results.json")
    assert out.startswith("600 images of 10 classes, in ")

    def results(text: str) -> list[str]:
        return [
            line.partition("  over ")[0] for line in text.splitlines()[2:] if "wrote" not in line
        ]

    assert results(out) == results(expected)
    assert json.loads((tmp_path / "results.json").read_text()).keys() == {"raw", "ema"}
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["image", "target", "labels", "probabilities"]
    assert [row["target"] for row in rows] == labels_of(ComposedDigits("", "val").targets)
    assert rows[7]["image"] == "7.png"
    for row in rows:
        assert row["labels"].count(";") == row["probabilities"].count(";")


def test_test_set_need_not_have_all_labels(folder: Path, run: Path) -> None:
    """A class that no image has is in the table, without an average precision."""
    some = folder / "photos" / "some.txt"
    lines = (folder / "photos" / "test.txt").read_text().splitlines(keepends=True)
    some.write_text("".join(line for line in lines if "9" not in line.split()[1]) + "9.png\n")
    out = succeeds(evaluate_command, run, *ALLOW, "--data", some)
    assert " images of 9 classes" in out.splitlines()[0]
    table = [line.split() for line in out.partition("class (")[2].splitlines()[1:]]
    assert [row[0] for row in table] == list("0123456789") and table[9][1:3] == ["0", "-"]


@pytest.mark.parametrize(("dtype", "bad"), [(torch.float32, 1), (torch.int64, 0)])
def test_infinite_output_of_one_class_is_an_absent_class_only_with_one_label(
    dtype: torch.dtype, bad: int
) -> None:
    recorder = OutputRecorder(["raw"], torch.device("cpu"), "raw")
    logits = torch.tensor([[-torch.inf, 1.0], [0.0, 1.0]])
    targets = torch.tensor([1, 0]) if dtype == torch.int64 else torch.eye(2)
    list(recorder.watch([({"raw": logits}, targets, torch.arange(2))]))
    assert recorder.nonfinite.tolist() == [bad]


def test_page_of_a_run_and_curves_and_tensorboard(run: Path, tmp_path: Path) -> None:
    succeeds(report_command, run, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    results = evaluations(run)
    best = max(results, key=lambda record: record["map_pct"])
    assert f"<span>best mAP, %</span>\n<strong>{best['map_pct']:.2f}</strong>" in page
    assert f">step-{best['step']:07d}</a>, best mAP" in page
    titles = re.findall(r"<th[^>]*><button[^>]*>(.*?)</button>", page)
    assert {"best validation mAP %", "last validation mAP %"} <= set(titles)
    assert not [title for title in titles if "top-1" in title or "balanced" in title]
    assert [figure["title"][:3] for figure in figures(page)] == ["Los", "mAP", "Lea", "Ima"]
    curve = figures(page)[1]["curves"][0]
    raw = [record["map_pct"] for record in results if record["weights"] == "raw"]
    assert curve["y"] == pytest.approx(raw, rel=1e-5)
    pixels = np.asarray(Image.open(run / "plots" / "curves.png").convert("RGB"))
    for panel in np.array_split(pixels, 3, axis=1):  # loss, learning rate, mAP
        assert (panel == FIRST_COLOR).all(axis=2).sum() > 20
    tags = EventAccumulator(str(run / "tensorboard")).Reload().Tags()["scalars"]
    assert {"train/top1_pct", "val/map_pct", "val_ema/map_pct", "val/micro_f1_pct"} <= set(tags)
    assert "val/top1_pct" not in tags


def figures(page: str) -> list[dict[str, Any]]:
    """The data of the figures of a page."""
    text = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    return json.loads(text[0])


def test_page_of_runs_of_both_kinds_has_dashes(run: Path, digits: Path, tmp_path: Path) -> None:
    train_here(arguments(digits, tmp_path / "single", train__max_steps=2))
    page = tmp_path / "page.html"
    for runs, first in (([run, tmp_path / "single"], "mAP"), ([tmp_path / "single", run], "top-1")):
        succeeds(report_command, *runs, "--out", page)
        text = page.read_text()
        rows = re.findall(r"<tr data-run.*?</tr>", text, re.DOTALL)
        best = [re.findall(r"<td[^>]*>(.*?)</td>", row)[:2] for row in rows]
        assert [row.index("–") for row in best] == [1, 0]
        assert f"best {first}, %" in text and f"median of the best {first}, %" in text
        titles = [figure["title"][:3] for figure in figures(text)]
        assert titles == ["Los", "Top", "mAP", "Lea", "Ima"]


def test_table_of_a_sweep(run: Path, tmp_path: Path) -> None:
    values = evaluations(run)
    write_runs(
        tmp_path, [SweepRun(f"seed={seed}", {"seed": str(seed)}, ["demo"]) for seed in (0, 1)]
    )
    shutil.copytree(run, tmp_path / "seed=0")
    printed = succeeds(sweep_command, "--table", "--out", tmp_path)
    assert "mean map_pct" in printed
    with (tmp_path / "table.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    best = max(record["map_pct"] for record in values)
    assert float(row["mean map_pct"]) == best and row["finished"] == "1"
    assert f"<strong>{best:.2f}</strong>" in (tmp_path / "report.html").read_text()


def test_labels_above_the_pictures_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_target(torch.tensor([1.0, 0.0, 1.0]), "abc", True) == "a; c"
    assert describe_target(torch.tensor([1.0, 0.25, 0.0]), "abc", True) == "a; 0.25 b"
    assert describe_target(torch.zeros(3), "abc", True) == ""
    drawn: list[str] = []
    monkeypatch.setattr(
        "imagenet_cls.extras.before_training.show_batch.plot_images",
        lambda path, images, labels: drawn.extend(labels),
    )
    words = [*arguments(tmp_path, tmp_path)[:-2], *MULTILABEL]
    succeeds(show_batch_command, *words, "--out", tmp_path / "batch.png")
    assert set("".join(drawn)) <= set("0123456789; ") and any("; " in text for text in drawn)


def test_weights_that_are_not_finite_are_an_error(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = max((run / "checkpoints").glob("step-*"))
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name: torch.nan * x for name, x in tensors.items()}, tmp_path / "nan.safetensors")
    words = [run / "config.yaml", tmp_path / "nan.safetensors"]
    assert "600 (raw)" in fails(4, evaluate_command, *words)
