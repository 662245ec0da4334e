"""docs/generate.py: the pages generated from schema and configs are up to date."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from imagenet_cls.config import keys

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", REPO / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["config", "recipes"])
def test_generated_page_is_up_to_date(generate: ModuleType, page: str) -> None:
    text = getattr(generate, f"{page}_page")()
    assert (REPO / "docs" / f"{page}.md").read_text() == text, "run: python docs/generate.py"


def test_every_key_and_section_has_a_description(generate: ModuleType) -> None:
    for path in keys.leaves():
        assert len(generate.comments()[(keys.sections()[path[:-1]].__name__, path[-1])]) > 10, path
    for section in keys.sections().values():
        assert section.__doc__ and not section.__doc__.startswith(section.__name__)


def test_config_page_lists_every_key_once(generate: ModuleType) -> None:
    listed = re.findall(r"^- \*\*`([\w.]+)`\*\* \((.+); default (.+)\)\.$", generate.config_page(), re.MULTILINE)
    assert sorted(name for name, *_ in listed) == sorted(".".join(path) for path in keys.leaves())
    by_name = {name: (kind, default) for name, kind, default in listed}
    assert by_name["optimizer.lr"] == ("float, at least 0", "none: must be set")
    assert by_name["data.val"] == ("str, or null", "`val`")
    assert by_name["train.precision"] == ("one of auto, fp32, bf16, fp16", "`auto`")
