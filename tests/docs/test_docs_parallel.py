"""docs/parallel.md: every command parses, every variable is explained."""

import re
import shlex
from pathlib import Path

import pytest

from imagenet_cls.commands.test import evaluation_parser, load_for_testing
from imagenet_cls.commands.train import load_for_training, train_parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "parallel.md").read_text()
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# What runs on ranks; test_docs.py checks the commands of other tools.
COMMAND = re.compile(r"(?:tools/(?:train|test|check_dist)\.py|scripts/\w+\.sh) ")


def commands(text: str) -> list[list[str]]:
    """The words of every command that trains or evaluates, in blocks and in tables."""
    lines = "\n".join(BLOCK.findall(text)).splitlines() + re.findall(
        r"`([^`\n]+)`", BLOCK.sub("", text)
    )
    return [shlex.split(line, comments=True) for line in lines if COMMAND.search(line)]


def without_launcher(words: list[str]) -> list[str]:
    """A command from our script on; the launcher before it is parsed by torch's own parser."""
    from torch.distributed import launch, run

    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*|nohup|&", word)]
    start = next(i for i, word in enumerate(words) if COMMAND.match(f"{word} "))
    if words[0] == "torchrun":
        assert run.parse_args(words[1:]).training_script == words[start]
    elif words[:3] == ["python", "-m", "torch.distributed.launch"]:
        assert launch.parse_args(words[3:]).training_script == words[start]
    else:
        assert words[0] == "mpirun" or words[:start] in (["python"], ["bash"], ["srun", "python"])
    return words[start:]


def test_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in commands(PAGE):
        check_command(words)


def check_command(words: list[str]) -> None:
    script, *rest = without_launcher(words)
    assert (ROOT / script).is_file()
    if script == "scripts/dist_test.sh":
        assert rest.pop(2).isdigit()
        load_for_testing(evaluation_parser().parse_intermixed_args(rest))
        return
    if script.startswith("scripts/slurm_"):
        assert rest[:2] == ["PARTITION", "JOB"]
        rest = rest[2:]
    if script == "scripts/slurm_test.sh":
        load_for_testing(evaluation_parser().parse_intermixed_args(rest))
        return
    if script == "scripts/dist_train.sh":
        assert rest.pop(1).isdigit()
    load_for_training(train_parser().parse_intermixed_args(rest))


def test_every_environment_variable_is_explained() -> None:
    """All that the package reads from launchers and all that the scripts read, and none that
    nothing reads.
    """
    cells = re.findall(r"^\| ((?:`[A-Z_a-z]+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    explained = {name for cell in cells for name in re.findall(r"`([A-Z][A-Z_a-z]+)`", cell)}
    environment = (ROOT / "imagenet_cls" / "parallel" / "environment.py").read_text()
    scripts = "".join(path.read_text() for path in (ROOT / "scripts").glob("*_*.sh"))
    read = {
        name
        for name in re.findall(r'"([A-Z]+_[A-Za-z_]+|RANK)"', environment)
        if "IMAGENET_CLS" not in name
    }
    read |= set(re.findall(r"\$\{([A-Z_]+)[:-]", scripts))
    assert read - explained <= {"BASH_SOURCE"}
    sources = scripts + "".join(path.read_text() for path in (ROOT / "imagenet_cls").rglob("*.py"))
    unread = {name for name in explained if not re.search(rf"\b{name}\b", sources)}
    assert unread <= {"PET_SIGNALS_TO_HANDLE"}  # read by torchrun
