"""Hypothesis strategies that draw a shipped config with a mistake in it, one strategy for each kind of mistake."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helpers import REPOSITORY
from hypothesis import strategies as st

from imagenet_cls.config import keys, reader
from imagenet_cls.config.load import load_config

SHIPPED = sorted(path.relative_to(REPOSITORY / "configs") for path in (REPOSITORY / "configs").rglob("*.yaml"))
RUNNABLE = [path for path in SHIPPED if path.parts[0] != "_base_"]
LETTERS = "abcdefghijklmnopqrstuvwxyz_"


@dataclass(frozen=True)
class Mutation:
    """A changed config. beside: the shipped config whose folder it is written to, as `fuzz.yaml`.

    named: text that a message has to contain. fails: whether loading has to fail; None if it may be valid by chance.
    meant: the key that this message has to suggest.
    """

    beside: Path
    text: bytes
    overrides: tuple[str, ...] = ()
    named: str = ""
    fails: bool | None = True
    meant: str = ""

    def __repr__(self) -> str:  # some texts are long
        return f"Mutation({self.beside}, {self.text[-200:]!r}, {self.overrides}, {self.named!r})"


@cache
def whole(path: Path) -> str:
    return (REPOSITORY / "configs" / path).read_text()


def child_of(path: Path, key: tuple[str, ...], value: str) -> bytes:
    """A config that inherits from a shipped one and sets one key."""
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(key)]
    return "\n".join([f"_base_: {path.name}", *lines]).encode() + f" {value}\n".encode()


def setting(draw: st.DrawFn, key: tuple[str, ...], value: str, **rest: Any) -> Mutation:
    """One key of a shipped config, set in a file that inherits from it or by an override."""
    path = draw(st.sampled_from(RUNNABLE))
    rest = {"named": ".".join(key)} | rest
    if draw(st.booleans()):
        return Mutation(path, child_of(path, key, value), **rest)
    return Mutation(path, f"_base_: {path.name}\n".encode(), (f"{'.'.join(key)}={value}",), **rest)


@cache
def key_nodes(text: str) -> list[tuple[tuple[str, ...], yaml.Node]]:
    """The path of each key of the schema in a text, and its node."""
    found = []

    def walk(node: yaml.Node, path: tuple[str, ...]) -> None:
        for key, value in node.value:
            inner = (*path, key.value)
            if inner in keys.leaves() or inner in keys.sections():
                found.append((inner, key))
            if inner in keys.sections():
                walk(value, inner)

    walk(reader.parse(text) or yaml.MappingNode(reader.MAP, []), ())
    return found


def with_typo(name: str, kind: str, place: int, letter: str) -> str:
    """`name` with one typo at `place`."""
    at = place % len(name)
    if kind == "insert":
        return name[:at] + letter + name[at:]
    if kind == "swap":
        at = min(at, len(name) - 2)
        return name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    return name[:at] + (letter if kind == "replace" else "") + name[at + 1 :]


KINDS_OF_TYPOS = ("insert", "delete", "replace", "swap")


@st.composite
def misspelled(draw: st.DrawFn) -> Mutation:
    path = draw(st.sampled_from(SHIPPED))
    text = whole(path)
    key, node = draw(st.sampled_from(key_nodes(text)))
    typo = (draw(st.sampled_from(KINDS_OF_TYPOS)), draw(st.integers(0, 20)), draw(st.sampled_from(LETTERS)))
    wrong = with_typo(key[-1], *typo)
    siblings = [other[-1] for other in [*keys.leaves(), *keys.sections()] if other[:-1] == key[:-1] and other]
    legal = wrong in siblings or not wrong
    text = text[: node.start_mark.index] + wrong + text[node.end_mark.index :]
    if legal:
        return Mutation(path, text.encode(), fails=None)
    named = f"unknown key '{'.'.join((*key[:-1], wrong))}'"
    return Mutation(path, text.encode(), named=named, meant=f"'{'.'.join(key)}'")


@st.composite
def wrong_type(draw: st.DrawFn) -> Mutation:
    key = draw(st.sampled_from(list(keys.leaves())))
    bare, optional = keys.split_optional(keys.leaves()[key])
    never = ["{a: 1}", "[[1], {b: c}]"]
    if keys.is_kwargs(bare):
        wrong = ["3", "text", "[1, 2]", "true"]
    elif keys.is_text(bare):
        wrong = never + (["fp31", "x y", "1"] if bare is not str else [])
    elif bare is bool:
        wrong = [*never, "1", "0", "maybe", "'true'"]
    elif bare in (int, float):
        wrong = [*never, "many", "true", "[1]", "1 2", "''", "0x", "1e", "--1"] + (["1.5"] if bare is int else [])
    else:
        wrong = ["{a: 1}", "3", "text", "false"]
        wrong += [] if bare == list[str] else ["[x]", "[[1]]", "[null]"]
    return setting(draw, key, draw(st.sampled_from([*wrong, *([] if optional else ["null"])])))


@st.composite
def out_of_range(draw: st.DrawFn) -> Mutation:
    key = draw(st.sampled_from([key for key in keys.leaves() if keys.info(key).allowed is not None]))
    allowed, bare, count = keys.info(key).allowed, keys.split_optional(keys.leaves()[key])[0], keys.info(key).count
    assert allowed is not None
    if bare not in (int, float):
        wrong = [f"[{', '.join(['-1'] * (count or 3))}]"]
        wrong += [f"[{', '.join(['0.5'] * (count + 1))}]", "[]"] if count else []
        wrong += ["[0.9, 0.1]"] if keys.info(key).ascending and count == 2 else []
        return setting(draw, key, draw(st.sampled_from(wrong)))
    far = [allowed.low - 1, allowed.high + 1, -1e-9, -1, 1e300, float(2**64), allowed.low, allowed.high]
    numbers = [int(n) if bare is int else n for n in far if abs(n) < 1e301]
    wrong = [repr(n) for n in numbers if n not in allowed] + ["-" + "9" * 400] + [".nan", ".inf"] * (bare is float)
    return setting(draw, key, draw(st.sampled_from(wrong)))


@st.composite
def missing_value(draw: st.DrawFn) -> Mutation:
    path = draw(st.sampled_from(RUNNABLE))
    if draw(st.booleans()):
        current = load_config(REPOSITORY / "configs" / path).config.optimizer.name
        other = draw(st.sampled_from([name for name in ("sgd", "adamw", "rmsprop", "lamb") if name != current]))
        return Mutation(path, child_of(path, ("optimizer", "name"), other), named="optimizer.lr")
    key = draw(st.sampled_from([key for key, hint in keys.leaves().items() if not keys.is_kwargs(hint)]))
    return setting(draw, key, draw(st.sampled_from(["???", "'???'"])))


@st.composite
def duplicate_key(draw: st.DrawFn) -> Mutation:
    path = draw(st.sampled_from(SHIPPED))
    text = whole(path)
    if draw(st.booleans()):
        key = draw(st.sampled_from([key for key, _ in key_nodes(text) if len(key) == 1]))
        return Mutation(
            path, f"{text}\n{key[0]}: {draw(st.sampled_from(['{}', '1', '', '[]']))}\n".encode(), named=key[0]
        )
    name = ".".join(draw(st.sampled_from([key for key in keys.leaves() if not keys.is_kwargs(keys.leaves()[key])])))
    return Mutation(path, text.encode(), (f"{name}=1", f"{name}={draw(st.integers(0, 3))}"), named=f"{name}: is given")


EXCLUSIVE = {
    "data.val_fraction": ("data.val_fraction=0.1", "data.val=val"),
    "ema.half_life_images": ("ema.half_life_images=9", "ema.decay=0.9"),
    "train.clip_": ("train.clip_norm=1", "train.clip_value=1", "train.clip_agc=1"),
    "model.checkpoint": ("model.checkpoint=a.pth", "model.pretrained=true"),
    "model.freeze": ("model.freeze=[a]", "model.head_only=true"),
    "model.split_bn": ("model.split_bn=true", "model.freeze_bn=true"),
    "eval.resize_px": ("eval.resize_px=100", "eval.crop_px=128"),
    "train.precision": ("train.precision=fp16", "device=cpu"),
    "parallel.backend": ("parallel.backend=nccl", "device=cpu"),
    "augment.splits": ("augment.splits=3", "mix.mixup_alpha=0.2"),
    "data.exclude": ("data.exclude=m.json", "data.name=synthetic"),
    "distill.teacher": ("distill.teacher.checkpoint=a", "distill.teacher.pretrained=true", "distill.kind=hard"),
}


@st.composite
def exclusive_keys(draw: st.DrawFn) -> Mutation:
    path, named = draw(st.sampled_from(RUNNABLE)), draw(st.sampled_from(list(EXCLUSIVE)))
    return Mutation(path, f"_base_: {path.name}\n".encode(), tuple(draw(st.permutations(EXCLUSIVE[named]))), named)


@st.composite
def corrupted(draw: st.DrawFn) -> Mutation:
    """A character added or removed, or the end missing: mostly invalid YAML, sometimes another value."""
    path = draw(st.sampled_from(SHIPPED))
    text = whole(path)
    at = draw(st.integers(0, len(text) - 1))
    pieces = ["[", "]", "{", "}", ":", ": ", ",", '"', "'", "\t", "\n", "\n  ", "- ", "? ", "&a ", "*a", "!", "|", ">"]
    piece = draw(
        st.sampled_from([*pieces, "%", "@", "`", "#", "\x00", "\x07", "\u2028", "\ufeff", "é", "---\n", "..."])
    )
    changed = {"insert": text[:at] + piece + text[at:], "delete": text[:at] + text[at + 1 :], "cut": text[:at]}
    return Mutation(path, changed[draw(st.sampled_from(list(changed)))].encode(), fails=None)


@st.composite
def wrong_encoding(draw: st.DrawFn) -> Mutation:
    path = draw(st.sampled_from(RUNNABLE))
    text = f"{whole(path)}\nimports: [hallöchen]\n"
    encoding = draw(st.sampled_from(["utf-16", "utf-16-le", "utf-32", "latin-1", "cp037", "bytes", "nul"]))
    if encoding == "bytes":
        junk = draw(st.binary(min_size=1, max_size=20))
        return Mutation(path, junk + text.encode(), fails=None)
    if encoding == "nul":
        return Mutation(path, text.replace("\n", "\n\x00", 1).encode(), named="is not allowed in YAML")
    return Mutation(path, text.encode(encoding), named="fuzz.yaml")


@st.composite
def byte_order_mark(draw: st.DrawFn) -> Mutation:
    """A byte order mark changes nothing."""
    path = draw(st.sampled_from(RUNNABLE))
    return Mutation(path, b"\xef\xbb\xbf" + whole(path).encode(), fails=False)


TAGS = [
    "!!python/object/apply:os.system ['touch pwned']",
    "!!python/object/new:os.system ['touch pwned']",
    "!!python/object:pathlib.Path {}",
    "!!python/name:os.system",
    "!!python/module:os",
    "!!python/tuple [1, 2]",
    "!!set {a}",
    "!!binary aGFsbG8=",
    "!!timestamp 2020-01-01",
    "!!omap [a: 1]",
    "!own 3",
    "!!float [1]",
    "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch pwned']",
]


@st.composite
def yaml_tag(draw: st.DrawFn) -> Mutation:
    key = draw(st.sampled_from([*keys.leaves(), *(section for section in keys.sections() if section)]))
    if keys.is_kwargs(keys.leaves().get(key)):
        key = (*key, "a")
    return setting(draw, key, draw(st.sampled_from(TAGS)))


def in_a_row(piece: str, count: int) -> str:
    return ", ".join([piece] * count)


LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{in_a_row(f'*a{i - 1}', 10)}]\n" for i in range(1, 10))

# Texts that would expand to gigabytes or without end, and a part of the error.
HOSTILE = {
    f"seed: {'[' * 100_000}{']' * 100_000}": "nested",
    f"seed: {'[' * 25}{']' * 25}": "nested",
    f"model: {{kwargs: {'{a: ' * 2_000}1{'}' * 2_000}}}": "nested",
    "\n".join(f"{' ' * i}a:" for i in range(400)): "nested",
    "? " * 5_000: "nested",
    "- " * 5_000: "nested",
    LAUGHS: "aliases",
    "seed: &a [*a]": "aliases",
    f"a: &a x\nb: [{in_a_row('*a', 100_000)}]": "aliases",
    f"a: &a x\nb: [{in_a_row('*a', 300_000)}]": "bytes",
    f"# {'x' * (1 << 19)}": "bytes",
    f"imports: [{in_a_row('a', 100_000)}]": "30000 values",
    "\n".join(f"k{i}: 1" for i in range(30_000)): "2000 keys",
    f"model: {{kwargs: {{{', '.join(f'k{i}: 1' for i in range(30_000))}}}}}": "2000 keys",
    f"expect: {{note: {'x' * (1 << 18)}, source: '{'${expect.note}' * 9}'}}": "expands to more than",
    "expect: {note: '${expect.source}', source: '${expect.note}'}": "refers back",
    f"expect: {{note: '{'${a.' * 10_000}'}}": "expect.note",
    "!own {seed: 1}": "the tag !own",
    "!!python/object:pathlib.Path {seed: 1}": "the tag !!python",
    "data: {<<: {root: a}}": "merge keys",
    "x: &x {root: a}\ndata: {<<: *x}": "aliases",
    "_base_: fuzz.yaml": "circle",
    "_base_: [demo.yaml, nowhere.yaml]": "nowhere.yaml",
    '_base_: "\\0"': "is not a path",
    "_base_: ../../../nowhere/passwd": "passwd",
    "_base_: /dev/zero": "not a regular file",
    f"_base_: {'x' * 5_000}.yaml": "name too long",
    f"_base_: [{in_a_row('demo.yaml', 60)}]": "more than 50",
    "_base_: [[demo.yaml]]": "is not a path",
    "_base_: .": "is not a regular file",
    "_base_: here_and_there.yaml": "symbolic links",
    "_base_: chain_0.yaml": "more than 50",
    "---\nseed: 1\n---\nseed: 2": "single document",
    f"optimizer: {{lr: {'9' * 10_000}}}": "optimizer.lr",
    f"seed: 0x{'f' * 10_000}": "seed",
    "optimizer: {lr: 1e99999}": "optimizer.lr",
    f"{'k' * 1_000}: 1": "unknown key",
    f"{'k' * 50_000}: 1": "mapping values are not allowed",
    f"device: '{'c' * 100_000}'": "device",
    f"train: {{precision: {'f' * 100_000}}}": "train.precision",
}


@st.composite
def hostile(draw: st.DrawFn) -> Mutation:
    text = draw(st.sampled_from(list(HOSTILE)))
    return Mutation(Path("demo.yaml"), text.encode(), named=HOSTILE[text])


RESOLVERS = [
    "${oc.env:FUZZ_SECRET}",
    "${oc.env:NOT_SET,${oc.env:FUZZ_SECRET}}",
    "${ oc.env : FUZZ_SECRET }",
    "${env:FUZZ_SECRET}",
    "${oc.decode:${oc.env:FUZZ_SECRET}}",
    "${oc.create:{a: 1}}",
    "${oc.select:expect.note,${oc.env:FUZZ_SECRET}}",
    "a ${oc.env:FUZZ_SECRET} b",
    "\\${oc.env:FUZZ_SECRET}",
    "\\\\${oc.env:FUZZ_SECRET}",
    "${${oc.env:FUZZ_SECRET}}",
    "${nowhere.at_all}",
    "${.note}",
    "${model}",
    "${",
    "${}",
]


@st.composite
def resolver(draw: st.DrawFn) -> Mutation:
    texts = [key for key, hint in keys.leaves().items() if keys.split_optional(hint)[0] is str]
    key = draw(st.sampled_from([*texts, ("model", "kwargs", "a"), ("expect", "note"), ("imports",)]))
    text = draw(st.sampled_from(RESOLVERS))
    quoted = "'" + text + "'" if key != ("imports",) else f"['{text}']"
    return setting(draw, key, quoted)
