"""The pages of `test.py --report` and `report.py` in Chromium: width, text, and nothing loaded; of
many runs also the legend, sorting and filtering.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser, open_browser
from helpers import succeeds

from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.extras.pages.runs_page import run_names
from imagenet_cls.report.jsonl import read_metrics

WIDTHS = (390, 800, 1400)  # of a phone, and up to a wide window
ROWS = "[...document.querySelectorAll('tr[data-run]')]"
# The numbers of the runs whose curves are shown, in all figures.
SHOWN = """[...document.querySelectorAll(".plot [class^=run-]")]
  .filter((curve) => getComputedStyle(curve).display !== "none")
  .map((curve) => Number(curve.classList[0].slice(4)))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(train_on_digits: Callable[..., Path]) -> Path:
    return train_on_digits(ema__decay=0.9)


def open_page(browser: Browser, page: Path, width: int) -> None:
    """Open a page, which has no messages and no layout problems, and loads nothing."""
    browser.open(page, width)
    assert browser.messages == [] and browser.layout_problems() == []
    assert [url for url in browser.urls if not url.startswith("data:")] == [page.as_uri()]


def check_page(browser: Browser, page: Path, texts: list[str]) -> None:
    """In all widths."""
    for width in WIDTHS:
        open_page(browser, page, width)
        dom = browser.evaluate("document.body.innerText + document.body.textContent")
        assert [text for text in texts if text not in dom] == []


@pytest.mark.nightly
def test_pages_of_a_run_and_an_evaluation_in_a_browser(
    browser: Browser, run: Path, tmp_path: Path
) -> None:
    succeeds(report_command, run, "--out", tmp_path / "page.html")
    check_page(browser, tmp_path / "page.html", ["step 22 of 22", "step-0000022"])
    page = tmp_path / "evaluation.html"
    succeeds(evaluate_command, run, "--report", page, "--allow-import", "helpers:plain")
    check_page(browser, page, ["Confusion matrix", "Most confident mistakes", "eval.crop_px"])


# ---- many runs

NAMES = ["<b>bold</b>", '<a href="https:example.org">', "<script>alert(1)<", "{{ 1 }} {% if %}"]


def copy_run(run: Path, folder: Path, number: int) -> Path:
    """A copy of a run with another learning rate and accuracy."""
    shutil.copytree(run, folder)
    config = (run / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("  lr: 0.03\n", f"  lr: 0.{number + 10}\n"))
    records = read_metrics(run)
    for record in records:
        if "top1_pct" in record:
            record["top1_pct"] *= 1 - number / 100
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def write_page(run: Path, folder: Path, count: int) -> Path:
    """The page of `count` runs. Names have markup or are long."""
    names = [*NAMES, *(f"resnet{number}_with_a_long_name" for number in range(count))][:count]
    runs = [copy_run(run, folder / f"{i:02d} {name}", i) for i, name in enumerate(names)]
    page = folder / "page.html"
    succeeds(report_command, *runs, "--out", page)
    return page


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.nightly)])
def test_page_has_no_layout_problems_and_its_table_is_the_legend(
    count: int, browser: Browser, run: Path, tmp_path: Path
) -> None:
    page = write_page(run, tmp_path, count)
    for width in WIDTHS:
        open_page(browser, page, width)
        columns = "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns"
        expected = {390: 1, 800: 2, 1400: 3}[width]
        assert browser.evaluate(f"{columns}.split(' ').length") == expected
        table = "document.querySelector('.table.runs')"
        assert width < 1400 or browser.evaluate(f"{table}.scrollWidth <= {table}.clientWidth")
    named = browser.evaluate(f"{ROWS}.map((row) => row.querySelector('span').textContent)")
    runs = sorted(path.parent for path in tmp_path.glob("**/metrics.jsonl"))
    assert sorted(named) == sorted(run_names(runs))
    assert browser.evaluate("document.querySelectorAll('main em').length") == 1  # the best run
    colors = browser.evaluate(f"{ROWS}.map((row) => row.style.getPropertyValue('--run'))")
    assert len(set(colors)) == min(count, 12)
    assert set(browser.evaluate(SHOWN)) == set(range(count))
    titles = "[...document.querySelectorAll('.plot title')].map((title) => title.textContent)"
    assert set(browser.evaluate(titles)) == set(named)
    tags = "document.querySelectorAll('main b b, main a[href^=\"https\"]').length"
    assert browser.evaluate(tags) == 0

    browser.evaluate(f"{ROWS}[1].click()")
    assert set(browser.evaluate(SHOWN)) == set(range(count)) - {1}
    browser.evaluate(f"{ROWS}[1].click()")
    assert set(browser.evaluate(SHOWN)) == set(range(count))
    assert browser.messages == []


@pytest.mark.nightly
def test_table_of_runs_is_sorted_and_filtered(browser: Browser, run: Path, tmp_path: Path) -> None:
    browser.open(write_page(run, tmp_path, 6))
    column = (
        "(title) => [...document.querySelectorAll('.runs thead th')].find((th) => "
        "th.textContent === title)"
    )
    for title in ("best top-1", "time", "optimizer.lr", "run"):
        header = f"({column})({json.dumps(title)})"
        cells = f"{ROWS}.map((row) => row.cells[{header}.cellIndex])"
        orders = []
        for _ in range(2):
            browser.evaluate(f"{header}.click()")
            texts = f"{cells}.map((cell) => cell.dataset.sort ?? cell.textContent.trim())"
            keys = browser.evaluate(texts)
            orders.append(keys if title == "run" else list(map(float, keys)))
        ordered = orders if title in ("run", "optimizer.lr") else orders[::-1]
        assert ordered[0] == sorted(ordered[0]) and len(ordered[0]) == 6
        assert ordered[1] == sorted(ordered[0], reverse=True)
    search = "document.querySelector('.filter')"
    browser.evaluate(f"{search}.value = 'bold'; {search}.dispatchEvent(new Event('input'))")
    shown = f"{ROWS}.filter((row) => !row.hidden).map((row) => row.dataset.run)"
    (only,) = browser.evaluate(shown)
    assert set(browser.evaluate(SHOWN)) == {int(only)}
    assert browser.messages == []
