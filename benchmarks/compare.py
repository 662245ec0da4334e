"""Run implementations in turn, compare them pairwise, and write the results as tables and JSON.

A row of a result is a dictionary: `row` (what it is), `value`, and where they apply `low`, `high`
(the range over the rounds), `unit`, `goal` (such as ">= 2.5"), `met` and `note`. `value` is None
for what was not measured.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "benchmarks.md"
IMPLEMENTATIONS = ROOT / "benchmarks" / "implementations.py"
COMMANDS = ("decode", "loader", "index", "memory", "step", "arrays", "startup", "gpu")
NOT_MEASURED = "not measured"
Row = dict[str, Any]


@dataclass
class Implementation:
    """A process of `implementations.py`. checkout: of the repository whose package it uses."""

    label: str
    arguments: dict[str, Any]
    python: str = sys.executable
    checkout: Path = ROOT
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    passes: list[dict[str, float]] = field(default_factory=list)

    @cached_property
    def process(self) -> subprocess.Popen[str]:
        command = [self.python, "-P", str(IMPLEMENTATIONS), json.dumps(self.arguments)]
        env = {**os.environ, "PYTHONPATH": str(self.checkout)}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.log, text=True, env=env
        )

    def answer(self) -> dict[str, Any] | None:
        """The next line of the process; None if it has ended."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.log.seek(0)
        lines = self.log.read().strip().splitlines() or ["ended without a message"]
        self.error, self.passes = lines[-1][:200], []
        return None

    def wait_until_ready(self) -> None:
        self.versions = self.answer() or {}

    def one_pass(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        if (answer := self.answer()) is not None:
            self.passes.append(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()

    @property
    def rates(self) -> list[float]:
        """Images per second of each round."""
        return [each["images"] / each["seconds"] for each in self.passes]

    @property
    def cpu_ms(self) -> list[float]:
        """CPU milliseconds per image of each round."""
        return [1e3 * each["cpu_seconds"] / each["images"] for each in self.passes]


def run_in_turn(implementations: Sequence[Implementation], rounds: int) -> None:
    """Start all, then `rounds` times one pass of each, so that a slower or faster machine affects
    all.
    """
    try:
        for implementation in implementations:
            _ = implementation.process  # all start at once
        for implementation in implementations:
            implementation.wait_until_ready()
            progress(f"{implementation.label}: {implementation.error or 'ready'}")
        for number in range(rounds):
            for implementation in implementations:
                if not implementation.error:
                    implementation.one_pass()
            progress(f"round {number + 1} of {rounds}")
    finally:
        for implementation in implementations:
            implementation.close()


def progress(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def table_of_implementations(implementations: Sequence[Implementation]) -> list[Row]:
    """Images per second and CPU milliseconds per image of each."""
    return [
        measured(
            each.label,
            each.rates,
            "img/s",
            note=each.error,
            cpu_ms=rounded(median(each.cpu_ms or [0])) or None,
        )
        for each in implementations
    ]


def measured(
    row: str, values: Sequence[float], unit: str = "", goal: str = "", note: str = "", **more: Any
) -> Row:
    """A row with the median of the values and their range. Without values it was not measured."""
    result: Row = {"row": row, "value": None, "unit": unit}
    if values:
        middle = median(values)
        result["value"] = rounded(middle)
        if len(values) > 1:
            result |= {"low": rounded(min(values)), "high": rounded(max(values))}
    if goal:
        result["goal"] = goal
        if values:
            sign, bound = goal.split()
            result["met"] = middle >= float(bound) if sign == ">=" else middle <= float(bound)
    result |= {name: value for name, value in more.items() if value is not None}
    return {**result, "note": note} if note else result


def check(row: str, holds: bool, note: str = "") -> Row:
    """A row of a property that has to hold: the benchmark fails without it."""
    result = {
        "row": row,
        "value": "yes" if holds else "no",
        "goal": "yes",
        "met": holds,
        "check": True,
    }
    return {**result, "note": note} if note else result


def paired(
    row: str, ours: Implementation | None, other: Implementation | None, goal: str = ""
) -> Row:
    """The ratio of images per second in each round; `cpu_ratio` is that of images per CPU
    second.
    """
    if ours is None or other is None or not (ours.passes and other.passes):
        errors = [each.error for each in (ours, other) if each is not None and each.error]
        return measured(row, [], "x", goal, note=errors[0] if errors else NOT_MEASURED)
    ratios = [mine / theirs for mine, theirs in zip(ours.rates, other.rates, strict=True)]
    cpu = [
        theirs / mine
        for mine, theirs in zip(ours.cpu_ms, other.cpu_ms, strict=True)
        if mine and theirs
    ]
    return measured(row, ratios, "x", goal, cpu_ratio=rounded(median(cpu)) if cpu else None)


def best(implementations: Sequence[Implementation]) -> Implementation | None:
    """The fastest by the median of its rounds."""
    finished = [each for each in implementations if each.passes]
    return (
        max(finished, key=lambda each: median(each.rates))
        if finished
        else next(iter(implementations), None)
    )


def rounded(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _text(row: Row) -> str:
    if row.get("value") is None:
        return NOT_MEASURED
    return f"{_number(row['value'])} {row.get('unit', '')}".strip()


COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "row": ("", lambda row: row["row"]),
    "value": ("value", _text),
    "low": (
        "range",
        lambda row: f"{_number(row['low'])} to {_number(row['high'])}" if "low" in row else "",
    ),
    "cpu_ms": ("CPU ms/img", lambda row: _number(row.get("cpu_ms", ""))),
    "cpu_ratio": ("by CPU time", lambda row: _number(row.get("cpu_ratio", ""))),
    "host_ms": ("host ms", lambda row: _number(row.get("host_ms", ""))),
    "gpu_busy_pct": ("GPU busy %", lambda row: _number(row.get("gpu_busy_pct", ""))),
    "note": ("note", lambda row: row.get("note", "")),
}


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with the columns that they have."""
    columns = [column for name, column in COLUMNS.items() if any(name in row for row in rows)]
    lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|---" * len(columns) + "|"]
    lines += [
        "| " + " | ".join(cell(row).replace("|", "/") for _, cell in columns) + " |" for row in rows
    ]
    return "\n".join(lines)


def describe_machine() -> dict[str, Any]:
    """Processor, GPUs, cores, memory and load of this machine."""
    import torch  # here, since `startup` measures this import

    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        model = next(iter(names), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "load": [round(value, 1) for value in os.getloadavg()],
    }


def describe_commit(checkout: Path = ROOT) -> str:
    """The commit of a checkout, with `+` if files differ from it."""
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True
    ).stdout.strip()
    return commit + ("+" if changed else "")


def new_result(command: str, **description: Any) -> dict[str, Any]:
    """A result without rows. `tables` has the rows of each table by its title."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    versions = import_module(
        "benchmarks.implementations"
    ).versions()  # mypy does not follow it to packages of other libraries
    about = {
        "date": now,
        "commit": describe_commit(),
        "machine": describe_machine(),
        "versions": {"ours": versions},
    }
    return {"command": command, **about, **description, "tables": {}}


def write_result(result: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['command']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def about(result: Mapping[str, Any]) -> list[str]:
    """When and where a result was measured: the lines of a Markdown list."""
    machine, images = result["machine"], result.get("images")
    commit = f", commit {result['commit']}" if result.get("commit") else ""
    baseline = f"; the baseline is commit {result['baseline']}" if result.get("baseline") else ""
    processors = ", ".join([machine["processor"], *machine.get("gpus", [])])
    lines = [
        f"{result['date'][:10]}{commit}{baseline}; load {machine['load'][0]:g} at the start",
        f"{processors}, {machine['cores']} cores, {machine['memory_gib']} GiB",
    ]
    if images:
        size = (
            f"{images['width']}x{images['height']} pixels and {images['kilobytes']:g} KB on average"
        )
        lines.append(f"{images['images']} images ({images['source']}), {size}")
    return [
        textwrap.fill(f"- {line}", 120, subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    ]


def page_section(result: Mapping[str, Any], shared: Sequence[str] = ()) -> str:
    """A result as a section of docs/benchmarks.md. shared: lines of `about` that it leaves out."""
    command, images = result["command"], result.get("images", {})
    root = " --root DIR" if images.get("source") == "of --root" else ""
    lines = [
        f"### {result.get('title', command)}\n",
        f"`python tools/benchmark.py {command}{root}`\n",
        *(line for line in about(result) if line not in shared),
    ]
    for title, rows in result["tables"].items():
        passed = [row for row in rows if row.get("check") and row["met"]]
        measurements = [row for row in rows if row not in passed]
        if measurements:
            heading = f"\n{title}:\n" if title else ""
            lines.append(f"{heading}\n{table(measurements)}")
        if title == "Equality" and not measurements:
            count = "Both" if len(passed) == 2 else f"All {len(passed)}"
            lines.append(f"\n{count} checks that pixels, crops and losses are equal pass.")
        else:
            lines += [f"\nCheck passed: {row['row']}." for row in passed]
    return "\n".join(lines) + "\n"


BEGIN, END = (
    "<!-- Written by `python tools/benchmark.py docs` from benchmarks/results. -->",
    "<!-- End of the results. -->",
)


# What the page leaves out: comparisons with an earlier commit of the package, speeds whose ratios
# it has, ratios of ratios that it has, and times of imports and batches alone.
_NOT_ON_PAGE = re.compile(
    r"baseline|per image|, policy|, evaluation|^ours, 1 worker|alone$|: train\(\)$|: plain loop$"
    r"|re-encoded / ours$|^a batch|^import |^demo, (imports|after)"
)


def page_with_results(page: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The page with these results in the place of the earlier ones. What is the same for all of
    them is written once.
    """
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lists = [about({**result, "baseline": None}) for result in results]
    shared = [line for line in lists[0] if all(line in lines for lines in lists)] if lists else []
    sections = []
    for result in results:
        tables = {
            title: [
                {key: value for key, value in row.items() if key != "note" or row["value"] is None}
                for row in rows
                if not _NOT_ON_PAGE.search(row["row"])
            ]
            for title, rows in result["tables"].items()
            if title != "Each implementation"  # the ratios are on the page
        }
        sections.append(page_section({**result, "tables": tables, "baseline": None}, shared))
    common = ["All results:\n", *shared, ""] if shared else []
    return "\n".join([before + BEGIN, "", *common, *sections, END]) + after


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder, in the order of the commands, and then of their files' names: a
    command may have several, `loader.json` and `loader-420.json`.
    """
    return [
        {**json.loads(path.read_text()), "title": path.stem}
        for command in COMMANDS
        for path in sorted(folder.glob(f"{command}*.json"), key=lambda path: path.stem)
    ]
