"""The docs name only what exists: paths, links, options, config keys, modules, exit codes,
commands.
"""

import io
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from functools import cache
from inspect import signature
from pathlib import Path

import pytest
from PIL import Image

import imagenet_cls
from imagenet_cls import errors
from imagenet_cls.commands.test import evaluation_parser, load_for_testing
from imagenet_cls.commands.train import load_for_training, train_parser
from imagenet_cls.config.keys import SHORT_KEYS
from imagenet_cls.config.load import load_config
from imagenet_cls.entry_points import COMMANDS, load_command

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
# of tests/configs/golden.py, of pip, of pytest
FOREIGN_OPTIONS |= {"--write", "--no-deps", "--ignore"}
FOREIGN_OPTIONS |= {"--max-restarts", "--rdzv-backend", "--rdzv-endpoint"}  # torchrun
# SLURM
FOREIGN_OPTIONS |= {"--gres", "--job-name", "--wrap"}
FOREIGN_OPTIONS |= {f"--{name}" for name in ("ntasks-per-node", "gpus-per-node", "cpus-per-task")}
# of earlier versions, in the changelog
REMOVED_OPTIONS = {"--format", "--sort-into", "--opset", "--labels", "--no-count-check", "--copy"}
REMOVED_OPTIONS |= {"--link-js", "--quality", "--knn", "--linear-probe", "--quick"}
FOREIGN_OPTIONS |= {"--strict", "--use-ema"}  # of mkdocs, of timm's validate.py
# SLURM, docker
FOREIGN_OPTIONS |= {"--kill-on-bad-exit", "--requeue", "--open-mode", "--cpus", "--cpuset-cpus"}
TOOLS = [path.stem for path in (ROOT / "tools").glob("*.py")]
READERS_FILES = {"configs/mine.yaml"}
READERS_DATA = ("photos", "dataset", "packed", "photos.zip", "labels.csv")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def own_text(page: Path) -> str:
    """A page without the first column of the tables that list options of other projects."""
    text = page.read_text()
    return re.sub(r"^\| .+? \|", "|", text, flags=re.M) if page.name == "coming_from.md" else text


def missing_paths(text: str) -> list[str]:
    """Files and folders that `text` names and that do not exist. `engine/x.py` is in the
    package.
    """
    folders = "|".join(["tools", "scripts", "configs", "docs", "imagenet_cls", "tests", r"\.ci"])
    named = re.findall(rf"(?<![\w/.$-])((?:{folders})/[\w./*-]*[\w*])", text)
    named += [
        f"imagenet_cls/{m}"
        for m in re.findall(rf"(?<![\w/.])((?:{'|'.join(PARTS)})/\w+\.py)", text)
    ]
    return [name for name in named if name not in READERS_FILES and not list(ROOT.glob(name))]


def dead_links(page: Path) -> list[str]:
    """Links of a page to files, or to headings of pages, that do not exist."""
    dead = []
    for link in re.findall(r"\]\(([^):]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(script, arguments) of each command line in a page's blocks, fenced or indented."""
    for line in re.findall(
        r"^ *(?:[A-Z_]+=\S+ )*((?:python|bash) "
        r"(?:tools|scripts)/\w+\.(?:py|sh).*)$",
        text,
        re.M,
    ):
        _, script, *words = shlex.split(line, comments=True)
        yield script, words


@each_page
def test_paths_and_links_exist(page: Path) -> None:
    assert missing_paths(own_text(page)) == []
    assert dead_links(page) == []


@cache
def options_of(tool: str) -> set[str]:
    """The options that `--help` lists: of a command in this process, which has imported torch."""
    name = tool.replace("_", "-")
    if name not in COMMANDS:
        words = [sys.executable, ROOT / "tools" / f"{tool}.py", "--help"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True)
        return options_in(done.stdout)
    command = load_command(name)
    shown = io.StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit):
        command(["--help"])
    return options_in(shown.getvalue())


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", text))


@each_page
def test_options_exist(page: Path) -> None:
    named = {
        name.replace("_", "-") for name in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", own_text(page))
    }
    if page.name == "CHANGELOG.md":
        named -= REMOVED_OPTIONS
    assert named - FOREIGN_OPTIONS.union(*map(options_of, TOOLS)) == set()


@pytest.fixture(scope="module")
def with_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets that the pages train on in place of a config, and `configs/`."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "configs").symlink_to(ROOT / "configs")
    rows = ["image,label"]
    for name, number in itertools.product(("cat", "dog"), range(5)):
        image = folder / "photos" / name / f"{number}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(image)
        rows.append(f"{image.relative_to(folder)},{name}")
    (folder / "labels.csv").write_text("\n".join(rows))
    shutil.make_archive(str(folder / "photos"), "zip", folder / "photos")
    for part in ("dataset/train", "dataset/val", "packed/train", "packed/val"):
        shutil.copytree(folder / "photos", folder / part)
    return folder


@each_page
def test_commands_are_valid(page: Path, with_data: Path) -> None:
    """The real parser accepts them, and a config of the repository loads with their overrides. A
    dataset in place of a config exists in `with_data`.
    """
    for script, words in commands(page.read_text()):
        with chdir(with_data if words and words[0] in READERS_DATA else ROOT):
            check_command(script, words)


def check_command(script: str, words: list[str]) -> None:
    tool = script.removeprefix("tools/").removesuffix(".py")
    if script == "scripts/dist_train.sh":
        assert words[1].isdigit(), words
        tool, words = "train", [words[0], *words[2:]]
    elif script == "scripts/dist_test.sh":
        gpus = 1 if words[1].isdigit() else 2
        assert words[gpus].isdigit()
        tool, words = "test", [*words[:gpus], *words[gpus + 1 :]]
    own_config = any(re.fullmatch(r"my_\w+\.yaml", word) for word in words)  # run by test_extending
    if tool == "train" and not own_config:
        load_for_training(train_parser().parse_intermixed_args(words))
    # a run has its own config
    elif tool == "test" and not own_config and not words[0].startswith("work_dirs/"):
        load_for_testing(evaluation_parser().parse_intermixed_args(words))
    elif tool in TOOLS:
        assert {word for word in words if word.startswith("--")} <= options_of(tool)
        if tool == "print_config" and "CONFIG" not in words:
            load_config(words[0], [word for word in words if "=" in word])


@each_page
def test_commands_of_the_wheel_exist(page: Path) -> None:
    assert set(re.findall(r"^imagenet-cls ([a-z-]+)", page.read_text(), re.M)) <= set(COMMANDS)


def test_usage_page_names_every_tool() -> None:
    table = (ROOT / "docs" / "usage.md").read_text().partition("## Commands\n")[2]
    named = re.findall(r"`tools/(\w+)\.py`", table.partition("\n## ")[0])
    assert sorted(set(named)) == sorted(TOOLS)


def test_page_of_the_python_api_names_every_argument_and_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in imagenet_cls.__all__ if f"`{name}`" not in page] == []
    table = page.partition("\n## train\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", table, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert named == list(signature(imagenet_cls.train).parameters)


def test_short_keys_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "your_data.md").read_text().partition("### Short keys\n")[2]
    rows = re.findall(r"^\| `(\w+)=\w+` \| `([^`]+)`", page, re.M)
    named = {short: tuple(re.findall(r"([\w.]+)=", keys)) for short, keys in rows}
    assert named == {**SHORT_KEYS, "model": ("model.name", "model.pretrained")}


def test_usage_page_names_every_exit_code() -> None:
    table = (
        (ROOT / "docs" / "usage.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    )
    codes = {
        int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in row.split(",")
    }
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.UserError)
    ]
    # 7: runs of a sweep failed
    assert {kind.exit_code for kind in kinds} | {0, 1, 7, 129, 130, 140, 141, 143} == codes
