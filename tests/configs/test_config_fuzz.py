"""Mutated shipped configs: each ends in a ConfigError that names the key, or is valid and loads.

Hypothesis draws them deterministically: about 50 by default, about 1,100 with `-m nightly`.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import REPOSITORY
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from imagenet_cls.config import keys
from imagenet_cls.config.load import dump_yaml, load_config
from imagenet_cls.config.schema import Kwargs
from imagenet_cls.errors import ConfigError

SECRET = "hunter2-from-the-environment"
SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CONFIGS = REPOSITORY / "configs"
SHIPPED = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
LETTERS = "abcdefghijklmnopqrstuvwxyz_"
KINDS_OF_TYPOS = ("insert", "delete", "replace", "swap")


@dataclass(frozen=True)
class Mutation:
    """A changed config. beside: the shipped config whose folder it is written to, as `fuzz.yaml`.

    named: text that a message has to contain. fails: whether loading has to fail; None if it may be
    valid by chance.
    """

    beside: Path
    text: str
    overrides: tuple[str, ...] = ()
    named: str = ""
    fails: bool | None = True

    def __repr__(self) -> str:  # some texts are long
        return f"Mutation({self.beside}, {self.text[-200:]!r}, {self.overrides}, {self.named!r})"


def with_typo(name: str, kind: str, place: int, letter: str) -> str:
    """`name` with one typo at `place`."""
    at = place % len(name)
    if kind == "insert":
        return name[:at] + letter + name[at:]
    if kind == "swap":
        at = min(at, len(name) - 2)
        return name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    return name[:at] + (letter if kind == "replace" else "") + name[at + 1 :]


@cache
def key_nodes(text: str) -> list[tuple[str, yaml.Node]]:
    """Each key of the schema in a text, and its node."""
    found = []

    def walk(node: yaml.Node, prefix: str) -> None:
        for name, value in node.value:
            key = prefix + name.value
            if key in keys.value_types() or key in keys.sections():
                found.append((key, name))
            if key in keys.sections():
                walk(value, f"{key}.")

    walk(yaml.compose(text) or yaml.MappingNode("", []), "")
    return found


@st.composite
def misspelled(draw: st.DrawFn) -> Mutation:
    path = draw(st.sampled_from(SHIPPED))
    text = (CONFIGS / path).read_text()
    key, node = draw(st.sampled_from(key_nodes(text)))
    section, dot, name = key.rpartition(".")
    kind, letter = draw(st.sampled_from(KINDS_OF_TYPOS)), draw(st.sampled_from(LETTERS))
    wrong = f"{section}{dot}{with_typo(name, kind, draw(st.integers(0, 20)), letter)}"
    text = text[: node.start_mark.index] + wrong.rpartition(".")[2] + text[node.end_mark.index :]
    if wrong.endswith(".") or not wrong or wrong in keys.value_types() or wrong in keys.sections():
        return Mutation(path, text, fails=None)
    return Mutation(path, text, named=f"{wrong}: unknown key")


@st.composite
def wrong_type(draw: st.DrawFn) -> Mutation:
    """One key, set in a file that inherits from a shipped one or by an override."""
    key = draw(st.sampled_from(list(keys.value_types())))
    hint = keys.value_types()[key]
    bare, optional = keys.split_optional(hint)
    never = ["{a: 1}", "[[1], {b: c}]"]
    if bare == Kwargs:
        wrong = ["3", "text", "[1, 2]", "true"]
    elif bare is str or keys.choices(bare):
        wrong = never + (["fp31", "x y", "1"] if bare is not str else [])
    elif bare is bool:
        wrong = [*never, "1", "0", "maybe", "'true'"]
    elif bare in (int, float):
        wrong = [*never, "many", "true", "[1]", "1 2", "''", "0x", "1e", "--1"] + (
            ["1.5"] if bare is int else []
        )
    elif key == "data.classes":  # a list or a text
        wrong = ["{a: 1}", "[[x]]", "[a, a]"]
    else:
        wrong = ["{a: 1}", "3", "text", "false"]
        wrong += [] if bare == list[str] else ["[x]", "[[1]]", "[null]"]
    value = draw(st.sampled_from([*wrong, *([] if optional else ["null"])]))
    path = draw(st.sampled_from([path for path in SHIPPED if path.parts[0] != "_base_"]))
    # an override of a text is taken as it is
    if str not in keys.members(hint) and draw(st.booleans()):
        return Mutation(path, f"_base_: {path.name}\n", (f"{key}={value}",), named=f"{key}: ")
    lines = [
        f"_base_: {path.name}",
        *(f"{'  ' * depth}{name}:" for depth, name in enumerate(key.split("."))),
    ]
    return Mutation(path, "\n".join(lines) + f" {value}\n", named=f"{key}: ")


@st.composite
def corrupted(draw: st.DrawFn) -> Mutation:
    """A character added or removed, or the end missing: mostly invalid YAML, sometimes another
    value.
    """
    path = draw(st.sampled_from(SHIPPED))
    text = (CONFIGS / path).read_text()
    at = draw(st.integers(0, len(text) - 1))
    pieces = [
        "[",
        "]",
        "{",
        "}",
        ":",
        ": ",
        ",",
        '"',
        "'",
        "\t",
        "\n",
        "\n  ",
        "- ",
        "? ",
        "&a ",
        "*a",
        "!",
        "|",
        ">",
    ]
    piece = draw(
        st.sampled_from(
            [*pieces, "%", "@", "`", "#", "\x00", "\x07", "\u2028", "\ufeff", "é", "---\n", "..."]
        )
    )
    changed = {
        "insert": text[:at] + piece + text[at:],
        "delete": text[:at] + text[at + 1 :],
        "cut": text[:at],
    }
    return Mutation(path, changed[draw(st.sampled_from(list(changed)))], fails=None)


def in_a_row(piece: str, count: int) -> str:
    return ", ".join([piece] * count)


LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{in_a_row(f'*a{i - 1}', 10)}]\n" for i in range(1, 10)
)

# Texts that would expand to gigabytes or without end, and a part of the error.
HOSTILE = {
    f"seed: {'[' * 100_000}{']' * 100_000}": "nested",
    f"model: {{kwargs: {'{a: ' * 2_000}1{'}' * 2_000}}}": "nested",
    "? " * 5_000: "nested",
    LAUGHS: "aliases",
    "seed: &a [*a]": "aliases",
    f"# {'x' * (1 << 19)}": "bytes",
    "expect: {note: '${expect.source}', source: '${expect.note}'}": "has a reference itself",
    "!!python/object:pathlib.Path {seed: 1}": "the tag !!python",
    "data: {<<: {root: a}}": "merge keys",
    "x: &x {root: a}\ndata: {<<: *x}": "aliases",
    "_base_: [demo.yaml, nowhere.yaml]": "nowhere.yaml",
    '_base_: "\\0"': "is not a path",
    "_base_: /dev/zero": "not a regular file",
    f"_base_: {'x' * 5_000}.yaml": "name too long",
    "_base_: .": "is a folder",
    "_base_: here_and_there.yaml": "symbolic links",
    "---\nseed: 1\n---\nseed: 2": "single document",
    f"optimizer: {{lr: {'9' * 10_000}}}": "optimizer.lr",
    "optimizer: {lr: 1e99999}": "optimizer.lr",
    f"{'k' * 1_000}: 1": "unknown key",
    f"device: '{'c' * 100_000}'": "device",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of configs/. The working directory is an empty folder, and has to stay empty."""
    root = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(CONFIGS, root / "configs")
    (root / "configs" / "here_and_there.yaml").symlink_to("here_and_there.yaml")
    (root / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root / "here")
        patch.setenv("FUZZ_SECRET", SECRET)
        yield root / "configs"
        assert list((root / "here").iterdir()) == []


def load_mutations(tree: Path, kind: Callable[[], Any], count: int) -> None:
    """Load `count` mutations of one kind. Fails on any other exception than ConfigError, and if a
    secret shows up.
    """

    @settings(SETTINGS, max_examples=count)
    @given(mutation=kind())
    def load_each(mutation: Mutation) -> None:
        file = tree / mutation.beside.parent / "fuzz.yaml"
        file.write_text(mutation.text)
        try:
            shown = dump_yaml(load_config(file, mutation.overrides).config)
        except ConfigError as error:
            shown = str(error)
            assert all("\n" not in line and len(line) < 1000 for line in error.lines), error.lines
            assert mutation.named in shown, shown
        else:
            assert mutation.fails is not True, "this must not load"
        assert SECRET not in shown

    load_each()


KINDS = {misspelled: 420, wrong_type: 340, corrupted: 320}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mutated_config_loads_or_names_the_key(tree: Path, kind: Callable[[], Any]) -> None:
    load_mutations(tree, kind, 16)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_many_mutated_configs_load_or_name_the_key(tree: Path, kind: Callable[[], Any]) -> None:
    load_mutations(tree, kind, KINDS[kind])


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20])
def test_hostile_config_is_an_error(tree: Path, text: str) -> None:
    (tree / "fuzz.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(tree / "fuzz.yaml")
    assert HOSTILE[text] in str(raised.value)
    assert all("\n" not in line and len(line) < 1000 for line in raised.value.lines)
