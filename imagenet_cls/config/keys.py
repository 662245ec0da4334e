"""The keys of the schema with their types, defaults and metadata."""

import dataclasses
import types
import typing
from functools import cache
from typing import Any, Literal

from imagenet_cls.config.fields import KeyInfo
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import format_value
from imagenet_cls.lookup import nearest

KeyPath = tuple[str, ...]
"""The parts of a key. Not the dotted text, since names in kwargs may contain dots."""


@cache
def sections() -> dict[KeyPath, type]:
    """The dataclass of every section, by its path; `()` is the whole config."""
    found: dict[KeyPath, type] = {}

    def add(path: KeyPath, section: type) -> None:
        found[path] = section
        for name, hint in typing.get_type_hints(section).items():
            if dataclasses.is_dataclass(hint):
                add((*path, name), typing.cast(type, hint))

    add((), Config)
    return found


@cache
def leaves() -> dict[KeyPath, Any]:
    """The type hint of every key that holds a value, in the order of the schema; `kwargs` are `dict[str, Any]`."""
    in_order = [*(item for item in sections().items() if item[0]), ((), Config)]
    return {
        (*path, name): hint
        for path, section in in_order
        for name, hint in typing.get_type_hints(section).items()
        if not dataclasses.is_dataclass(hint)
    }


@cache
def components() -> tuple[str, ...]:
    """The sections that choose something by `name` and pass it `kwargs`: a change of the name resets such a section."""
    return tuple(
        path[0] for path in sections() if len(path) == 1 and {(*path, "name"), (*path, "kwargs")} <= set(leaves())
    )


@cache
def _field(path: KeyPath) -> "dataclasses.Field[Any]":
    return next(field for field in dataclasses.fields(sections()[path[:-1]]) if field.name == path[-1])


def info(path: KeyPath) -> KeyInfo:
    """The metadata of a key or section."""
    return _field(path).metadata.get("info", KeyInfo())


@cache
def keys_with(flag: Literal["per_machine", "not_recipe"]) -> frozenset[str]:
    """The dotted keys with a flag, set on the key or on an enclosing section.

    per_machine: the machines of a run may differ in it. not_recipe: it is not compared on resume, since it changes
    speed, devices or reporting, not results.
    """

    def has(found: KeyInfo) -> bool:
        return found.per_machine if flag == "per_machine" else not found.recipe

    return frozenset(".".join(path) for path in leaves() if any(has(info(path[:n])) for n in range(1, len(path) + 1)))


def default_of(path: KeyPath) -> Any:
    """The schema's default of a leaf; omegaconf's `???` for `optimizer.lr`, which has none."""
    field = _field(path)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def is_kwargs(hint: Any) -> bool:
    """Whether a leaf holds keyword arguments, which merge key by key."""
    return typing.get_origin(hint) is dict


def split_optional(hint: Any) -> tuple[Any, bool]:
    """A hint without its `| None`, and whether it had one."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        rest = [part for part in typing.get_args(hint) if part is not types.NoneType]
        return rest[0], len(rest) < len(typing.get_args(hint))
    return hint, False


def is_text(hint: Any) -> bool:
    """Whether a key holds text or one of several words, so that a scalar is kept as written (`no`, `1e3`)."""
    bare, _ = split_optional(hint)
    return bare is str or typing.get_origin(bare) is Literal


def element_hint(hint: Any) -> Any:
    """The type of a list's items; `Any` for other types."""
    bare, _ = split_optional(hint)
    return typing.get_args(bare)[0] if typing.get_origin(bare) is list else Any


def describe_type(hint: Any) -> str:
    """A type as text for an error: `a number`, `one of auto, fp32`, `true or false or null`."""
    bare, optional = split_optional(hint)
    plain = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    lists = {float: "a list of numbers", int: "a list of whole numbers", str: "a list of texts"}
    if typing.get_origin(bare) is Literal:
        text = f"one of {', '.join(map(str, typing.get_args(bare)))}"
    elif is_kwargs(bare):
        text = "a mapping `{name: value}`"
    else:
        text = plain[bare] if bare in plain else lists[element_hint(bare)]
    return f"{text} or null" if optional else text


def unknown_key(path: KeyPath) -> tuple[str, KeyPath | None]:
    """The message for a key that does not exist, and the suggested key, if any.

    Suggests similar names of the same section, else keys of the same name in other sections (`lr` at the top level:
    `optimizer.lr`); without either, lists the section's keys.
    """
    section, name = path[:-1], path[-1]
    message = f"unknown key {format_value('.'.join(path))}"
    if (*section, *name.split(".")) in leaves():
        nested = ": {".join(name.split(".")) + ": ..." + "}" * name.count(".")
        return f"{message}; dots are for the command line, in a file write {nested}", None
    names = [field.name for field in dataclasses.fields(sections()[section])]
    found = [(*section, near) for near in nearest(name, names)]
    found = found or [known for known in [*leaves(), *sections()] if known and known[-1] == name][:3]
    if found:
        return f"{message}; did you mean {' or '.join(repr('.'.join(known)) for known in found)}?", found[0]
    if "kwargs" in names:
        message += f"; further arguments belong in {'.'.join(section)}.kwargs"
    return f"{message} (allowed: {', '.join(names)})", None
