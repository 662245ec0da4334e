"""The schema, looked at as data: which keys there are, of which types, with which defaults.

Owns reflection over `schema`: dotted keys, type hints, and the words in which a type is explained to a user. Knows no
file, no layer and no value that a user gave. Called by `reader` (types of scalars), `layers` (known keys), `load`,
`check`, `document`.
"""

import dataclasses
import types
import typing
from functools import cache
from typing import Any, Literal

from imagenet_cls.config.schema import Config
from imagenet_cls.errors import format_value
from imagenet_cls.lookup import nearest

KeyPath = tuple[str, ...]
"""The parts of a dotted key. Parts of kwargs may themselves contain dots, so this, not the dotted text, is the
identity.
"""


REMOVED: tuple[KeyPath, KeyPath] = (("data", "on_bad_image"), ("data", "manifest"))
"""Keys of older configs that are still read, in favour of `data.exclude`."""


@cache
def sections() -> dict[KeyPath, type]:
    """Every section, by its path, and the dataclass that it becomes. The whole config is the section `()`."""
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
    """Every key that holds a value, by its path, and its type hint; `kwargs` are leaves of type `dict[str, Any]`.

    In the order of the schema, those at the top level last, as they stand there.
    """
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


_FLAGS = {
    "per_machine": (
        "data.root", "data.exclude", "data.num_workers", "data.prefetch_batches", "data.timeout_sec", "device",
        "expect", "imports", "log.tensorboard", "log.plots", "model.checkpoint", "model.pretrained",
        "distill.teacher.checkpoint", "distill.teacher.pretrained", "parallel.init_method", "parallel.timeout_sec",
    ),
    "not_recipe": (
        "checkpoint", "log", "expect", "device", "imports", "eval.batch_size", "eval.every_epochs", "data.root",
        "data.exclude", "data.num_workers", "data.prefetch_batches", "data.timeout_sec", "train.max_steps",
        "train.max_nonfinite_steps", "train.deterministic", "train.compile", "train.grad_checkpointing",
        "train.micro_batch_size", "parallel.mode", "parallel.device_ids", "parallel.output_device",
        "parallel.backend", "parallel.init_method", "parallel.timeout_sec", "parallel.check_every_steps",
        "model.pretrained", "model.checkpoint", "distill.teacher.pretrained", "distill.teacher.checkpoint",
    ),
}  # fmt: skip


@cache
def keys_with(flag: Literal["per_machine", "not_recipe"]) -> frozenset[str]:
    """The dotted keys that have a flag. per_machine: machines may differ in them. not_recipe: not compared on resume,
    since they change how fast, where or how visibly a run goes, but not what it computes."""
    flagged = _FLAGS[flag]
    return frozenset(key for key in map(".".join, leaves()) if key in flagged or key.partition(".")[0] in flagged)


def default_of(path: KeyPath) -> Any:
    """The schema's default of a leaf; `dataclasses.MISSING` never: `optimizer.lr`, which has none, has omegaconf's
    `???`.
    """
    field = next(field for field in dataclasses.fields(sections()[path[:-1]]) if field.name == path[-1])
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def value_of(config: Config, path: KeyPath) -> Any:
    """A leaf's value, or a section."""
    value: Any = config
    for name in path:
        value = getattr(value, name)
    return value


def is_kwargs(hint: Any) -> bool:
    """Whether a leaf holds free keyword arguments, which merge key by key."""
    return typing.get_origin(hint) is dict


def split_optional(hint: Any) -> tuple[Any, bool]:
    """A hint without its `| None`, and whether it had one."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        rest = [part for part in typing.get_args(hint) if part is not types.NoneType]
        return rest[0], len(rest) < len(typing.get_args(hint))
    return hint, False


def is_text(hint: Any) -> bool:
    """Whether a key holds text or one of some words, so that what was written counts as it stands (`no`, `1e3`)."""
    bare, _ = split_optional(hint)
    return bare is str or typing.get_origin(bare) is Literal


def element_hint(hint: Any) -> Any:
    """What the items of a list of this type are; `Any` for anything that is not a list."""
    bare, _ = split_optional(hint)
    return typing.get_args(bare)[0] if typing.get_origin(bare) is list else Any


def words_of(hint: Any) -> str:
    """A type in a user's words, to stand behind "is not": `a number`, `one of auto, fp32`, `true or false or null`."""
    bare, optional = split_optional(hint)
    plain = {
        float: "a number",
        int: "a whole number",
        bool: "true or false",
        str: "text",
        list[float]: "a list of numbers",
        list[int]: "a list of whole numbers",
    }
    if typing.get_origin(bare) is Literal:
        words = f"one of {', '.join(map(str, typing.get_args(bare)))}"
    elif is_kwargs(bare):
        words = "a mapping `{name: value}`"
    else:
        words = plain.get(bare, "a list of texts")
    return f"{words} or null" if optional else words


def unknown_key(path: KeyPath) -> tuple[str, KeyPath | None]:
    """The message for a key that does not exist, and the key that was probably meant, if any.

    The nearest names of the same section are offered; else keys of that very name elsewhere (`lr` at the top level is
    `optimizer.lr`); else the section's keys are listed.
    """
    section, name = path[:-1], path[-1]
    if (*section, *name.split(".")) in leaves():
        nested = ": {".join(name.split(".")) + ": ..." + "}" * name.count(".")
        return (
            f"unknown key {format_value('.'.join(path))}; dots are for the command line, in a file write {nested}",
            None,
        )
    names = [field.name for field in dataclasses.fields(sections()[section])]
    found = [(*section, near) for near in nearest(name, names)]
    found = found or [known for known in [*leaves(), *sections()] if known and known[-1] == name][:3]
    message = f"unknown key {format_value('.'.join(path))}"
    if found:
        return f"{message}; did you mean {' or '.join(repr('.'.join(known)) for known in found)}?", found[0]
    if "kwargs" in names:
        message += f"; arguments of its own go into {'.'.join(section)}.kwargs"
    return f"{message} (allowed: {', '.join(names)})", None
