"""Hooks of `mkdocs build` (mkdocs.yml): links out of docs/, and the order of search results."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]*)(#[^)]*)?\)")  # text, path, anchor
# A key is found in the list of all keys first, and a page in English before its translation.
SEARCH_BOOSTS = {"config.md": 4, "zh_CN/parallel.md": 0.5}


def on_config(config: Any) -> None:
    """Show a link to the repository in the footer, if its address is known."""
    if address := config.extra["repository"]:
        config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": address}]


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page with links to files of the repository; where its address is unknown, their text."""
    folder = PurePosixPath("docs", page.file.src_uri).parent
    address = config.extra["repository"]
    page.meta["search"] = {"boost": SEARCH_BOOSTS.get(page.file.src_uri, 1)}

    def to_repository(link: re.Match[str]) -> str:
        path = normpath(folder / link[2])
        if path.startswith("docs/"):
            return link[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{link[1]}]({address}/{kind}/main/{path}{link[3] or ''})" if address else link[1]

    return LINK.sub(to_repository, markdown)
