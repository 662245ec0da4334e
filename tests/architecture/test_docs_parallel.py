"""docs/parallel.md: both languages have the same content, and every command parses.

Paths, links and options of these pages are looked at by test_docs.py, as of all pages.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from imagenet_cls.commands.test import evaluation_parser, load_for_testing
from imagenet_cls.commands.train import load_for_training, train_parser

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = (ROOT / "docs" / name for name in ("parallel.md", "zh_CN/parallel.md"))
each_page = pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh_CN"])

# What runs on ranks; other tools' commands are looked at by test_docs.py alone.
COMMAND = re.compile(r"(?:tools/(?:train|test|check_dist)\.py|scripts/\w+\.sh) ")


class Section(NamedTuple):
    """What is the same in every language."""

    level: int
    blocks: list[str]
    code: list[str]
    table_columns: list[int]
    list_items: int
    addresses: list[str]


def sections(text: str) -> list[Section]:
    """A page from heading to heading."""
    parts = re.split(r"^(#+) .*$", re.sub(r"^```.*?^```$", _shield, text, flags=re.M | re.S), flags=re.M)
    return [_section(len(marks), body) for marks, body in zip(parts[1::2], parts[2::2], strict=True)]


def _shield(block: re.Match[str]) -> str:
    """A comment in a block is no heading."""
    return re.sub(r"^#", "\0", block.group(), flags=re.M)


def _section(level: int, body: str) -> Section:
    blocks = re.findall(r"^```.*?^```$", body, re.M | re.S)
    prose = re.sub(r"^```.*?^```$", "", body, flags=re.M | re.S)
    rows = re.findall(r"^\|.*\|$", prose, re.M)
    return Section(
        level,
        blocks,
        sorted(re.findall(r"`[^`]+`", prose)),
        [len(re.split(r"(?<!\\)\|", row)) - 2 for row in rows],
        len(re.findall(r"^- ", prose, re.M)),
        sorted(re.findall(r"https?://[^\s)]+", prose)),
    )


def commands(text: str) -> list[list[str]]:
    """The words of every command that trains or evaluates, in blocks and in tables."""
    block_lines = "".join(re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)).splitlines()
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return [shlex.split(line, comments=True) for line in [*block_lines, *inline] if COMMAND.search(line)]


def test_both_languages_say_the_same() -> None:
    english, chinese = sections(ENGLISH.read_text()), sections(CHINESE.read_text())
    assert len(english) == len(chinese) > 8
    for ours, theirs in zip(english, chinese, strict=True):
        assert ours == theirs
    assert sum(len(section.table_columns) for section in english) > 60 and any(s.blocks for s in english)


def _behind_launcher(words: list[str]) -> list[str]:
    """A command up to our entry, by the launcher's own parser where that is torch's; what is behind it is returned."""
    from torch.distributed import launch, run

    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*|nohup|&", word)]
    entry = next(i for i, word in enumerate(words) if COMMAND.match(f"{word} "))
    before = words[:entry]
    if before[0] == "torchrun":
        assert run.parse_args(words[1:]).training_script == words[entry]
    elif before[:3] == ["python", "-m", "torch.distributed.launch"]:
        assert launch.parse_args(words[3:]).training_script == words[entry]
    elif before[0] == "mpirun":
        assert before[-3:] == ["-np", "4", "python"]
    else:
        assert before in (["python"], ["bash"], ["srun", "python"])
    return words[entry:]


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=" ".join(words)[:100]) for words in commands(ENGLISH.read_text())]
)
def test_commands_can_be_carried_out(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's launchers' own parsers and by ours, with the config that they name."""
    monkeypatch.chdir(ROOT)
    script, *rest = _behind_launcher(words)
    assert (ROOT / script).is_file()
    if script == "scripts/dist_train.sh":
        assert rest.pop(1).isdigit()
    elif script == "scripts/slurm_train.sh":
        assert rest[:2] == ["PARTITION", "JOB"]
        rest = rest[2:]
    elif script == "scripts/dist_test.sh":
        assert rest.pop(2).isdigit()
        load_for_testing(evaluation_parser().parse_intermixed_args(rest))
        return
    load_for_training(train_parser().parse_intermixed_args(rest))


def variables_table(text: str) -> set[str]:
    """What stands in the first column of the tables, where that is variables and nothing else."""
    table = re.findall(r"^\| ((?:`[A-Z_a-z]+`(?:, |、)?)+) \|", text, re.M)
    return {name for cell in table for name in re.findall(r"`([A-Z][A-Z_a-z]+)`", cell)}


@each_page
def test_every_environment_variable_is_explained(page: Path) -> None:
    """All that the launchers' environment and the scripts read, and none that nothing reads."""
    told = variables_table(page.read_text())
    place = (ROOT / "imagenet_cls" / "parallel" / "environment.py").read_text()
    scripts = "".join(path.read_text() for path in (ROOT / "scripts").glob("*_*.sh"))
    read = {name for name in re.findall(r'"([A-Z]+_[A-Za-z_]+|RANK)"', place) if not name.startswith("IMAGENET_CLS")}
    read |= set(re.findall(r"\$\{([A-Z_]+)[:-]", scripts))
    assert read - told - {"BASH_SOURCE"} == set()
    everything = "".join(path.read_text() for path in (ROOT / "imagenet_cls").rglob("*.py")) + scripts
    assert {name for name in told if not re.search(rf"\b{name}\b", everything)} <= {
        "PET_SIGNALS_TO_HANDLE"
    }  # torchrun's


def test_a_page_that_fell_behind_is_noticed() -> None:
    text = ENGLISH.read_text()
    whole = sections(text)
    for old, new in [
        ("MASTER_PORT=29500", "MASTER_PORT=29501"),
        ("`strict=False`", "`strict=True`"),
        ("- SyncBN joins ranks", "SyncBN joins ranks"),
        ("| MPI |", "| MPI | |"),
        ("\n## Starting", "\n### Starting"),
        ("arxiv.org/abs/1706.02677", "arxiv.org/abs/1706.02678"),
    ]:
        assert old in text and sections(text.replace(old, new)) != whole, old
