"""Checks the values of keyword arguments by the annotations of a built-in function or class."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args

from imagenet_cls.config.schema import NOT_NEGATIVE
from imagenet_cls.errors import Problem
from imagenet_cls.lookup import number_problem
from imagenet_cls.text import format_value

NotNegative = Annotated[float, NOT_NEGATIVE]


def value_problems(
    key: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]
) -> list[Problem]:
    """The values in `kwargs` that don't fit the annotations of the factory's parameters, which have
    all these names.

    key: such as `loss.kwargs`. Annotations: `bool`, or `Annotated[type, Range]` with the type
    float, float or None, or list[float], whose range is the range of its numbers.
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
    kind, allowed = get_args(annotation)
    if kind == list[float]:
        is_list = (
            isinstance(value, list)
            and value
            and not any(number_problem(number, allowed) for number in value)
        )
        return None if is_list else f"{shown} is not a list of numbers, each {allowed}"
    if value is None and kind == float | None:
        return None
    return number_problem(value, allowed)
