"""Names that users write, turned into things: nearest names, `my_module:my_factory`, keyword arguments.

Owns did-you-mean and the comparison of `kwargs` with a signature. Imports nothing of the package but `errors`, and no
torch, so that it is usable before torch is loaded. Called by `config` (keys), `data`, `models` and `optim` (names and
kwargs).
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from imagenet_cls.errors import Problem


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates most like `name`, best first; empty where none is alike. Upper and lower case count as equal."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=count, cutoff=0.6)
    return [by_lower[match] for match in matches]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """A clause to put behind a message: `; did you mean 'resnet50' or 'resnet50d'?`, or "" where nothing is near."""
    found = nearest(name, candidates)
    return f"; did you mean {' or '.join(repr(word) for word in found)}?" if found else ""


def did_you_mean_part(pattern: str, names: Iterable[str]) -> str:
    """`did_you_mean` for a pattern of dotted names, such as `layer1.*`: it may mean one of them, or all of a part."""
    parts = [name.split(".") for name in names]
    wholes = dict.fromkeys(".".join([*words[:depth], "*"]) for words in parts for depth in range(1, len(words)))
    return did_you_mean(pattern, [*wholes, *(".".join(words) for words in parts)])


def is_factory_name(name: str) -> bool:
    """Whether a component's name is of the form `my_module:my_factory`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


def import_from_here(name: str) -> ModuleType:
    """A user's module, found from the working directory too. Raises LookupError where there is none of that name."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # the module is there; something that it imports is not
        raise LookupError(f"no module {name!r} in {here} or among the installed packages") from None


def import_factory(name: str) -> Callable[..., Any]:
    """The callable that `my_module:my_factory` names. The module is found from the working directory too.

    Raises LookupError, with a message that says which half is missing, for anything that cannot be imported or called.
    An exception raised *inside* the user's module other than a missing module is passed on: it is their bug to see.
    """
    module_name, _, attribute = name.partition(":")
    target: Any = import_from_here(module_name)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise LookupError(f"module {module_name!r} has no {attribute!r}{did_you_mean(attribute, vars(target))}")
        target = getattr(target, part)
    if not callable(target):
        raise LookupError(f"{name!r} is not a function or class")
    return target


def keyword_names(factory: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names that `factory` takes as keywords, and whether it takes any other (`**kwargs`) besides."""
    parameters = inspect.signature(factory).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def kwargs_problems(
    section: str,
    factory: Callable[..., Any],
    kwargs: Mapping[str, Any],
    reserved: Collection[str] = (),
    more_names: Collection[str] = (),
) -> list[Problem]:
    """Compare a component's `kwargs` with the signature that will receive them, before the call.

    section: the dotted section, such as `optimizer`. reserved: names that the project passes itself and a config may
    not. more_names: further names that a `**kwargs` in the signature is known to accept (the class that a timm
    factory builds); without them, a signature with `**kwargs` accepts every name.
    """
    taken, takes_any = keyword_names(factory)
    allowed = [name for name in [*taken, *more_names] if name not in reserved and name not in ("self", "cls")]
    problems = []
    for name in kwargs:
        key = f"{section}.kwargs.{name}"
        if name in reserved:
            problems.append(Problem(key, f"is set by the program itself and can't be given in {section}.kwargs"))
        elif name not in allowed and not (takes_any and not more_names):
            listing = ", ".join(dict.fromkeys(allowed)) or "no keywords at all"
            problems.append(Problem(key, f"unknown keyword{did_you_mean(name, allowed)} (allowed: {listing})"))
    return problems


def missing_kwargs_problems(
    section: str, factory: Callable[..., Any], kwargs: Mapping[str, Any], given: Collection[str] = ()
) -> list[Problem]:
    """The arguments that `factory` can't do without and that neither the config's `kwargs` nor the program gives.

    given: names that the program passes itself, by position or by keyword.
    """
    parameters = inspect.signature(factory).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [name for name in required if name not in kwargs and name not in given and name not in ("self", "cls")]
    return [Problem(f"{section}.kwargs", f"{name!r} has no default and must be given") for name in missing]
