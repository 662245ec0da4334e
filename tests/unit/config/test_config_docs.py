"""docs/generate.py: the pages generated from schema and configs are up to date."""

import runpy
from pathlib import Path

import pytest

from imagenet_cls.config import keys

DOCS = Path(__file__).resolve().parents[3] / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.parametrize("page", ["config", "recipes"])
def test_generated_page_is_up_to_date(page: str) -> None:
    assert (DOCS / f"{page}.md").read_text() == GENERATE[f"{page}_page"](), (
        "run: python docs/generate.py"
    )


def test_every_key_and_section_has_a_description() -> None:
    comments = GENERATE["comments"]()
    for key in keys.value_types():
        section, _, name = key.rpartition(".")
        assert len(comments[keys.sections()[section].__name__, name]) > 10, key
    for section in keys.sections().values():
        assert section.__doc__ and not section.__doc__.startswith(section.__name__)
