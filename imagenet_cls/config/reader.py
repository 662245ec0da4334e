"""Parse and dump YAML: a strict subset that is safe for untrusted input.

Values stay nodes, which know their file, line and text, until the type of their key is known.
Aliases (they can expand to gigabytes), tags and several documents are errors. Unlike in YAML 1.1
`1e-4` is a number; `010`, `1:30`, dates and integers of 1000 digits are text.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from imagenet_cls.config import keys
from imagenet_cls.errors import ConfigError
from imagenet_cls.lookup import nearest

MAX_DEPTH = 24  # of mappings and lists; deeper ones would exceed Python's stack
_PREFIX = "tag:yaml.org,2002:"
_STR, _NULL, _SEQ = (_PREFIX + kind for kind in ("str", "null", "seq"))
_FLOAT = (
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
    r"|\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN"
)
_NULLS = ("~", "null", "Null", "NULL", "")
_IMPLICIT = [
    (
        "bool",
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        "yYnNtTfFoO",
    ),
    ("int", r"[-+]?(?:0|[1-9][0-9_]{0,998}|0x[0-9a-fA-F]{1,998})", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", "|".join(_NULLS), ["~", "n", "N", ""]),
]


class Tree(dict[str, Any]):
    """A mapping whose values are trees, nodes or plain values. start_mark: where it is written, as
    of a node.
    """

    def __init__(self, content: Any = (), start_mark: yaml.Mark | None = None):
        super().__init__(content)
        self.start_mark = start_mark


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's form)

    def __init__(self, text: str, name: Path | str):
        super().__init__(text)
        self.name = name
        self.problems: list[str] = []  # the rest of the text is read in spite of them
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        place = place_of(event)
        if self.depth > MAX_DEPTH:
            raise ConfigError([f"{place}: nested more than {MAX_DEPTH} deep"])
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                [f"{place}: aliases (*name) are not allowed; use _base_ or ${{section.key}}"]
            )
        if event.tag is not None:
            self.problems.append(
                f"{place}: the tag {event.tag.replace(_PREFIX, '!!')} is not allowed"
            )
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.MappingNode):
            self.check_keys([key for key, _ in node.value])
        return node

    def check_keys(self, keys: list[yaml.Node]) -> None:
        places: dict[str, str] = {}
        for key in keys:
            place = place_of(key)
            name = key.value
            if not isinstance(key, yaml.ScalarNode) or not name:
                self.problems.append(f"{place}: a key must be plain text")
            elif name in places:
                self.problems.append(
                    f"{place}: key {name!r} is given twice, first in {places[name]}"
                )
            else:
                places[name] = place


class _Dumper(yaml.SafeDumper):
    # The same resolvers as for reading, so that a text is quoted exactly where it would be read as
    # something else.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # PyYAML would fold Unicode's line ends into spaces unless they are escaped.
        has_line_end = re.search("[\n\x85\u2028\u2029]", text)
        return self.represent_scalar(_STR, text, style='"' if has_line_end else None)

    def represent_list(self, items: list[Any]) -> yaml.SequenceNode:
        return self.represent_sequence(_SEQ, items, flow_style=True)  # `[0.08, 1.0]`, on one line


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_representer(list, _Dumper.represent_list)
for _kind, _pattern, _first in _IMPLICIT:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _kind, re.compile(f"^(?:{_pattern})$"), list(_first))


def read_file(path: Path, shown: Path, names: Iterable[str] = ()) -> Any:
    """`parse` for a file. shown: its path in messages. names: suggestions, besides the files and
    folders beside a missing one.
    """
    try:
        if path.is_dir():
            is_run = (path / "config.yaml").is_file()
            hint = "; give a config such as configs/resnet50.yaml"
            if is_run:
                hint = f"; for the config of that run: {shown}/config.yaml"
            raise ConfigError([f"{shown}: is a folder{hint}"])
        if path.exists() and not path.is_file():  # a FIFO would be waited for
            raise ConfigError([f"{shown}: is not a regular file"])
        return parse(path.read_text("utf-8-sig"), shown)
    except UnicodeDecodeError as error:
        raise ConfigError([f"{shown}: is not UTF-8 text (byte {error.start})"]) from None
    except OSError as error:
        near = ""
        if isinstance(error, FileNotFoundError):
            pattern = "*.y*ml" if path.suffix in (".yaml", ".yml") else "*"
            beside = sorted(file.name for file in path.parent.glob(pattern))
            found = [
                repr(str(shown.parent / name) if name in beside else name)
                for name in nearest(path.name, [*beside, *names])
            ]
            near = "; give a config such as configs/resnet50.yaml, or a dataset for training"
            if found:
                near = f"; did you mean {' or '.join(found)}?"
        raise ConfigError([f"{shown}: {error.strerror or error}{near}"]) from None


def parse(text: str, place: Path | str) -> Any:
    """A YAML document as a `Tree`, a node, or None if it is empty. place: the path of a file, or
    the text of an argument. Raises ConfigError.
    """
    return to_tree(_compose(text, place))


def parse_argument(text: str, place: str, hint: Any) -> Any:
    """The value of a command-line argument, as `parse`. hint: the type of its key.

    A text is taken as it is, except for null and what begins with a quotation mark, or with a
    bracket where a list is allowed.
    """
    word = text.strip()
    starts = ("'", '"', "[") if list[str] in keys.members(hint) else ("'", '"')
    if keys.is_text(hint) and word not in _NULLS and not word.startswith(starts):
        text = dump_inline(text)
    return parse(text, place)


@lru_cache(maxsize=64)
def _compose(text: str, place: Path | str) -> yaml.Node | None:
    try:
        loader = _Loader(text, place)
        node: yaml.Node | None = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            [f"{place}: the character {chr(error.character)!r} is not allowed"]
        ) from None
    except yaml.MarkedYAMLError as error:
        problem = " ".join(filter(None, (error.context, error.problem))) or "not YAML"
        raise ConfigError(
            [f"{place_of(error.problem_mark or error.context_mark)}: {problem}"]
        ) from None
    if loader.problems:
        raise ConfigError(loader.problems)
    return node


def to_tree(value: Any) -> Any:
    """A mapping, of nodes or of plain values, as a `Tree`; any other value as it is."""
    if isinstance(value, yaml.MappingNode):
        return Tree(((key.value, to_tree(item)) for key, item in value.value), value.start_mark)
    if isinstance(value, dict):
        return Tree((key, to_tree(item)) for key, item in value.items())
    return value


def place_of(value: Any) -> str:
    """Where a tree, node, event or mark is: `configs/x.yaml:12` or `command line 'seed=1'`; "" for
    plain values.
    """
    mark = getattr(value, "start_mark", value)
    if not isinstance(mark, yaml.Mark):
        return ""
    return f"{mark.name}:{mark.line + 1}" if isinstance(mark.name, Path) else mark.name


def value_of(value: Any, as_text: bool = False) -> Any:
    """The plain value of a tree or node: None, bool, int, float, str, list, dict. as_text: keep
    scalars as written.
    """
    if isinstance(value, dict):
        return {key: value_of(item) for key, item in value.items()}
    if isinstance(value, yaml.MappingNode):
        return {key.value: value_of(item) for key, item in value.value}
    if isinstance(value, yaml.SequenceNode):
        return [value_of(item, as_text) for item in value.value]
    if isinstance(value, yaml.ScalarNode):
        if as_text and value.tag != _NULL:
            return value.value
        return SafeConstructor().construct_object(value)
    return value


def dump(value: Any, width: int = 4096) -> str:
    """YAML that is read back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def dump_inline(value: Any) -> str:
    """A value as YAML on one line, as the command line takes it after `key=`."""
    return dump([value], 1 << 20).strip()[1:-1]
