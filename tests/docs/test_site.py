"""The documentation site (mkdocs.yml): strict build, links, search.

The strict build fails for a page that is not in the navigation.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://repository.example"
# What a reader may search for, and the heading that is found first.
SEARCHES = {
    "label smoothing": "loss.label_smoothing",
    "device ids": "parallel.device_ids",
    "warm-up": "schedule.warmup_epochs (warm-up)",
    "gradient accumulation": "train.micro_batch_size (gradient accumulation)",
    "early stopping": "train.early_stop",
    "class imbalance": "data.balance (class imbalance)",
    "mixed precision": "train.precision",
    "multi gpu": "parallel.mode (multi gpu)",
}
pytestmark = pytest.mark.nightly


class Addresses(HTMLParser):
    """The addresses in a page: those that a reader may open, and those that the browser loads."""

    def __init__(self, page: Path):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = self.links if tag == "a" else self.loaded
        found += [
            text for name, text in attrs if name in ("href", "src", "srcset", "data") and text
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. Warnings, such as for a dead link, are errors."""
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "REPOSITORY_URL": REPOSITORY, "SITE_URL": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = Addresses(page).loaded
        assert loaded
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == []
    for style in site.rglob("*.css"):
        assert re.findall(r"""url\(["']?(?:https?:)?//|@import""", style.read_text()) == []


def test_links_out_of_the_docs_lead_to_files_of_the_repository(site: Path) -> None:
    links = {link for page in site.rglob("*.html") for link in Addresses(page).links}
    paths = [
        re.split(r"/(?:blob|tree)/main/", link)[1:]
        for link in links
        if link.startswith(f"{REPOSITORY}/")
    ]
    assert ["README.md#what-is-different-here"] in paths
    assert [path for path in paths if not (ROOT / path[0].partition("#")[0]).exists()] == []


def test_search_finds_the_key_first(site: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    command = ["node", Path(__file__).with_name("search.mjs"), site, *SEARCHES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == SEARCHES
