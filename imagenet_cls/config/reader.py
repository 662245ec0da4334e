"""YAML text to nodes and back: a small, strict subset that is safe for text from any source.

Nodes keep the line and the text of a scalar. Aliases (they can expand to gigabytes), tags, merge keys, several
documents, and text beyond the limits below are errors. Differs from PyYAML's YAML 1.1: `1e-4` is a number; `010` (octal
there), `1:30` (90 there) and dates are text; keys of type text keep `yes`, `no`, `on`, `off` as written.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

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
_SCALAR_TAGS = (STR, INT, FLOAT, BOOL, NULL)
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
    """Text that a config may not contain. line counts from 1; None: the text as a whole."""

    def __init__(self, message: str, line: int | None = None):
        super().__init__(message)
        self.message = message
        self.line = line


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's form)
    depth, keys, values = 0, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        problem = ""
        if self.check_event(yaml.AliasEvent):
            problem = "aliases (*name) are not allowed; share values by _base_ or ${section.key}, or quote the text"
        self.depth += 1
        if isinstance(parent, yaml.MappingNode) and index is None:
            self.keys += 1
        else:
            self.values += 1
        if self.depth > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep"
        elif self.keys > MAX_KEYS or self.values > MAX_VALUES:
            problem = f"more than {MAX_KEYS} keys or {MAX_VALUES} values"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    # The same resolvers as for reading, so that a text is quoted exactly where it would be read as something else.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # PyYAML would fold Unicode's other line ends into spaces unless they are escaped.
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar(STR, text, style)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)  # `[0.08, 1.0]`, on one line


_Dumper.add_representer(str, _Dumper.represent_str)
for _tag, _pattern, _first in _IMPLICIT:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))


def read_text(path: Path) -> str:
    """The text of a file, UTF-8, with or without a byte order mark. Raises UnreadableError, FileNotFoundError."""
    try:
        if path.is_dir():
            raise UnreadableError("is a folder; name a .yaml file in it")
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
    """The node tree of one YAML document; None for an empty one. Raises UnreadableError with the line at fault.

    The tree is cached, so callers must not change it.
    """
    try:
        return _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UnreadableError(f"the character {chr(error.character)!r} is not allowed in YAML", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem))) or "not YAML"
        raise UnreadableError(problem, mark.line + 1 if mark else None) from None


def key_of(node: yaml.Node) -> str:
    """The text of a mapping's key, as written. Raises UnreadableError for merge keys and for anything but text."""
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
        raise UnreadableError("a key must be plain text", line)
    if node.value == "<<" or not node.value:
        raise UnreadableError("merge keys (<<) are not allowed; use _base_" if node.value else "a key is empty", line)
    return node.value


def value_of(node: yaml.Node, hint: Any = Any) -> Any:
    """The plain value of a node: None, bool, int, float, str, list, dict. Text-typed keys keep what was written.

    Raises UnreadableError for tags and for numbers that are too large to represent.
    """
    line = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and node.tag == SEQ:
        return [value_of(item, keys.element_hint(hint)) for item in node.value]
    if isinstance(node, yaml.MappingNode) and node.tag == MAP:
        found: dict[str, Any] = {}
        for key_node, item in node.value:
            key = key_of(key_node)
            if key in found:
                raise UnreadableError(f"key {key!r} is given twice", key_node.start_mark.line + 1)
            found[key] = value_of(item)
        return found
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
        raise UnreadableError(f"the tag {node.tag.replace(_PREFIX, '!!')} is not allowed; write a plain value", line)
    return _scalar(node.tag, node.value, keys.is_text(hint), line)


def _scalar(tag: str, text: str, keep_text: bool, line: int) -> Any:
    try:
        if tag == NULL:
            return None
        if tag == STR or keep_text:
            return text
        if tag == BOOL:
            return {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}[text.lower()]
        if len(text) > MAX_DIGITS:
            raise ValueError
        lowered = text.lower().replace("_", "")
        return int(lowered, 0) if tag == INT else float(lowered.replace(".inf", "inf").replace(".nan", "nan"))
    except (ValueError, KeyError):
        raise UnreadableError(f"{text[:40]!r} can't be read as {tag.removeprefix(_PREFIX)}", line) from None


def dump(value: Any) -> str:
    """YAML that `parse` and `value_of` read back as the same value. Raises TypeError for other than plain values."""
    try:
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096)
    except yaml.representer.RepresenterError as error:
        raise TypeError(f"a config holds plain values, not {error.args[-1]!r}") from None
