"""The docs name only what exists: paths, links, options, config keys, modules, exit codes, commands."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from imagenet_cls import errors
from imagenet_cls.commands.test import evaluation_parser, load_for_testing
from imagenet_cls.commands.train import load_for_training, train_parser
from imagenet_cls.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "tests" / "README.md",
]
PARTS = [
    path.name for path in (ROOT / "imagenet_cls").iterdir() if (path / "__init__.py").is_file()
]
# Options of other programs, and files that the reader creates.
FOREIGN_OPTIONS = {
    "--nproc-per-node",
    "--nnodes",
    "--bind-to",
    "--local-rank",
    "--rdzv-conf",
    "--shm-size",
    "--signal",
    "--time",
}
FOREIGN_OPTIONS |= {
    "--write",
    "--no-deps",
    "--no-build-isolation",
}  # of tests/configs/golden.py, of pip
FOREIGN_OPTIONS |= {
    f"--{name}" for name in ("job-name", "ntasks-per-node", "gpus-per-node", "cpus-per-task")
}  # SLURM
FOREIGN_OPTIONS |= {"--repo-type", "--local-dir"}  # of the Hugging Face Hub's client
FOREIGN_OPTIONS |= {
    "--kill-on-bad-exit",
    "--requeue",
    "--open-mode",
    "--cpus",
    "--cpuset-cpus",
}  # SLURM, docker
TOOLS = [path.stem for path in (ROOT / "tools").glob("*.py")]
READERS_FILES = {"configs/mine.yaml"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def missing_paths(text: str) -> list[str]:
    """Files and folders that `text` names and that do not exist. `engine/x.py` is in the package."""
    folders = "|".join(["tools", "scripts", "configs", "docs", "imagenet_cls", "tests", r"\.ci"])
    named = re.findall(rf"(?<![\w/.$-])((?:{folders})/[\w./*-]*[\w*])", text)
    named += [
        f"imagenet_cls/{m}"
        for m in re.findall(rf"(?<![\w/.])((?:{'|'.join(PARTS)})/\w+\.py)", text)
    ]
    return [name for name in named if name not in READERS_FILES and not list(ROOT.glob(name))]


def dead_links(text: str, folder: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^):#]+)\)", text) if not (folder / link).exists()]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(script, arguments) of each command line in a page's blocks, fenced or indented."""
    for line in re.findall(
        r"^ *(?:[A-Z_]+=\S+ )*((?:python|bash) (?:tools|scripts)/\w+\.(?:py|sh).*)$", text, re.M
    ):
        _, script, *words = shlex.split(line, comments=True)
        yield script, words


@each_page
def test_paths_and_links_exist(page: Path) -> None:
    assert missing_paths(page.read_text()) == []
    assert dead_links(page.read_text(), page.parent) == []


@cache
def options_of(tool: str) -> set[str]:
    """The options that `--help` lists."""
    command = [sys.executable, ROOT / "tools" / f"{tool}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return set(re.findall(r"--[a-z][a-z-]+", done.stdout))


@each_page
def test_options_exist(page: Path) -> None:
    named = {
        name.replace("_", "-")
        for name in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", page.read_text())
    }
    assert named - FOREIGN_OPTIONS.union(*map(options_of, TOOLS)) == set()


@pytest.mark.parametrize(
    ("page", "script", "words"),
    [
        pytest.param(page, script, words, id=f"{page.name}: {script} {' '.join(words)}"[:100])
        for page in PAGES
        for script, words in commands(page.read_text())
    ],
)
def test_commands_are_valid(
    page: Path, script: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real parser accepts them, and a config of the repository loads with their overrides."""
    monkeypatch.chdir(ROOT)
    tool = script.removeprefix("tools/").removesuffix(".py")
    if script == "scripts/dist_train.sh":
        assert words[1].isdigit()
        tool, words = "train", [words[0], *words[2:]]
    elif script == "scripts/dist_test.sh":
        gpus = 1 if words[1].isdigit() else 2
        assert words[gpus].isdigit()
        tool, words = "test", [*words[:gpus], *words[gpus + 1 :]]
    own_config = any(re.fullmatch(r"my_\w+\.yaml", word) for word in words)  # run by test_extending
    if tool == "train" and not own_config:
        load_for_training(train_parser().parse_intermixed_args(words))
    elif (
        tool == "test" and not own_config and not words[0].startswith("work_dirs/")
    ):  # a run has its own config
        load_for_testing(evaluation_parser().parse_intermixed_args(words))
    elif tool in TOOLS:
        assert {word for word in words if word.startswith("--")} <= options_of(tool)
        if tool == "print_config" and "CONFIG" not in words:
            load_config(words[0], [word for word in words if "=" in word])


def first_cells(page: Path) -> list[str]:
    """The first cell of each table row, without headings."""
    return [cell for cell in re.findall(r"^\| (.+?) \|", page.read_text(), re.M) if cell != "event"]


def test_tests_readme_names_tests_for_every_event() -> None:
    """A row of tests/README.md begins as one event of docs/reliability.md begins."""
    events, rows = (
        first_cells(ROOT / "docs" / "reliability.md"),
        first_cells(ROOT / "tests" / "README.md"),
    )
    covered = [[event for event in events if event.startswith(row)] for row in rows]
    assert all(len(found) == 1 for found in covered), rows
    assert sorted(found[0] for found in covered) == sorted(events)


def test_architecture_page_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    modules = [path for path in (ROOT / "imagenet_cls").rglob("*.py") if path.name != "__init__.py"]
    unnamed = [path for path in modules if "/".join(path.relative_to(ROOT).parts[-2:]) not in text]
    assert unnamed == [], "each module has a line in the map of docs/architecture.md"


def test_readme_names_every_exit_code() -> None:
    table = (ROOT / "README.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    codes = {
        int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in row.split(",")
    }
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.UserError)
    ]
    assert {kind.exit_code for kind in kinds} | {0, 1, 129, 130, 140, 141, 143} == codes
