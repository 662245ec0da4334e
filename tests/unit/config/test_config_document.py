"""The manual: every key has a comment, and docs/config.md is the schema's own text."""

import re
from pathlib import Path

import pytest

from imagenet_cls.config import document, keys

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("path", keys.leaves(), ids=".".join)
def test_every_key_has_a_comment_of_its_own(path: keys.KeyPath) -> None:
    comment = document.comments()[(keys.sections()[path[:-1]].__name__, path[-1])]
    assert len(comment) > 10


def test_every_section_says_what_it_is() -> None:
    assert all(
        section.__doc__ and not section.__doc__.startswith(section.__name__) for section in keys.sections().values()
    )


def test_the_page_is_up_to_date() -> None:
    remedy = "run: python -m imagenet_cls.config.document > docs/config.md"
    assert (REPO / "docs" / "config.md").read_text() == document.page(), remedy


def test_the_page_names_every_key_once_with_type_and_default() -> None:
    listed = re.findall(r"^- \*\*`([\w.]+)`\*\* \((.+); default (.+)\)\.$", document.page(), re.MULTILINE)
    assert sorted(name for name, _, _ in listed) == sorted(".".join(path) for path in keys.leaves())
    by_name = {name: (kind, default) for name, kind, default in listed}
    assert by_name["optimizer.lr"] == ("float", "none: must be stated")
    assert by_name["data.val"] == ("str or null", "`val`")
    assert by_name["train.precision"] == ("one of auto, fp32, bf16, fp16", "`auto`")
