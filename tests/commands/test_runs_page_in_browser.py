"""The page of many runs in Chromium: layout, legend, sorting, filtering, console."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, open_browser

from imagenet_cls.commands.report import report_command
from imagenet_cls.config.load import load_config
from imagenet_cls.report.runs import run_names

STEPS_PER_EPOCH, EVERY_STEPS = 40, 8
NAMES = ["<b>bold</b>", '<a href="https:example.org">', "<script>alert(1)<", "{{ 1 }} {% if %}"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def write_run(folder: Path, number: int, epochs: int = 30) -> Path:
    """A run folder with records as of a training: falling noisy loss, warm-up and cosine, two
    weights, a varying speed, a resume, sometimes an early end.
    """
    draws = np.random.default_rng(number)
    lr = float(draws.choice([0.01, 0.03, 0.1, 0.3]))
    batch = int(draws.choice([128, 256, 512]))
    folder.mkdir(parents=True)
    train = {"global_batch_size": batch, "epochs": epochs}
    config = {"optimizer": {"lr": lr}, "train": train, "seed": number}
    (folder / "config.yaml").write_text(json.dumps(config))
    load_config(folder / "config.yaml")  # is valid
    total = STEPS_PER_EPOCH * epochs
    quality = draws.uniform(0.8, 1.0)
    records = []
    last = total if number % 4 else int(total * draws.uniform(0.4, 0.9))
    for step in range(1, last + 1):
        progress, epoch = step / total, (step - 1) // STEPS_PER_EPOCH
        warmup = min(1, step / (3 * STEPS_PER_EPOCH))
        rate = lr * warmup * (0.5 + 0.5 * math.cos(math.pi * progress))
        loss = 2.3 * math.exp(-4 * quality * progress) + 0.25 / quality
        loss *= math.exp(draws.normal(0, 0.08))
        top1 = 100 * quality * (1 - math.exp(-6 * progress))
        record = {"kind": "train", "step": step, "epoch": epoch, "loss": loss, "lr": rate}
        record |= {"top1_pct": top1, "grad_norm": 1.0}
        if step % EVERY_STEPS == 0:
            speed = 3000 * quality * draws.normal(1, 0.03)
            record |= {"images_per_sec": speed, "data_wait_pct": draws.uniform(0, 4)}
        records.append(record)
        if step == total // 3 and number % 3 == 0:
            event = {"kind": "event", "step": step, "message": f"resumed from step-{step:07d}"}
            records.append(event)
        if step % STEPS_PER_EPOCH == 0:
            for weights, shift in (("raw", draws.normal(0, 1)), ("ema", 1.5)):
                result = {"kind": "eval", "step": step, "epoch": epoch, "weights": weights}
                result |= {"top1_pct": min(99.0, top1 + shift), "top5_pct": 99.0, "loss": loss}
                result |= {"balanced_accuracy_pct": top1, "images": 1000, "seconds": 4.0}
                records.append(result)
    checkpoint = folder / "checkpoints" / f"step-{last:07d}"
    checkpoint.mkdir(parents=True)
    plan = {"total_steps": total, "steps_per_epoch": STEPS_PER_EPOCH}
    state = {"plan": plan, "progress": {"step": last}, "world_size": 8}
    (checkpoint / "state.json").write_text(json.dumps(state))
    versions = {"code": {"commit": "0" * 40, "uncommitted_changes": False}}
    versions |= {"versions": {"torch": "2.11.0", "timm": "1.0.31"}}
    (folder / "env.json").write_text(json.dumps(versions))
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def write_page(folder: Path, count: int, call: Callable) -> Path:
    """The page of `count` runs, of which the first have names with markup."""
    names = [*NAMES, *(f"resnet{number}_with_a_long_name" for number in range(count))][-count:]
    if count >= len(NAMES):
        names = [*NAMES, *names][:count]
    runs = [write_run(folder / f"{i:02d} {name}", i) for i, name in enumerate(names)]
    code, _, err = call(report_command, *runs, "--out", folder / "page.html")
    assert code == 0, err
    page = folder / "page.html"
    assert page.stat().st_size < 6_000_000
    return page


@pytest.mark.parametrize(
    "count", [3, *(pytest.param(count, marks=pytest.mark.nightly) for count in (1, 10, 40))]
)
def test_page_has_no_layout_problems_and_its_table_is_the_legend(
    count: int, browser: Browser, tmp_path: Path, call: Callable
) -> None:
    page = write_page(tmp_path, count, call)
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
def test_table_of_runs_is_sorted_and_filtered(
    browser: Browser, tmp_path: Path, call: Callable
) -> None:
    browser.open(write_page(tmp_path, 6, call))
    numbers = "[...document.querySelectorAll('tr[data-run]')].map((row) => row.dataset.run)"
    column = "(title) => [...document.querySelectorAll('.runs thead th')].find((th) => "
    column += "th.textContent === title)"
    for title in ("best top-1 %", "time", "optimizer.lr", "run"):
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
def test_zoom_of_one_figure_zooms_all(browser: Browser, tmp_path: Path, call: Callable) -> None:
    browser.open(write_page(tmp_path, 3, call))
    plots = "[...document.querySelectorAll('.plot')]"
    zoom = f"Plotly.relayout({plots}[0], {{'xaxis.range[0]': 100, 'xaxis.range[1]': 200}})"
    browser.evaluate(f"{zoom}.then(() => null)")
    browser.settle()
    ranges = browser.evaluate(f"{plots}.map((plot) => plot.layout.xaxis.range)")
    assert ranges == [[100, 200]] * 4
    assert browser.messages == []


def test_names_are_text_in_figures(browser: Browser, tmp_path: Path, call: Callable) -> None:
    """The label of a hovered point shows the name of the run, with its markup."""
    browser.open(write_page(tmp_path, len(NAMES), call))
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
