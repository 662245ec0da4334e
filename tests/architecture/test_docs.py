"""What the docs name is there: paths, links, options, config keys, modules, exit codes; and the checks notice."""

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagenet_cls import errors
from imagenet_cls.commands.compare_parallel import compare_command
from imagenet_cls.commands.plot_schedule import plot_schedule_command
from imagenet_cls.commands.predict import predict_command
from imagenet_cls.commands.prepare_imagenet import prepare_command
from imagenet_cls.commands.print_config import print_config_main
from imagenet_cls.commands.test import evaluation_parser, load_for_testing
from imagenet_cls.commands.train import load_for_training, train_parser
from imagenet_cls.commands.verify_data import verify_command
from imagenet_cls.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
average_parser = runpy.run_path(str(ROOT / "tools" / "average_checkpoints.py"))["parser"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PARTS = [path.name for path in (ROOT / "imagenet_cls").iterdir() if (path / "__init__.py").is_file()]
# Named in the docs, but belonging to other programs or to the reader.
FOREIGN_OPTIONS = {"--nproc-per-node", "--nnodes", "--bind-to", "--local-rank", "--shm-size", "--signal", "--time"}
READERS_FILES = {"configs/mine.yaml"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def missing_paths(text: str) -> list[str]:
    """Files and folders of the repository that `text` names and that are not there. `engine/x.py` is in the package."""
    folders = "|".join(["tools", "scripts", "configs", "docs", "imagenet_cls", "tests", r"\.ci"])
    named = re.findall(rf"(?<![\w/.$-])((?:{folders})/[\w./*-]*[\w*])", text)
    named += [f"imagenet_cls/{m}" for m in re.findall(rf"(?<![\w/.])((?:{'|'.join(PARTS)})/\w+\.py)", text)]
    return [name for name in named if name not in READERS_FILES and not list(ROOT.glob(name))]


def dead_links(text: str, folder: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^):#]+)\)", text) if not (folder / link).exists()]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(script, words behind it) of each complete command line in a page's blocks, fenced or indented."""
    for line in re.findall(r"^ *(?:[A-Z_]+=\S+ )*((?:python|bash) (?:tools|scripts)/\w+\.(?:py|sh).*)$", text, re.M):
        _, script, *words = shlex.split(line, comments=True)
        yield script, words


@each_page
def test_paths_and_links_exist(page: Path) -> None:
    assert missing_paths(page.read_text()) == []
    assert dead_links(page.read_text(), page.parent) == []


@each_page
def test_options_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    help_texts = {name: help_of(name, capsys) for name in TOOLS}
    named = {name.replace("_", "-") for name in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", page.read_text())}
    known = FOREIGN_OPTIONS.union(*help_texts.values())
    assert named - known == set()


@pytest.mark.parametrize(
    ("page", "script", "words"),
    [
        pytest.param(page, script, words, id=f"{page.name}: {script} {' '.join(words)}"[:100])
        for page in PAGES
        for script, words in commands(page.read_text())
    ],
)
def test_commands_can_be_carried_out(
    page: Path, script: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parsed by the real parser; and where it names one of our configs, loaded with its changes."""
    monkeypatch.chdir(ROOT)
    tool = script.removeprefix("tools/").removesuffix(".py")
    if script == "scripts/dist_train.sh":
        assert words[1].isdigit()
        tool, words = "train", [words[0], *words[2:]]
    elif script == "scripts/dist_test.sh":
        assert words[2].isdigit()
        tool, words = "test", [*words[:2], *words[3:]]
    own_config = any(re.fullmatch(r"my_\w+\.yaml", word) for word in words)  # run by test_extending
    if tool == "train" and not own_config:
        load_for_training(train_parser().parse_intermixed_args(words))
    elif tool == "test" and not own_config:
        load_for_testing(evaluation_parser().parse_intermixed_args(words))
    elif tool in TOOLS:
        assert {word for word in words if word.startswith("--")} <= help_of(tool, capsys)
        if tool == "print_config" and "CONFIG" not in words:
            load_config(words[0], [word for word in words if "=" in word])


def test_the_map_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    modules = [path for path in (ROOT / "imagenet_cls").rglob("*.py") if path.name != "__init__.py"]
    unnamed = [path for path in modules if "/".join(path.relative_to(ROOT).parts[-2:]) not in text]
    assert unnamed == [], "each module has a line in the map of docs/architecture.md"


def test_the_readme_names_every_exit_code() -> None:
    table = (ROOT / "README.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in row.split(",")}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UserError)]
    assert {kind.exit_code for kind in kinds} | {0, 1, 130, 140, 143} == codes


@pytest.mark.parametrize(
    "text", ["`tools/trian.py`", "see configs/resnet99.yaml.", "engine/hooks.py", "`tests/units/`", "bash .ci/runs"]
)
def test_a_path_that_is_not_there_is_noticed(text: str) -> None:
    assert len(missing_paths(text)) == 1
    assert missing_paths("`tools/train.py`, `tests/unit/`, engine/train.py, .ci/run, work_dirs/demo/configs/x") == []


TOOLS = {
    "train": lambda: train_parser().parse_args(["--help"]),
    "test": lambda: evaluation_parser().parse_args(["--help"]),
    "predict": lambda: predict_command(["--help"]),
    "print_config": lambda: print_config_main(["--help"]),
    "prepare_imagenet": lambda: prepare_command(["--help"]),
    "average_checkpoints": lambda: average_parser().parse_args(["--help"]),
    "compare_parallel": lambda: compare_command(["--help"]),
    "plot_schedule": lambda: plot_schedule_command(["--help"]),
    "verify_data": lambda: verify_command(["--help"]),
}


def help_of(tool: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options that a tool takes, as its own help lists them."""
    capsys.readouterr()
    with pytest.raises(SystemExit):
        TOOLS[tool]()
    return set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
