"""Lookup of names that users write.

Nearest names, `my_module:my_factory`, checks of arguments. Imports no torch.
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from imagenet_cls.errors import ConfigError, Problem, UsageError, UserError, out_of_memory_line
from imagenet_cls.text import format_value, shorten

Function = TypeVar("Function", bound=Callable[..., Any])


class NameNotFoundError(LookupError):
    """A name stands for nothing. A class of its own, since a user's module may raise KeyError."""


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """The at most three candidates that are similar to `name`, best first. Ignores case."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.6)
    return [by_lower[match] for match in matches]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a message: `; did you mean 'resnet50' or 'resnet50d'?`, or "" if no candidate is
    similar.
    """
    found = nearest(name, candidates)
    return f"; did you mean {' or '.join(repr(word) for word in found)}?" if found else ""


def suggest_keywords(function: Function) -> Function:
    """A decorator: the TypeError about an unknown keyword argument names similar ones."""
    names = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - names.keys():
            raise TypeError(
                f"{function.__qualname__}() has no argument {name!r}{did_you_mean(name, names)}"
            )
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def did_you_mean_part(pattern: str, names: Iterable[str]) -> str:
    """`did_you_mean` for a pattern of dotted names, such as `layer1.*`, which may match one name or
    all of a part.
    """
    parts = [name.split(".") for name in names]
    wholes = dict.fromkeys(
        ".".join([*words[:depth], "*"]) for words in parts for depth in range(1, len(words))
    )
    return did_you_mean(pattern, [*wholes, *(".".join(words) for words in parts)])


def is_factory_name(name: str) -> bool:
    """Whether a component's name has the form `my_module:my_factory`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(
        part.isidentifier() for part in [*module.split("."), *attribute.split(".")]
    )


def is_user_factory(name: str) -> bool:
    """Whether a name has the form `my_module:my_factory`, and does not stand for torchvision's
    (`torchvision:resnet50`).
    """
    return is_factory_name(name) and not name.startswith("torchvision:")


def is_model_source(name: str) -> bool:
    """Whether a model's name is a place from which timm loads it."""
    return name.startswith(("hf-hub:", "local-dir:"))


def import_from_cwd(name: str) -> ModuleType:
    """Import a user's module, also from the working directory, which comes first. Raises
    NameNotFoundError if there is none of that name, and what the module raises.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # the module exists; a module that it imports does not
        raise NameNotFoundError(
            f"no module {name!r} in {here} or among the installed packages"
        ) from None


def import_factory(name: str) -> Callable[..., Any]:
    """The callable that `my_module:my_factory` names. Raises NameNotFoundError, or what the user's
    module raises.
    """
    module_name, _, attribute = name.partition(":")
    target: Any = import_from_cwd(module_name)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise NameNotFoundError(
                f"module {module_name!r} has no {attribute!r}{did_you_mean(part, dir(target))}"
            )
        target = getattr(target, part)
    if not callable(target):
        raise NameNotFoundError(f"{name!r} is not a function or class")
    return target


def check_packages(extra: str, *names: str) -> None:
    """Raise UsageError if a package is not installed. extra: the extra of setup.cfg that has it."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise UsageError(
            f"This needs {', '.join(missing)}: not installed.",
            f"Install it (pip install {' '.join(missing)}), or this package with its extra "
            f"`{extra}`.",
        )


def find_factory(
    kind: str, name: str, built_in: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """The built-in factory of this name, or `my_module:my_factory`. kind: for the message. Raises
    NameNotFoundError, or what the user's module raises.
    """
    if is_factory_name(name):
        return import_factory(name)
    if name not in built_in:
        allowed = f"(built in: {', '.join(built_in)}; or my_module:my_factory)"
        raise NameNotFoundError(f"unknown {kind} {name!r}{did_you_mean(name, built_in)} {allowed}")
    return built_in[name]


def keyword_names(factory: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names that `factory` takes as keyword arguments, and whether it takes `**kwargs`."""
    parameters = inspect.signature(factory).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def kwargs_problems(
    key: str,
    factory: Callable[..., Any],
    kwargs: Mapping[str, Any],
    passed: Collection[str] = (),
    reserved: Collection[str] = (),
    more_names: Collection[str] = (),
) -> list[Problem]:
    """Names in a component's `kwargs` that its factory does not take, arguments without a default
    that are missing, and names of `passed` that it does not take.

    passed: names that the program passes. reserved: others that can't be given. more_names: those
    that `**kwargs` of the signature accepts; without them, every name.
    """
    taken, takes_any = keyword_names(factory)
    takes_any = takes_any and not more_names
    set_by_program = {*passed, *reserved}
    allowed = [
        name for name in [*taken, *more_names] if name not in {*set_by_program, "self", "cls"}
    ]
    problems = []
    for name in kwargs:
        if name in set_by_program:
            problems.append(Problem(f"{key}.{name}", "is set by the program; remove it"))
        elif name not in allowed and not takes_any:
            listing = ", ".join(dict.fromkeys(allowed)) or "none"
            text = f"unknown argument{did_you_mean(name, allowed)} (allowed: {listing})"
            problems.append(Problem(f"{key}.{name}", text))
    parameters = inspect.signature(factory).parameters
    given = {*kwargs, *set_by_program, "self", "cls"}
    for name in taken:
        if parameters[name].default is inspect.Parameter.empty and name not in given:
            problems.append(Problem(key, f"{name!r} has no default and must be given"))
    if not takes_any:
        for name in passed:
            if name not in taken:
                text = f"the factory must take the argument {name!r}"
                problems.append(Problem(key.replace(".kwargs", ".name"), text))
    return problems


@contextmanager
def component(key: str, name: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Raise ConfigError for an exception while a library builds or runs a component.

    key: of its name, such as `model.name`; the error has that of its kwargs if it has any.
    UserErrors, out-of-memory errors and the errors of a user's factory pass through.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        is_of_library = name.startswith(("timm:", "torchvision:")) or not is_factory_name(name)
        if not is_of_library or out_of_memory_line(error) is not None:
            raise
        if kwargs:
            key = key.replace(".name", ".kwargs")
        reason = shorten(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
        raise ConfigError([f"{key}: {name!r} fails with these settings: {reason}"]) from error


def number_problem(value: Any, allowed: Container[float], whole: bool = False) -> str | None:
    """Why `value` is none of the allowed numbers; None if it is one. whole: integers only."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if is_number and value in allowed:
        return None
    return f"{format_value(value)} is out of range: {'a whole number, ' if whole else ''}{allowed}"
