"""Read the layers of a config and merge them: `_base_` files < the file < the command line."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from imagenet_cls.config import keys, reader
from imagenet_cls.config.reader import Tree
from imagenet_cls.config.schema import RESETS
from imagenet_cls.errors import ConfigError, Problem
from imagenet_cls.text import format_value, shorten

BASE = "_base_"

_PACKAGE = Path(__file__).resolve().parents[1]
# The shipped configs: a wheel has the folder `configs` of the repository in the package.
CONFIGS = _PACKAGE / "_configs" if (_PACKAGE / "_configs").is_dir() else _PACKAGE.parent / "configs"


@cache
def shipped_configs() -> dict[str, Path]:
    """The shipped configs by their stems, such as `resnet50`, without those in `configs/_base_`."""
    paths = sorted(CONFIGS.rglob("*.yaml"))
    return {path.stem: path for path in paths if BASE not in path.relative_to(CONFIGS).parts}


def find_config(name: str | Path, folder: Path = Path()) -> Path:
    """The path of a config: a file, relative to `folder`, or a shipped one (`configs/resnet50.yaml`
    or `resnet50`).
    """
    path = folder / name
    if os.path.lexists(path) and not path.is_dir():
        return path
    top, *rest = Path(name).parts or ("",)
    shipped = CONFIGS.joinpath(*rest)
    if top == "configs" and (shipped.is_file() or not path.parent.is_dir()):
        return shipped
    return shipped_configs().get(str(name), path)


class Layers:
    """The merged layers of a config.

    errors: a line for each problem of a file or argument that can't be read. removed: the values
    that were dropped because a layer chose another model, optimizer or other component: for each
    key its value, and the key of that choice, such as `model.name`.
    """

    def __init__(self) -> None:
        self.tree = Tree()
        self.errors: list[str] = []
        self.removed: dict[str, tuple[Any, str]] = {}
        self._files: set[str] = set()

    def add(self, layer: Tree) -> None:
        """Merge a layer over the others. A changed name resets its section."""
        before = dict(walk(self.tree))
        new = dict(walk(layer))
        for name, section in RESETS.items():
            old_value = reader.value_of(before.get(name, keys.default_of(name)), as_text=True)
            new_value = reader.value_of(new.get(name, old_value), as_text=True)
            if new_value == old_value:
                continue
            for key, node in flatten(self.tree).items():
                if key != name and f"{key}.".startswith(f"{section}."):
                    self.removed[key] = node, name
            parent, _, last = section.rpartition(".")
            tree = before.get(parent) if parent else self.tree
            if isinstance(tree, Tree):
                tree.pop(last, None)
        _merge(self.tree, layer)

    def removed_value_warnings(self) -> Iterator[Problem]:
        """A warning for each changed name that removed values which no layer gives again."""
        now = flatten(self.tree)
        types = keys.value_types()
        dropped: dict[str, list[str]] = {}
        for key, (node, name) in self.removed.items():
            place = reader.place_of(node)
            if not place or reader.place_of(now.get(key)):
                continue
            value = reader.value_of(node, keys.is_text(types.get(key)))
            applies = now.get(key, keys.default_of(key) if key in types else None)
            if value != applies:
                dropped.setdefault(name, []).append(f"{key} ({place})")
        for name, listed in dropped.items():
            text = f"the new name resets {RESETS[name]}, which drops {', '.join(listed)}"
            yield Problem(name, f"{text}; set the values again that still apply")

    def add_file(self, path: Path, place: str = "") -> None:
        """Add the bases of a file, depth first, then its own content. A file that is reached twice
        counts once. place: where it is named as a base.
        """
        self._files.add(os.path.realpath(path))
        shown = Path(shown_path(path))
        try:
            # A name without a suffix may be a misspelled name of a shipped config.
            tree = reader.read_file(path, shown, () if path.suffix else shipped_configs())
            if not isinstance(tree, Tree | None):
                raise ConfigError(
                    [f"{shown}: is not a mapping; write `section:` and, below it, `key: value`"]
                )
        except ConfigError as error:
            self.errors += [place + line for line in error.lines]
            return
        if tree is not None:  # an empty file is an empty layer
            if BASE in tree:
                self._add_bases(tree.pop(BASE), path.parent)
            self.add(tree)

    def _add_bases(self, node: Any, folder: Path) -> None:
        place = f"{reader.place_of(node)}: {BASE}: "
        value = reader.value_of(node, as_text=True)
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(name, str) and name and not {*"\0\n"} & {*name} for name in names):
            self.errors.append(f"{place}{format_value(value)} is not a path or a list of paths")
            return
        for name in names:
            base = find_config(name, folder)
            if os.path.realpath(base) not in self._files:
                self.add_file(base, place)

    def add_overrides(self, overrides: Sequence[str], source: str = "command line") -> None:
        """Add `key.sub=value` arguments as one layer, also with `SHORT_KEYS`. If a key is given
        twice, the last value is used.

        A key that is set here unsets the keys of the layers below that may not be set beside it.
        source: where the arguments come from, for messages.
        """
        arguments = Tree()
        last: dict[str, str] = {}
        for text in self._expand(overrides):
            key = text.partition("=")[0].strip()
            last.pop(key, None)  # so that the order is that of the last ones
            last[key] = text
        for key, text in last.items():
            place = f"{source} {shorten(text, 100)!r}"
            _, equals, value = text.partition("=")
            names = key.split(".")
            if not equals or not all(names):
                self.errors.append(
                    f"{place}: is not of the form key=value, such as optimizer.lr=0.1"
                )
                continue
            try:
                layer = reader.parse_argument(value, place, keys.value_types().get(key))
                if layer is None:  # no text after the equals sign
                    layer = reader.parse("null", place)
            except ConfigError as error:
                self.errors += [f"{line} (put quotes around text)" for line in error.lines]
                continue
            for depth in reversed(range(len(names))):
                # A section has no place of its own here: another argument may set the wrong key.
                is_section = ".".join(names[:depth]) in keys.sections()
                layer = Tree({names[depth]: layer}, None if is_section else layer.start_mark)
            _merge(arguments, layer)
        self.add(arguments)

    def _expand(self, overrides: Sequence[str]) -> list[str]:
        """Replace `SHORT_KEYS` by keys of the config, and add the values that unset the keys which
        may not be set beside the given ones. `model=` keeps `model.pretrained`, which a new
        `model.name` would reset, unless the overrides choose the weights.
        """
        before = reader.value_of(flatten(self.tree).get("model.pretrained"))
        weights = {"model.pretrained", "model.checkpoint"}
        keeps_pretrained = before and not keys_set(overrides) & weights
        expanded = []
        for text in overrides:
            key, _, value = text.partition("=")
            names = keys.SHORT_KEYS.get(key.strip(), ())
            if value.lstrip().startswith("{"):  # of the section `model`
                names = ()
            expanded += [f"{name}={value}" for name in names] or [text]
            if "model.name" in names and keeps_pretrained:
                expanded.append("model.pretrained=true")
        given = {text.partition("=")[0].strip() for text in expanded}
        for key in keys_set(text for text in expanded if not text.endswith(("=false", "=[]", "="))):
            for other in keys.exclusive_with(key) - given:
                unset = {bool: "false", list[str]: "[]"}.get(keys.value_types()[other], "null")
                expanded.append(f"{other}={unset}")
        return expanded


def keys_set(overrides: Iterable[str]) -> set[str]:
    """The keys of `key=value` arguments, without those that are null."""
    return {text.partition("=")[0].strip() for text in overrides if not text.endswith("=null")}


def walk(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested dictionaries, at all depths."""
    for name, value in tree.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from walk(value, f"{prefix}{name}.")


def flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """The values of nested dictionaries by dotted keys. An empty dictionary is a value."""
    return {key: value for key, value in walk(tree) if not isinstance(value, dict) or not value}


def _merge(tree: Tree, over: Tree) -> None:
    tree.start_mark = over.start_mark or tree.start_mark
    for name, value in over.items():
        if isinstance(value, Tree) and isinstance(tree.get(name), Tree):
            _merge(tree[name], value)
        else:
            tree[name] = value


def shown_path(path: Path) -> str:
    """A path as messages show it: relative to the working directory if it is below, else as it
    is.
    """
    real = Path(os.path.realpath(path))  # Path.resolve fails for circular links
    shown = real.relative_to(Path.cwd()) if real.is_relative_to(Path.cwd()) else path
    return shorten(str(shown), 300)
