"""Writes the column "last run" of docs/reliability.md: how many tests stand behind a promise, and what became of them.

REPORTS=reports bash scripts/test.sh
python tests/last_run.py reports
"""

import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
LINE = re.compile(r"^The last run of all of them: .*?\n\n", re.MULTILINE | re.DOTALL)


def read_reports(folder: Path) -> dict[str, Counter[str]]:
    """By test file: how many `passed`, `failed` and were `skipped`, and their `seconds` together."""
    found: dict[str, Counter[str]] = {}
    for report in folder.glob("*.xml"):
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            file = case.attrib["classname"].replace(".", "/") + ".py"
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            counts = found.setdefault(file, Counter())
            counts[outcome] += 1
            counts["seconds"] += float(case.attrib["time"])  # type: ignore[assignment]
    return found


def figure(cell: str, found: dict[str, Counter[str]]) -> str:
    """What became of the test files that a cell names."""
    files = dict.fromkeys(re.findall(r"tests/[\w/]+\.py", cell))
    counts = sum((found.get(file, Counter({"not run": 1})) for file in files), Counter[str]())
    outcomes = [f"{counts[name]} {name}" for name in ("passed", "failed", "skipped", "not run") if counts[name]]
    return f"{', '.join(outcomes)}, {counts['seconds']:.0f} s"


def with_column(line: str, found: dict[str, Counter[str]]) -> str:
    """A table's line with its fourth cell."""
    cells = line.strip().strip("|").split(" | ")[:3]
    if line.startswith("|---"):
        return "|---|---|---|---|"
    last = "last run" if cells[-1].strip() == "Test" else figure(cells[-1], found)
    return f"| {' | '.join(cell.strip() for cell in cells)} | {last} |"


def main() -> None:
    found = read_reports(Path(sys.argv[1]))
    text = PAGE.read_text()
    lines = [with_column(line, found) if line.startswith("|") else line for line in text.splitlines()]
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchvision", "timm"))
    when = f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {libraries}, two CPU cores"
    seconds = "Seconds are those of the whole test files, of which two ran at a time."
    said = f"The last run of all of them: {when}.\n{seconds}\n\n"
    page = "\n".join(lines) + "\n"
    page = (
        LINE.sub(said, page) if LINE.search(page) else page.replace("\n## Stop and go on", f"\n{said}## Stop and go on")
    )
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
