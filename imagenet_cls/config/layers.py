"""Layers and how they merge: schema defaults < `_base_` files < the file < the command line.

Owns which keys a layer may hold, inheritance by `_base_`, command-line words, and the reset of a component's section
when its name changes. Does not look at values: types are `load`'s, ranges `check`'s. Called by `load` only.

A layer is flat, a dictionary from path to value, so that every value keeps its own origin and merging is putting one
dictionary over another. Nothing is raised here for what is wrong in a layer; it is noted in `Findings`, so that all of
it is reported at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from imagenet_cls.config import keys, reader
from imagenet_cls.config.origin import Origin, format_line, real_path, shown_path
from imagenet_cls.config.reader import UnreadableError
from imagenet_cls.config.schema import COMPONENT_DEFAULTS, KWARGS_OF
from imagenet_cls.errors import Problem, format_value
from imagenet_cls.lookup import nearest

BASE = "_base_"
DEFAULT = Origin("default")
MAX_BASES = 50
"""How many files a file may name as its bases, and how long a chain of them may be."""


@dataclass(frozen=True)
class Entry:
    """One value and where it was written."""

    value: Any
    origin: Origin


@dataclass
class Layer:
    """What one file, or the command line, says. sections: where each section that it mentions begins."""

    entries: dict[keys.KeyPath, Entry] = field(default_factory=dict)
    sections: dict[keys.KeyPath, Origin] = field(default_factory=dict)


@dataclass
class Findings:
    """What is wrong so far, one line each.

    doubtful: dotted keys whose value nobody can rely on, since they or a misspelling of them are among the problems;
    rules about them are not checked, or one mistake would be reported twice. unreadable: whether a whole file or word
    is missing from the layers, so that looking further makes no sense.
    """

    lines: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    unreadable: bool = False

    def in_doubt(self, key: str) -> bool:
        """Whether `key`, or a section around it, is among the doubtful."""
        return any(key == doubtful or key.startswith(doubtful + ".") for doubtful in self.doubtful)

    def add(self, origin: Origin | None, key: str, message: str, doubtful: str = "") -> None:
        """Note a problem with `key`; `doubtful` where another key than that is put in doubt."""
        self.lines.append(format_line(origin, Problem(key, message)))
        self.doubtful.add(doubtful or key)


def _may_be_a_path(text: str) -> bool:
    return bool(text) and "\0" not in text


def near_files(path: Path) -> str:
    """A clause that offers the config files most like a path that does not exist; "" where there are none."""
    folder = path.parent if path.parent.is_dir() else Path("configs")
    there = sorted(folder.glob("*.y*ml")) if folder.is_dir() else []
    near = nearest(path.name if path.suffix else f"{path.name}.yaml", [file.name for file in there])
    if near:
        return f"; did you mean {' or '.join(repr(shown_path(folder / name)) for name in near)}?"
    return f"; in {shown_path(folder)} there are: {', '.join(file.name for file in there[:8])}" if there else ""


class _Walker:
    """Puts the nodes of one text into a layer. `origin_at` tells the origin of a line of that text."""

    def __init__(self, layer: Layer, findings: Findings, origin_at: Callable[[int], Origin]):
        self.layer = layer
        self.findings = findings
        self.origin_at = origin_at

    def walk(self, node: yaml.MappingNode, path: keys.KeyPath) -> None:
        """Take in a mapping that stands at `path`: a section, or keyword arguments at any depth."""
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = ".".join(path)
            try:
                name = reader.key_of(key_node)
                if name in seen:
                    raise UnreadableError(f"key {name!r} is given twice; the first is in line {seen[name]}", line)
                seen[name] = line
                key = ".".join((*path, name))
                self._take((*path, name), value_node, self.origin_at(line))
            except UnreadableError as error:
                self.findings.add(self.origin_at(error.line or line), key, error.message)

    def _take(self, path: keys.KeyPath, node: yaml.Node, origin: Origin) -> None:
        hint = keys.leaves().get(path)
        inside_kwargs = any(keys.is_kwargs(keys.leaves().get(path[:length])) for length in range(1, len(path)))
        if path in keys.sections() or keys.is_kwargs(hint):
            self.layer.sections[path] = origin
            if isinstance(node, yaml.MappingNode) and node.tag == reader.MAP:
                self.walk(node, path)
            else:
                self._not_a_section(path, reader.value_of(node), origin)
        elif inside_kwargs and isinstance(node, yaml.MappingNode) and node.tag == reader.MAP and node.value:
            self.walk(node, path)
        elif path in keys.REMOVED:
            self.layer.entries[path] = Entry(reader.value_of(node, str), origin)
        elif inside_kwargs or hint is not None:
            self.layer.entries[path] = Entry(reader.value_of(node, hint if hint is not None else Any), origin)
        else:
            message, meant = keys.unknown_key(path)
            self.findings.add(origin, "", message, doubtful=".".join(meant or path))

    def _not_a_section(self, path: keys.KeyPath, value: Any, origin: Origin) -> None:
        key = ".".join(path)
        if value is None:
            remedy = "write keys below it, or leave it out"
        elif (*path, "name") in keys.leaves() and isinstance(value, str):
            remedy = f"did you mean {key}.name: {value}?"
        else:
            remedy = f"it holds keys: {key}.NAME: value"
        self.findings.add(origin, key, f"{format_value(value)} stands where a section is expected; {remedy}")


def tree_layer(node: yaml.MappingNode, origin: Origin, findings: Findings) -> Layer:
    """The layer of a node tree that has one origin as a whole: a command-line word, a stored config."""
    layer = Layer()
    _Walker(layer, findings, lambda line: origin).walk(node, ())
    return layer


def file_layers(path: Path, findings: Findings) -> list[Layer]:
    """The layers of a file: those of its bases, depth first, then its own. A file that is reached twice counts once, at
    its
    first place. Raises FileNotFoundError where `path` itself is not there; all else goes to `findings`."""
    return _FileReader(findings).layers(path, ())


class _FileReader:
    def __init__(self, findings: Findings):
        self.findings = findings
        self.done: set[Path] = set()

    def layers(self, path: Path, chain: tuple[Path, ...]) -> list[Layer]:
        origin = Origin(shown_path(path), path)
        try:
            root = reader.parse(reader.read_text(path))
        except UnreadableError as error:
            self._unreadable(Origin(origin.layer, path, error.line), error.message)
            return []
        self.done.add(real_path(path))
        if root is None:  # an empty file says nothing, which is allowed: comments only, say
            return []
        if not isinstance(root, yaml.MappingNode) or root.tag != reader.MAP:
            self._unreadable(origin, "holds no mapping; a config is made of `section:` and, below it, `key: value`")
            return []
        base_nodes = [pair for pair in root.value if getattr(pair[0], "value", None) == BASE]
        layers = []
        for key_node, value_node in base_nodes[:1]:
            layers += self._bases(path, key_node.start_mark.line + 1, value_node, (*chain, path))
        own = yaml.MappingNode(reader.MAP, [pair for pair in root.value if pair not in base_nodes[:1]])
        layer = Layer()
        _Walker(layer, self.findings, lambda line: Origin(origin.layer, path, line)).walk(own, ())
        return [*layers, layer]

    def _bases(self, path: Path, line: int, node: yaml.Node, chain: tuple[Path, ...]) -> list[Layer]:
        origin = Origin(shown_path(path), path, line)
        try:
            value = reader.value_of(node, str)
        except UnreadableError as error:
            self._unreadable(origin, error.message)
            return []
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) and _may_be_a_path(name) for name in names):
            self._unreadable(origin, f"{BASE}: {format_value(value)} is not a path or a list of paths")
            return []
        if len(names) > MAX_BASES or len(chain) > MAX_BASES:
            self._unreadable(origin, f"{BASE}: more than {MAX_BASES} files; let one stand for several")
            return []
        layers: list[Layer] = []
        known = [real_path(file) for file in chain]
        for name in names:
            base = path.parent / name
            if real_path(base) in known:
                circle = [*chain[known.index(real_path(base)) :], base]
                self._unreadable(origin, f"{BASE}: a circle: {' -> '.join(shown_path(file) for file in circle)}")
            elif real_path(base) not in self.done:
                try:
                    layers += self.layers(base, chain)
                except FileNotFoundError:
                    self._unreadable(origin, f"{BASE}: no file {shown_path(base)}{near_files(base)}")
        return layers

    def _unreadable(self, origin: Origin, message: str) -> None:
        self.findings.add(origin, "", message)
        self.findings.unreadable = True


def command_line_layer(words: Sequence[str], findings: Findings) -> Layer:
    """One layer of all `key.sub=value` words; values are YAML, and nothing behind `=` is null.

    Words have no order, so that a key that is given twice is an error and not a matter of which came last.
    """
    whole = Layer()
    for word in words:
        origin = Origin(f"command line {word!r}" if len(word) <= 100 else f"command line {word[:97] + '...'!r}")
        key, equals, text = word.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            findings.add(origin, "", "is not of the form key=value, such as optimizer.lr=0.1")
            continue
        try:
            node = reader.parse(text) or yaml.ScalarNode(reader.NULL, "", yaml.Mark("", 0, 0, 0, None, None))
        except UnreadableError as error:
            findings.add(origin, key, f"{error.message} (the value is read as YAML: put quotes around text)")
            continue
        for name in reversed(parts):
            key_node = yaml.ScalarNode(reader.STR, name, node.start_mark)
            node = yaml.MappingNode(reader.MAP, [(key_node, node)], node.start_mark)
        assert isinstance(node, yaml.MappingNode)  # `parts` is never empty
        part = tree_layer(node, origin, findings)
        for path, entry in part.entries.items():
            rivals = [other for other in whole.entries if other[: len(path)] == path[: len(other)]]
            if rivals:
                findings.add(origin, ".".join(path), f"is given twice: {whole.entries[rivals[0]].origin}; keep one")
            else:
                whole.entries[path] = entry
        whole.sections.update(part.sections)
    return whole


@dataclass
class Merged:
    """All layers, one over the other.

    resets: for a section whose component changed, the names before and after. heights: which layer wrote a value,
    counted from 1 upwards; what is at a default is not among them.
    """

    entries: dict[keys.KeyPath, Entry]
    sections: dict[keys.KeyPath, Origin]
    resets: dict[str, tuple[str, str]]
    heights: dict[keys.KeyPath, int] = field(default_factory=dict)


def _component_entries(section: str, name: Any) -> dict[keys.KeyPath, Entry]:
    """The defaults of a component's section: the schema's, and over them the component's own."""
    entries = {
        path: Entry(keys.default_of(path), DEFAULT)
        for path, hint in keys.leaves().items()
        if path[0] == section and not keys.is_kwargs(hint)
    }
    own = COMPONENT_DEFAULTS.get(section, {}).get(name, {}) if isinstance(name, str) else {}
    origin = Origin(f"default of {name}")
    for key, value in own.items():
        if isinstance(value, dict):
            entries.update({(section, key, kwarg): Entry(item, origin) for kwarg, item in value.items()})
        else:
            entries[(section, key)] = Entry(value, origin)
    return entries


def merge(layers: Iterable[Layer]) -> Merged:
    """Put the layers over the schema's defaults, lowest first."""
    merged = Merged({}, {}, {})
    for path in keys.leaves():
        if len(path) == 1 or path[0] not in keys.components():
            merged.entries[path] = Entry(keys.default_of(path), DEFAULT)
    for section in keys.components():
        merged.entries.update(_component_entries(section, keys.default_of((section, "name"))))
    heights: dict[keys.KeyPath, int] = {}
    for height, layer in enumerate(layers, 1):
        heights |= dict.fromkeys(layer.entries, height)
        for section in keys.components():
            _reset_if_renamed(merged, layer, section)
        for name, kwargs in KWARGS_OF.items():
            _forget_kwargs_if_renamed(merged, layer, tuple(name.split(".")), tuple(kwargs.split(".")))
        for path, entry in layer.entries.items():
            _put(merged.entries, path, entry)
        merged.sections.update(layer.sections)
    schema_order = {path: place for place, path in enumerate(keys.leaves())}
    in_order = sorted(merged.entries, key=lambda path: schema_order.get(path, schema_order.get(path[:2], 0)))
    merged.entries = {path: merged.entries[path] for path in in_order}
    merged.heights = {path: heights[path] for path in in_order if not merged.entries[path].origin.is_default}
    return merged


def _reset_if_renamed(merged: Merged, layer: Layer, section: str) -> None:
    path = (section, "name")
    before, new = merged.entries[path].value, layer.entries.get(path)
    if new is None or new.value == before:
        return
    kept = {other: entry for other, entry in merged.entries.items() if other[0] != section}
    merged.entries = {**kept, **_component_entries(section, new.value)}
    merged.resets[section] = (str(before), str(new.value))


def _forget_kwargs_if_renamed(merged: Merged, layer: Layer, name: keys.KeyPath, kwargs: keys.KeyPath) -> None:
    new = layer.entries.get(name)
    if new is not None and new.value != merged.entries[name].value:
        for path in [path for path in merged.entries if path[: len(kwargs)] == kwargs]:
            del merged.entries[path]
        merged.entries[kwargs] = Entry(keys.default_of(kwargs), DEFAULT)


def _put(entries: dict[keys.KeyPath, Entry], path: keys.KeyPath, entry: Entry) -> None:
    """Set one value. Dicts in kwargs merge; anything else replaces what stood there, above or below."""
    below = [other for other in entries if len(other) > len(path) and other[: len(path)] == path]
    if entry.value == {} and below:
        return  # an empty dict merged into a dict
    for other in below:
        del entries[other]
    for length in range(2, len(path)):
        entries.pop(path[:length], None)
    entries[path] = entry
