"""Parse and dump YAML: a strict subset that is safe for untrusted input.

Nodes keep the line and the text of a scalar. Aliases (they can expand to gigabytes), tags, merge keys, several
documents, and text beyond the limits below are errors. Differs from PyYAML's YAML 1.1: `1e-4` is a number; `010` (octal
there), `1:30` (90 there) and dates are text; keys of type text keep `yes`, `no`, `on`, `off` as written.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from imagenet_cls.config import keys

MAX_DEPTH = 24
MAX_BYTES = 1 << 19
MAX_KEYS = 2_000  # the schema has about 120
MAX_VALUES = 30_000  # room for a weight of each of ImageNet-21k's 21,841 classes
MAX_DIGITS = 1_000

_PREFIX = "tag:yaml.org,2002:"
STR, INT, FLOAT, BOOL, NULL, SEQ, MAP = (
    _PREFIX + kind for kind in ("str", "int", "float", "bool", "null", "seq", "map")
)
_IMPLICIT = [
    (BOOL, r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    (INT, r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    (
        FLOAT,
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
        "-+.0123456789",
    ),
    (NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
]


class UnreadableError(Exception):
    """Text that a config may not contain. key: the nearest one; line: from 1, None for the whole text."""

    def __init__(self, message: str, line: int | None = None, key: str = ""):
        super().__init__(message)
        self.message, self.line, self.key = message, line, key
        self.others: list[UnreadableError] = []  # further errors in the same text


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's form)

    def __init__(self, text: str):
        super().__init__(text)
        self.depth, self.keys, self.values = 0, 0, 0
        self.path: list[str] = []
        self.key_lines: dict[tuple[int, str], int] = {}
        self.errors: list[UnreadableError] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node. PyYAML passes a mapping's value with the key's node as `index`, and its keys with None."""
        event, in_mapping = self.peek_event(), isinstance(parent, yaml.MappingNode)
        line, is_key = event.start_mark.line + 1, in_mapping and index is None
        self.depth += 1
        self.keys += is_key
        self.values += not is_key
        self.path += [str(index.value)] if in_mapping and not is_key else []
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not allowed; share values by _base_ or ${section.key}, or quote the text"
        elif self.depth > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep"
        elif self.keys > MAX_KEYS or self.values > MAX_VALUES:
            problem = f"more than {MAX_KEYS} keys or {MAX_VALUES} values"
        if problem:
            raise UnreadableError(problem, line, ".".join(self.path))
        if event.tag is not None:
            problem = f"the tag {event.tag.replace(_PREFIX, '!!')} is not allowed; write a plain value"
        elif is_key:
            problem = self._key_problem(id(parent), event, line)
        if problem:  # the rest is still composed, so that all such errors are reported at once
            self.errors.append(UnreadableError(problem, line, ".".join(self.path)))
        node: yaml.Node | None = super().compose_node(parent, index)
        if node is not None and node.tag in (INT, FLOAT) and len(node.value) > MAX_DIGITS:
            raise UnreadableError(f"a number of more than {MAX_DIGITS} digits", line, ".".join(self.path))
        self.depth -= 1
        del self.path[len(self.path) - (in_mapping and not is_key) :]
        return node

    def _key_problem(self, mapping: int, event: yaml.Event, line: int) -> str:
        if not isinstance(event, yaml.ScalarEvent) or not event.value:
            return "a key must be plain text"
        if event.value == "<<":
            return "merge keys (<<) are not allowed; use _base_"
        if (mapping, event.value) in self.key_lines:
            first = self.key_lines[mapping, event.value]
            return f"key {event.value!r} is given twice; the first is in line {first}"
        self.key_lines[mapping, event.value] = line
        return ""


class _Dumper(yaml.SafeDumper):
    # The same resolvers as for reading, so that a text is quoted exactly where it would be read as something else.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # PyYAML would fold Unicode's other line ends into spaces unless they are escaped.
        return self.represent_scalar(STR, text, style='"' if re.search("[\x85\u2028\u2029]", text) else None)

    def represent_list(self, items: list[Any]) -> yaml.SequenceNode:
        return self.represent_sequence(SEQ, items, flow_style=True)  # `[0.08, 1.0]`, on one line


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(list, _Dumper.represent_list)
for _tag, _pattern, _first in _IMPLICIT:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))


def read_text(path: Path) -> str:
    """The text of a file, UTF-8, with or without a byte order mark. Raises UnreadableError, FileNotFoundError."""
    try:
        if path.exists() and not path.is_file():
            raise UnreadableError("is not a regular file")
        if path.stat().st_size > MAX_BYTES:
            raise UnreadableError(f"has {path.stat().st_size} bytes; a config has at most {MAX_BYTES}")
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"can't be read: {error.strerror or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"is not UTF-8 text (byte {error.start}); save it as UTF-8", line) from None


@lru_cache(maxsize=64)
def parse(text: str) -> yaml.Node | None:
    """The node tree of one YAML document; None for an empty one. Raises UnreadableError with the line.

    The tree is cached, so callers must not change it.
    """
    try:
        loader = _Loader(text)
        node: yaml.Node | None = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UnreadableError(f"the character {chr(error.character)!r} is not allowed in YAML", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem))) or "not YAML"
        raise UnreadableError(problem, mark.line + 1 if mark else None) from None
    if loader.errors:
        loader.errors[0].others = loader.errors[1:]
        raise loader.errors[0]
    return node


def value_of(node: yaml.Node, hint: Any = Any) -> Any:
    """The plain value of a node: None, bool, int, float, str, list, dict. Text-typed keys keep what was written."""
    if isinstance(node, yaml.SequenceNode):
        return [value_of(item, keys.element_hint(hint)) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: value_of(item) for key, item in node.value}
    return node.value if keys.is_text(hint) and node.tag != NULL else SafeConstructor().construct_object(node)


def dump(value: Any) -> str:
    """YAML that `parse` and `value_of` read back as the same value. Raises TypeError for other than plain values."""
    try:
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096)
    except yaml.representer.RepresenterError as error:
        raise TypeError(f"a config holds plain values, not {error.args[-1]!r}") from None


def dump_inline(value: Any) -> str:
    """A value as YAML on one line, as the command line takes it after `key=`."""
    return dump([value]).strip()[1:-1]
