"""The page of many runs in Chromium: layout, legend, sorting, filtering, console."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, open_browser
from helpers import arguments, succeeds, train_here

from imagenet_cls.extras.pages.report import report_command
from imagenet_cls.extras.pages.runs_page import run_names
from imagenet_cls.report.jsonl import read_metrics

NAMES = ["<b>bold</b>", '<a href="https:example.org">', "<script>alert(1)<", "{{ 1 }} {% if %}"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    train_here(arguments(digits, folder, ema__decay=0.9))
    return folder


def copy_run(run: Path, folder: Path, number: int) -> Path:
    """A copy of a run with another learning rate, speed and accuracy; every third one was
    resumed.
    """
    shutil.copytree(run, folder)
    config = (run / "config.yaml").read_text()
    assert "  lr: 0.03\n" in config
    (folder / "config.yaml").write_text(config.replace("  lr: 0.03\n", f"  lr: 0.{number + 10}\n"))
    records = read_metrics(run)
    for record in records:
        for key in {"top1_pct", "images_per_sec"} & record.keys():
            record[key] *= 1 - number / 100
    if number % 3 == 0:
        records.append({"kind": "event", "step": 8, "message": "resumed from step-0000008"})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def write_page(run: Path, folder: Path, count: int) -> Path:
    """The page of `count` runs. Names have markup or are long."""
    names = [*NAMES, *(f"resnet{number}_with_a_long_name" for number in range(count))][:count]
    runs = [copy_run(run, folder / f"{i:02d} {name}", i) for i, name in enumerate(names)]
    page = folder / "page.html"
    succeeds(report_command, *runs, "--out", page)
    assert page.stat().st_size < 6_000_000
    return page


@pytest.mark.parametrize(
    "count", [3, *(pytest.param(count, marks=pytest.mark.nightly) for count in (1, 40))]
)
def test_page_has_no_layout_problems_and_its_table_is_the_legend(
    count: int, browser: Browser, run: Path, tmp_path: Path
) -> None:
    page = write_page(run, tmp_path, count)
    for width in (390, 800, 1400):
        browser.open(page, width)
        assert browser.layout_problems() == []
        columns = "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns"
        assert browser.evaluate(f"{columns}.split(' ').length") == (1 if width < 800 else 2)
    rows = "[...document.querySelectorAll('tr[data-run]')]"
    named = browser.evaluate(f"{rows}.map((row) => row.cells[0].textContent.trim())")
    runs = sorted(path.parent for path in tmp_path.glob("**/metrics.jsonl"))
    assert sorted(named) == sorted(run_names(runs))
    colors = browser.evaluate(f"{rows}.map((row) => row.style.getPropertyValue('--run'))")
    assert len(set(colors)) == count
    traces = "[...document.querySelectorAll('.plot')].flatMap((plot) => plot.data)"
    drawn = f"{traces}.filter((trace) => trace.visible !== false)"
    assert browser.evaluate(f"new Set({drawn}.map((trace) => trace.meta)).size") == count
    drawn_colors = browser.evaluate(f"{traces}.map((trace) => [trace.meta, trace.line.color])")
    assert all(colors[run] == color for run, color in drawn_colors)
    valid = "[...document.querySelectorAll('.plot')].every((plot) => "
    valid += "!Plotly.validate(plot.data, plot.layout))"
    assert browser.evaluate(valid)

    browser.evaluate(f"{rows}[0].click()")
    hidden = f"{traces}.filter((trace) => trace.visible === false).map((trace) => trace.meta)"
    of_first = browser.evaluate(f"{traces}.filter((trace) => trace.meta === 0).length")
    assert browser.evaluate(hidden) == [0] * of_first
    shapes = "[...document.querySelectorAll('.plot')].flatMap((plot) => plot.layout.shapes)"
    assert "0" not in browser.evaluate(f"{shapes}.map((shape) => shape.name)")
    browser.evaluate(f"{rows}[0].click()")
    assert browser.evaluate(hidden) == []
    assert browser.messages == []
    assert [url for url in browser.urls if not url.startswith(("file:", "data:"))] == []


@pytest.mark.nightly
def test_table_of_runs_is_sorted_and_filtered(browser: Browser, run: Path, tmp_path: Path) -> None:
    browser.open(write_page(run, tmp_path, 6))
    numbers = "[...document.querySelectorAll('tr[data-run]')].map((row) => row.dataset.run)"
    column = "(title) => [...document.querySelectorAll('.runs thead th')].find((th) => "
    column += "th.textContent === title)"
    for title in ("best validation top-1 %", "time", "optimizer.lr", "run"):
        orders = []
        for _ in range(2):
            browser.evaluate(f"({column})({json.dumps(title)}).click()")
            cells = f"(row) => row.cells[({column})({json.dumps(title)}).cellIndex]"
            texts = browser.evaluate(
                f"[...document.querySelectorAll('tr[data-run]')].map({cells}).map((cell) => "
                "cell.dataset.sort ?? cell.textContent.trim())"
            )
            keys = texts if title == "run" else [float(text) for text in texts]
            orders.append(keys)
        assert sorted(map(str, orders[0])) == sorted(map(str, orders[1]))
        ordered = orders if title in ("run", "optimizer.lr") else orders[::-1]
        assert ordered[0] == sorted(ordered[0])
        assert ordered[1] == sorted(ordered[1], reverse=True)
    search = "document.querySelector('.filter')"
    browser.evaluate(f"{search}.value = 'bold'; {search}.dispatchEvent(new Event('input'))")
    shown = "[...document.querySelectorAll('tr[data-run]')].filter((row) => !row.hidden)"
    assert browser.evaluate(f"{shown}.map((row) => row.dataset.run)") == ["0"]
    drawn = "[...document.querySelectorAll('.plot')].flatMap((plot) => plot.data)"
    drawn += ".filter((trace) => trace.visible !== false).map((trace) => trace.meta)"
    assert set(browser.evaluate(drawn)) == {0}
    assert sorted(browser.evaluate(numbers)) == ["0", "1", "2", "3", "4", "5"]
    assert browser.messages == []


@pytest.mark.nightly
def test_zoom_of_one_figure_zooms_all(browser: Browser, run: Path, tmp_path: Path) -> None:
    browser.open(write_page(run, tmp_path, 3))
    plots = "[...document.querySelectorAll('.plot')]"
    zoom = f"Plotly.relayout({plots}[0], {{'xaxis.range[0]': 100, 'xaxis.range[1]': 200}})"
    browser.evaluate(f"{zoom}.then(() => null)")
    browser.settle()
    ranges = browser.evaluate(f"{plots}.map((plot) => plot.layout.xaxis.range)")
    assert ranges == [[100, 200]] * 4
    assert browser.messages == []


def test_names_are_text_in_figures(browser: Browser, run: Path, tmp_path: Path) -> None:
    """The label of a hovered point shows the name of the run, with its markup."""
    browser.open(write_page(run, tmp_path, len(NAMES)))
    assert (
        browser.evaluate("document.querySelectorAll('main b, main a[href^=\"https\"]').length") == 0
    )
    for number, name in enumerate(NAMES):
        browser.evaluate(
            f"Plotly.Fx.hover(document.querySelectorAll('.plot')[2], [{{curveNumber: {number}, "
            "pointNumber: 5}])"
        )
        browser.settle()  # a hover is shown with a delay
        text = browser.evaluate("document.querySelectorAll('.hoverlayer')[2].textContent")
        assert name in text
        links = "document.querySelectorAll('.hoverlayer a').length"
        assert browser.evaluate(links) == 0
    assert browser.messages == []
