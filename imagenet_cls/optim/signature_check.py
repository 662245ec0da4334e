"""Checks the values of keyword arguments by the annotations of a built-in function or class."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args

from imagenet_cls.config.keys import choices, split_optional
from imagenet_cls.config.schema import NOT_NEGATIVE, Range
from imagenet_cls.errors import Problem
from imagenet_cls.lookup import number_problem
from imagenet_cls.text import format_value

NotNegative = Annotated[float, NOT_NEGATIVE]


def value_problems(
    key: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]
) -> list[Problem]:
    """The values in `kwargs` that don't fit the annotations of the factory's parameters, which have
    all these names.

    key: such as `loss.kwargs`. Annotations: `bool`, a `Literal` of words, or `Annotated[type,
    Range]` with the type float, int, one of them or None, or list[float], whose range is the range
    of its numbers. A bare float or int allows any finite number.
    """
    parameters = inspect.signature(factory).parameters
    texts = {
        name: _value_problem(value, parameters[name].annotation) for name, value in kwargs.items()
    }
    return [Problem(f"{key}.{name}", text) for name, text in texts.items() if text]


def _value_problem(value: Any, annotation: Any) -> str | None:
    shown = format_value(value)
    if annotation is bool:
        return None if isinstance(value, bool) else f"{shown} is not true or false"
    if allowed := choices(annotation):
        return None if value in allowed else f"{shown} is not one of {', '.join(allowed)}"
    if annotation in (float, int):
        annotation = Annotated[annotation, Range(-math.inf)]
    bare, allowed = get_args(annotation)
    if bare == list[float]:
        is_list = (
            isinstance(value, list)
            and value
            and not any(number_problem(number, allowed) for number in value)
        )
        return None if is_list else f"{shown} is not a list of numbers, each {allowed}"
    number, optional = split_optional(bare)
    return (
        None if optional and value is None else number_problem(value, allowed, whole=number is int)
    )
