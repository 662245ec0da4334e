"""Ranges of single keys, rules across keys, and keys without effect. Needs no library, file or device."""

import math
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any, cast

from imagenet_cls.config import keys
from imagenet_cls.config.fields import NOT_NEGATIVE, SHARE_BELOW_1, Range
from imagenet_cls.config.rules import RULES
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import Problem, format_value

# Keyword arguments that torch's optimizers share, and those that timm's models share.
OPTIMIZER_KWARGS = {"momentum": SHARE_BELOW_1, "alpha": SHARE_BELOW_1, "betas": SHARE_BELOW_1, "eps": NOT_NEGATIVE}
MODEL_KWARGS = {
    f"{name}_rate": SHARE_BELOW_1
    for name in ("drop", "drop_path", "drop_block", "attn_drop", "proj_drop", "pos_drop", "patch_drop")
}


def value_problems(config: Config, unknown: Collection[str] = ()) -> list[Problem]:
    """What is out of range or does not fit together, in the order of the schema.

    unknown: dotted keys whose values are wrong for another reason: they and rules that read them are not checked.
    """
    problems = [
        problem
        for path in keys.leaves()
        if ".".join(path) not in unknown
        for problem in _check_key(path, attrgetter(".".join(path))(config))
    ]
    problems += _check_kwargs("optimizer", config.optimizer.name, config.optimizer.kwargs, OPTIMIZER_KWARGS)
    problems += _check_kwargs("model", config.model.name, config.model.kwargs, MODEL_KWARGS)
    wrong = {*unknown, *(problem.key for problem in problems)}
    view = cast(Config, _View(config, "", wrong))
    for rule in RULES:
        with suppress(_WrongKeyError):
            for key, message in rule(view):
                problems.append(Problem(key, message))
    return problems


def ineffective_keys(config: Config) -> dict[str, str]:
    """The keys that have no effect in this config, whatever their values, and what each would need."""
    needs = {".".join(path): keys.info(path).needs for path in keys.leaves()}
    return {key: need.text for key, need in needs.items() if need is not None and not need.is_met(config)}


def unused_values(config: Config) -> list[Problem]:
    """A problem for each unmet condition: the keys that are not at their defaults and have no effect without it."""
    by_need: dict[str, list[str]] = {}
    for key, need in ineffective_keys(config).items():
        if attrgetter(key)(config) != keys.default_of(tuple(key.split("."))):
            by_need.setdefault(need, []).append(key)
    return [
        Problem(key, f"has no effect; it needs {need}" + (f" (likewise {', '.join(others)})" if others else ""))
        for need, (key, *others) in by_need.items()
    ]


class _WrongKeyError(Exception):
    """A rule reads a key whose value is wrong by itself."""


class _View:
    """A config, or a section of it, that raises _WrongKeyError where one of the `wrong` keys is read."""

    def __init__(self, section: Any, prefix: str, wrong: Collection[str]):
        self._section, self._prefix, self._wrong = section, prefix, wrong

    def __getattr__(self, name: str) -> Any:
        key = f"{self._prefix}{name}"
        if key in self._wrong:
            raise _WrongKeyError(key)
        if isinstance(getattr(type(self._section), name, None), property):
            return getattr(type(self._section), name).fget(self)
        value = getattr(self._section, name)
        return _View(value, f"{key}.", self._wrong) if tuple(key.split(".")) in keys.sections() else value


def _check_key(path: keys.KeyPath, value: Any) -> Iterator[Problem]:
    """Range, list or form of one key."""
    key, info, hint = ".".join(path), keys.info(path), keys.leaves()[path]
    allowed = info.allowed
    if keys.is_kwargs(hint):
        yield from _check_finite(key, value)
    elif value is None:
        return
    elif allowed is not None and isinstance(value, list):
        fits = len(value) == (info.count or max(1, len(value))) and all(number in allowed for number in value)
        if not fits or (info.ascending and sorted(value) != value):
            kind = f"a list of {info.count or 'at least 1'} numbers, each {allowed.limits_for(max(value, default=0))}"
            order = ", in ascending order" if info.ascending else ""
            yield Problem(key, f"{format_value(value)} is not {kind}{order}")
    elif allowed is not None and value not in allowed:
        yield Problem(key, f"{format_value(value)} is out of range: {allowed.limits_for(value)}")
    elif info.form is not None and not all(re.fullmatch(info.form[0], text) for text in _as_list(value)):
        yield Problem(key, f"{format_value(value)} is not {info.form[1]}")
    elif isinstance(value, str) and not value.strip() and path[0] != "expect":
        yield Problem(key, "is empty")


def _check_kwargs(section: str, name: str, kwargs: dict[str, Any], ranges: dict[str, Range]) -> Iterator[Problem]:
    """Ranges of well-known keyword arguments, unless a factory or another library defines them."""
    for kwarg, allowed in ranges.items():
        value = kwargs.get(kwarg)
        if ":" in name or value is None:
            continue
        key, numbers = f"{section}.kwargs.{kwarg}", _as_list(value)
        if kwarg == "betas" and not (isinstance(value, list) and len(value) == 2):
            yield Problem(key, f"{format_value(value)} is not a list of two numbers")
        elif any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
            yield Problem(key, f"{format_value(value)} is not a number")
        elif any(number not in allowed for number in numbers if isinstance(number, int) or math.isfinite(number)):
            yield Problem(key, f"{format_value(value)} is out of range: {allowed}")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_finite(key: str, value: Any) -> Iterator[Problem]:
    """NaN and infinity in keyword arguments, at any depth."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _check_finite(f"{key}.{name}" if isinstance(value, dict) else key, inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(key, f"{format_value(value)} is not a finite number")
