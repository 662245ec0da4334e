"""The pages of `test.py --report` and `report.py` in Chromium: colors, width, text, and nothing
loaded.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import arguments, train_here
from PIL import Image

from imagenet_cls.commands.report import report_command
from imagenet_cls.commands.test import evaluate_command
from imagenet_cls.report.jsonl import read_metrics

pytestmark = pytest.mark.nightly


class Opened(NamedTuple):
    """What Chromium made of a page. dom: as HTML. urls: that the page requested from a network."""

    dom: str
    screenshot: Image.Image
    urls: list[str]


def open_page(page: Path, folder: Path, scheme: str = "light", width: int = 1200) -> Opened:
    """Open a page by its path, without a network. scheme: the preferred color scheme of the
    user.
    """
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs a browser (Debian: chromium)")
    folder.mkdir()
    options = {
        "blink-settings": f"preferredColorScheme={('dark', 'light').index(scheme)}",
        "host-resolver-rules": "MAP * ~NOTFOUND",
        "log-net-log": folder / "net.json",
        "screenshot": folder / "screenshot.png",
        "user-data-dir": folder / "profile",
        "window-size": f"{width},1500",
    }
    flags = (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "hide-scrollbars",
        "disable-background-networking",
        "dump-dom",
    )
    command = [
        program,
        *(f"--{flag}" for flag in flags),
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = json.loads((folder / "net.json").read_text())["events"]
    requests = [event["params"] for event in events if "initiator" in event.get("params", {})]
    # that is Chromium
    urls = [request["url"] for request in requests if request["initiator"] != "not an origin"]
    return Opened(unescape(done.stdout), Image.open(folder / "screenshot.png").convert("RGB"), urls)


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "run"
    train_here(arguments(digits, folder, log__tensorboard="true", ema__decay=0.9))
    return folder


def check_page(page: Path, folder: Path, texts: list[str]) -> None:
    """Light and dark, in a normal and a narrow window."""
    colors = {"light": (255, 255, 255), "dark": (21, 24, 27)}
    for scheme, background in colors.items():
        for width in (1200, 500):
            opened = open_page(page, folder / f"{scheme}{width}", scheme, width)
            assert opened.urls == [] and [text for text in texts if text not in opened.dom] == []
            assert opened.screenshot.size == (width, 1500)
            assert opened.screenshot.getpixel((0, 0)) == background
            margin = opened.screenshot.crop((width - 8, 0, width, 1500))
            # nothing is wider than the window
            assert margin.getcolors() == [(8 * 1500, background)]
            drawn = opened.screenshot.getcolors(width * 1500)
            assert drawn is not None
            assert drawn != [(width * 1500, background)]


def test_report_of_an_evaluation_in_a_browser(run: Path, tmp_path: Path, call: Callable) -> None:
    folder = tmp_path / "report"
    code, _, err = call(
        evaluate_command, run, "--report", folder, "--allow-import", "helpers:plain"
    )
    assert code == 0, err
    report = json.loads((folder / "report.json").read_text())
    texts = [f"{metrics['top1_pct']:.3f}" for metrics in report["metrics"].values()]
    texts += [f"{row['f1_pct']:.2f}" for row in report["classes"]] + [
        row["image"] for row in report["mistakes"]
    ]
    check_page(folder / "report.html", tmp_path, texts)


def test_page_of_a_run_in_a_browser(run: Path, tmp_path: Path, call: Callable) -> None:
    code, _, err = call(report_command, run, "--out", tmp_path / "page.html")
    assert code == 0, err
    results = [record["top1_pct"] for record in read_metrics(run) if record["kind"] == "eval"]
    check_page(
        tmp_path / "page.html", tmp_path, [f"{max(results):.2f}", "done, 22 steps", "step-0000022"]
    )


def test_request_of_a_page_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<img src="https://example.org/image.png">')
    assert open_page(tmp_path / "page.html", tmp_path / "opened").urls == [
        "https://example.org/image.png"
    ]
