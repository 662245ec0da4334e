"""docs/coming_from.md: our column names only what exists, and agrees with our error messages."""

import re
import shlex
from pathlib import Path

import pytest
from test_docs import ROOT, options_of

from imagenet_cls.config.keys import instead_of_option, value_types
from imagenet_cls.config.load import load_config

TABLE_ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.M)
CODE = re.compile(r"`([^`]+)`")
KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
ROWS = [
    (CODE.findall(theirs), CODE.findall(ours))
    for theirs, ours in TABLE_ROW.findall((ROOT / "docs" / "coming_from.md").read_text())
    if "`" in ours
]
# Their names that are also names of keys here, with another meaning.
OTHER_MEANING = {"checkpoint", "name"}


def is_key(name: str) -> bool:
    """Whether a key of the schema has the name, or is a mapping that holds it."""
    return name in value_types() or any(
        name.startswith(f"{key}.") for key in value_types() if key.endswith("kwargs")
    )


def check_command(words: list[str]) -> None:
    """The script exists, `--help` lists the options, and the keys exist."""
    script = Path(words[1])
    assert (ROOT / script).is_file()
    tool = script.stem if script.suffix == ".py" else script.stem.rpartition("_")[2]
    assert {word for word in words if word.startswith("--")} <= options_of(tool)
    for word in words[2:]:
        assert "=" not in word or is_key(word.partition("=")[0]), word


def check_words(words: list[str]) -> None:
    """Each word is an option of train.py or test.py, perhaps with its value, a key, or an override
    that a config takes.
    """
    options = options_of("train") | options_of("test")
    overrides = [word for word in words if "=" in word and "my_module" not in word]
    load_config("configs/resnet50.yaml", overrides)
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("--"):
            assert word in options
        elif not before.startswith("--"):
            assert is_key(word.partition("=")[0]), word


def test_ours_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for _, ours in ROWS:
        for text in ours:
            words = shlex.split(text)
            if words[0] in ("python", "bash"):
                check_command(words)
            elif text.startswith("--") or "." in text:
                check_words(words)


def test_error_messages_name_the_same_keys() -> None:
    """What train.py suggests for an unknown option is in the row of this option."""
    for theirs, ours in ROWS:
        for text in theirs:
            name = re.split(r"[ =(]", text)[0].lstrip("-").rpartition(".")[2]
            suggested = None if name in OTHER_MEANING else instead_of_option(name)
            for key in KEY.findall(suggested or "")[:1]:
                assert key in " ".join(ours), (text, suggested)
