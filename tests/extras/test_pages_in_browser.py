"""The pages of `test.py --report` and `report.py` in Chromium: colors, width, text, and nothing
loaded.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, open_browser
from helpers import MULTILABEL, arguments, succeeds, train_here
from PIL import Image

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.extras.pages.evaluation_page import evaluation_page, evaluation_statistics
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.inference.evaluate_weights import image_dtype
from imagenet_cls.report.jsonl import read_metrics

pytestmark = pytest.mark.nightly
COLORS = {"light": (245, 246, 248), "dark": (18, 21, 24)}  # of the background


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "run"
    train_here(arguments(digits, folder, log__tensorboard="true", ema__decay=0.9))
    return folder


def check_page(browser: Browser, page: Path, folder: Path, texts: list[str]) -> None:
    """Light and dark, in windows from a phone's to a wide one."""
    for scheme, background in COLORS.items():
        browser.prefer(scheme)
        for width in (390, 800, 1400):
            browser.open(page, width)
            assert browser.messages == [] and browser.layout_problems() == []
            requested = [url for url in browser.urls if not url.startswith("data:")]
            assert requested == [page.as_uri()]
            dom = browser.evaluate("document.body.innerText + document.body.textContent")
            assert [text for text in texts if text not in dom] == []
            browser.screenshot(folder / "screenshot.png")
            picture = Image.open(folder / "screenshot.png").convert("RGB")
            assert picture.width == width and picture.getpixel((0, 0)) == background
            margin = picture.crop((width - 8, 0, width, picture.height))
            assert margin.getcolors() == [(8 * picture.height, background)]
            titles = "[...document.querySelectorAll('.plot')].map((plot) => "
            titles += "plot.querySelectorAll('.main-svg path, .main-svg image').length)"
            assert min(browser.evaluate(titles)) > 5
            valid = "[...document.querySelectorAll('.plot')].every((plot) => "
            valid += "!Plotly.validate(plot.data, plot.layout))"
            assert browser.evaluate(valid)
            text = "getComputedStyle(document.querySelector('.xtick text')).fill"
            ink = "getComputedStyle(document.body).color"
            assert browser.evaluate(text) == browser.evaluate(ink)
    browser.prefer()


def test_report_of_an_evaluation_in_a_browser(browser: Browser, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    succeeds(evaluate_command, run, "--report", folder, "--allow-import", "helpers:plain")
    report = json.loads((folder / "report.json").read_text())
    texts = [f"{metrics['top1_pct']:.3f}" for metrics in report["metrics"].values()]
    texts += [f"{row['f1_pct']:.2f}" for row in report["classes"]] + [
        row["image"] for row in report["mistakes"]
    ]
    check_page(browser, folder / "report.html", tmp_path, texts)


def test_report_of_multilabel_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    """It has no figures, and its table of classes can be sorted."""
    words = arguments(tmp_path, tmp_path / "run", train__max_steps=4)
    train_here([*words, *MULTILABEL])
    words = [tmp_path / "run", "--report", tmp_path / "report", "--allow-import", "helpers:plain"]
    words += ["--allow-import", "imagenet_cls.data.builtin:ComposedDigits"]
    succeeds(evaluate_command, *words)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    for width in (390, 800, 1400):
        browser.open(tmp_path / "report" / "report.html", width)
        assert browser.messages == [] and browser.layout_problems() == []
        assert [url for url in browser.urls if not url.startswith(("data:", "file:"))] == []
    table = "[...document.querySelectorAll('table.sortable')].at(-1)"
    browser.evaluate(f"{table}.querySelectorAll('th button')[1].click()")
    shown = browser.evaluate(f"[...{table}.tBodies[0].rows].map((row) => row.cells[1].innerText)")
    best = sorted((row["ap_pct"] for row in report["classes"]), reverse=True)
    assert shown == [f"{value:.2f}" for value in best]


def test_page_of_a_run_in_a_browser(browser: Browser, run: Path, tmp_path: Path) -> None:
    succeeds(report_command, run, "--out", tmp_path / "page.html")
    results = [record["top1_pct"] for record in read_metrics(run) if record["kind"] == "eval"]
    texts = [f"{max(results):.2f}", "done, 22 steps", "step-0000022"]
    check_page(browser, tmp_path / "page.html", tmp_path, texts)


def test_names_with_markup_are_text_in_the_confusion_matrix(
    browser: Browser, tmp_path: Path
) -> None:
    names = ["<b>bold</b>", '<a href="https://example.org">', "<script>alert(1)</script>"]
    names += ["{{ 1 }} {% if %}", *(f"class{number}" for number in range(56))]
    for count in (10, 60):  # all cells, and blocks
        labels = names[:count]
        rows = np.zeros(count * 4, image_dtype(1))
        rows["index"] = np.arange(len(rows))
        rows["target"] = rows["index"] % count
        rows["top"][:, 0] = np.where(rows["index"] < 2 * count, 0, rows["target"])
        rows["probabilities"] = 0.5
        statistics, confusion = evaluation_statistics(rows, labels, lambda index: names[index % 4])
        about = {"model": "<b>m", "weights": "raw", "messages": [], "metrics": {}, "settings": {}}
        about["origin"] = "<b>run"
        examples = [*statistics["mistakes"], *statistics["hits"]]
        thumbnails = {row["index"]: b"" for row in examples}
        page = tmp_path / "page.html"
        page.write_bytes(evaluation_page(statistics | about, confusion, thumbnails))
        browser.open(page)
        text = browser.evaluate("document.body.innerText")
        assert [name for name in labels if name not in text] == []
        assert browser.evaluate("document.querySelectorAll('main b b, main a').length") == 0
        counts = np.array(browser.evaluate("figures[0].counts"))
        np.fill_diagonal(counts, 0)
        row, column = np.argwhere(counts)[0] + 0.5
        browser.hover(".matrix .nsewdrag", column / len(counts), row / len(counts))
        hovered = browser.evaluate("document.querySelector('.matrix .hoverlayer').textContent")
        assert "true:" in hovered and "<" in hovered
        assert browser.evaluate("document.querySelectorAll('.matrix a').length") == 0
        assert browser.messages == []
