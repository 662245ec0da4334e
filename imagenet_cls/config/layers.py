"""Layers and how they merge: schema defaults < `_base_` files < the file < the command line.

A layer is flat, path -> value, so that each value keeps its origin. Faults are collected and not raised, so that all
of them are reported at once. Types and ranges are checked after merging (`load`, `check`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from imagenet_cls.config import keys, reader
from imagenet_cls.config.origin import DEFAULT, Origin, real_path, shown_path
from imagenet_cls.config.reader import UnreadableError
from imagenet_cls.config.schema import COMPONENT_DEFAULTS, KWARGS_OF, REMOVED
from imagenet_cls.errors import Problem, format_value, shorten
from imagenet_cls.lookup import nearest

BASE = "_base_"
MAX_BASES = 50
"""Limit on the bases of a file, and on the length of a chain of them."""


@dataclass(frozen=True)
class Entry:
    """A value and where it was written."""

    value: Any
    origin: Origin


@dataclass(frozen=True)
class Fault:
    """A problem and its place.

    meant: the key whose value is unknown because of it, "" for that of the problem. is_fatal: whether a whole file is
    missing from the layers, so that further checks make no sense.
    """

    origin: Origin | None
    problem: Problem
    meant: str = ""
    is_fatal: bool = False

    def affects(self, key: str) -> bool:
        """Whether the value of `key` is unknown, as it or a section around it is at fault."""
        wrong = self.meant or self.problem.key
        return bool(wrong) and (key == wrong or key.startswith(f"{wrong}."))


@dataclass
class Layer:
    """The content of one file, or of the command line. sections: where each mentioned section begins."""

    entries: dict[keys.KeyPath, Entry] = field(default_factory=dict)
    sections: dict[keys.KeyPath, Origin] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def add_mapping(self, node: yaml.MappingNode, origin_of: Callable[[int], Origin], path: keys.KeyPath = ()) -> None:
        """Add the content of a mapping at `path`, a section or keyword arguments. origin_of: the origin of a line."""
        for key_node, value_node in node.value:
            at, origin = (*path, key_node.value), origin_of(key_node.start_mark.line + 1)
            hint = keys.leaves().get(at)
            inside_kwargs = any(keys.is_kwargs(keys.leaves().get(at[:n])) for n in range(1, len(at)))
            is_section = at in keys.sections() or keys.is_kwargs(hint)
            if is_section:
                self.sections[at] = origin
            if isinstance(value_node, yaml.MappingNode) and (is_section or (inside_kwargs and value_node.value)):
                self.add_mapping(value_node, origin_of, at)
            elif is_section:
                self.faults.append(Fault(origin, _not_a_section(at, reader.value_of(value_node))))
            elif inside_kwargs or hint is not None or ".".join(at) in REMOVED:
                self.entries[at] = Entry(reader.value_of(value_node, Any if hint is None else hint), origin)
            else:
                message, meant = keys.unknown_key(at)
                self.faults.append(Fault(origin, Problem("", message), ".".join(meant or at)))


def _not_a_section(path: keys.KeyPath, value: Any) -> Problem:
    key = ".".join(path)
    remedy = f"write keys below it, such as {key}.NAME: value"
    if (*path, "name") in keys.leaves() and isinstance(value, str):
        remedy = f"did you mean {key}.name: {value}?"
    return Problem(key, f"{format_value(value)} is given for a section; {remedy}")


def tree_layer(node: yaml.Node | None, origin: Origin) -> Layer:
    """The layer of a mapping that has one origin as a whole: an override, a stored config."""
    layer = Layer()
    assert isinstance(node, yaml.MappingNode)
    layer.add_mapping(node, lambda line: origin)
    return layer


def file_layers(path: Path) -> list[Layer]:
    """The layers of a file: those of its bases, depth first, then its own. A file that is reached twice counts once, at
    its first place. Raises FileNotFoundError if `path` itself is missing."""
    return _FileReader().layers(path, ())


def near_files(path: Path) -> str:
    """A clause that suggests config files with a name like that of a missing one; "" if there are none."""
    folder = path.parent if path.parent.is_dir() else Path("configs")
    names = {file.name: shown_path(file) for file in sorted(folder.glob("*.y*ml"))}
    near = nearest(path.name if path.suffix else f"{path.name}.yaml", names)
    return f"; did you mean {' or '.join(repr(names[name]) for name in near)}?" if near else ""


def _fatal(origin: Origin, message: str, key: str = "") -> Layer:
    return Layer(faults=[Fault(origin, Problem(key, message), is_fatal=True)])


class _FileReader:
    def __init__(self) -> None:
        self.done: set[Path] = set()

    def layers(self, path: Path, chain: tuple[Path, ...]) -> list[Layer]:
        shown = shown_path(path)
        try:
            root = reader.parse(reader.read_text(path))
        except UnreadableError as error:
            found = [error, *error.others]
            return [_fatal(Origin(shown, path, each.line), each.message, each.key) for each in found]
        self.done.add(real_path(path))
        if root is None:  # an empty file is an empty layer
            return []
        if not isinstance(root, yaml.MappingNode):
            return [_fatal(Origin(shown, path), "is not a mapping; write `section:` and, below it, `key: value`")]
        layer, below, own = Layer(), [], []
        for key_node, value_node in root.value:
            if key_node.value == BASE:
                below = self._bases(Origin(shown, path, key_node.start_mark.line + 1), value_node, (*chain, path))
            else:
                own.append((key_node, value_node))
        layer.add_mapping(yaml.MappingNode(reader.MAP, own), lambda line: Origin(shown, path, line))
        return [*below, layer]

    def _bases(self, origin: Origin, node: yaml.Node, chain: tuple[Path, ...]) -> list[Layer]:
        value = reader.value_of(node, str)
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(name, str) and name and "\0" not in name for name in names):
            return [_fatal(origin, f"{BASE}: {format_value(value)} is not a path or a list of paths")]
        if len(names) > MAX_BASES or len(chain) > MAX_BASES:
            return [_fatal(origin, f"{BASE}: more than {MAX_BASES} files")]
        layers: list[Layer] = []
        known = [real_path(file) for file in chain]
        for base in (chain[-1].parent / name for name in names):
            if real_path(base) in known:
                circle = " -> ".join(map(shown_path, [*chain[known.index(real_path(base)) :], base]))
                layers.append(_fatal(origin, f"{BASE}: a circle: {circle}"))
            elif real_path(base) not in self.done:
                try:
                    layers += self.layers(base, chain)
                except FileNotFoundError:
                    layers.append(_fatal(origin, f"{BASE}: no file {shown_path(base)}{near_files(base)}"))
        return layers


def command_line_layer(overrides: Sequence[str]) -> Layer:
    """One layer of all `key.sub=value` arguments. The value is YAML, and nothing after `=` is null.

    Overrides have no order, so a key that is given twice is an error.
    """
    whole = Layer()
    for text in overrides:
        origin = Origin(f"command line {shorten(text, 100)!r}")
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            whole.faults.append(Fault(origin, Problem("", "is not of the form key=value, such as optimizer.lr=0.1")))
            continue
        try:
            node = reader.parse(value) or reader.parse("null")
        except UnreadableError as error:
            message = f"{error.message} (the value is read as YAML: put quotes around text)"
            whole.faults.append(Fault(origin, Problem(f"{key}.{error.key}".rstrip("."), message)))
            continue
        for name in reversed(parts):
            key_node = yaml.ScalarNode(reader.STR, name, yaml.Mark("", 0, 0, 0, None, None))
            node = yaml.MappingNode(reader.MAP, [(key_node, node)])
        part = tree_layer(node, origin)
        for path in part.entries:
            for other in [other for other in whole.entries if other[: len(path)] == path[: len(other)]][:1]:
                message = f"is given twice: {whole.entries[other].origin}; keep one"
                whole.faults.append(Fault(origin, Problem(".".join(path), message)))
        whole.entries.update(part.entries)
        whole.sections.update(part.sections)
        whole.faults += part.faults
    return whole


def _defaults(within: keys.KeyPath, name: Any = None) -> dict[keys.KeyPath, Entry]:
    """The schema's defaults within a section, and those of the component `name` over them."""
    entries = {
        path: Entry(keys.default_of(path), DEFAULT)
        for path, hint in keys.leaves().items()
        if path[: len(within)] == within and not keys.is_kwargs(hint)
    }
    own = COMPONENT_DEFAULTS.get(".".join(within), {}).get(name, {}) if isinstance(name, str) else {}
    for key, values in own.items():
        entries |= {
            (*within, key, kwarg): Entry(value, Origin(f"default of {name}")) for kwarg, value in values.items()
        }
    return entries


def merge(layers: Iterable[Layer]) -> dict[keys.KeyPath, Entry]:
    """The layers merged over the schema's defaults, lowest first."""
    # What a change of a key resets.
    resets: dict[keys.KeyPath, keys.KeyPath] = {(section, "name"): (section,) for section in keys.components()}
    entries = _defaults(())
    for path, within in resets.items():
        entries |= _defaults(within, entries[path].value)
    resets |= {tuple(name.split(".")): tuple(kwargs.split(".")) for name, kwargs in KWARGS_OF.items()}
    for layer in layers:
        for path, within in resets.items():
            new = layer.entries.get(path)
            if new is not None and new.value != entries[path].value:
                entries = {other: entry for other, entry in entries.items() if other[: len(within)] != within}
                entries |= _defaults(within, new.value)
        for path, entry in layer.entries.items():
            _put(entries, path, entry)
    return entries


def _put(entries: dict[keys.KeyPath, Entry], path: keys.KeyPath, entry: Entry) -> None:
    """Set one value. Mappings in kwargs merge; anything else replaces what is above or below its path."""
    below = [other for other in entries if len(other) > len(path) and other[: len(path)] == path]
    if entry.value == {} and below:
        return  # an empty mapping merged into a mapping
    for other in below:
        del entries[other]
    for length in range(2, len(path)):
        entries.pop(path[:length], None)
    entries[path] = entry
