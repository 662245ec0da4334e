"""Check of keyword arguments by the annotations of a built-in."""

import math

import pytest

from imagenet_cls.optim.signature_check import NotNegative, value_problems


def built_in(ratio: NotNegative, offset: float = 0.0, count: int = 1) -> None:
    """A built-in with a range, a number without a range, and a whole number without a range."""


@pytest.mark.parametrize(
    ("kwargs", "keys"),
    [
        ({"ratio": 0, "offset": -2.5, "count": -3}, []),
        ({"ratio": -1}, ["kwargs.ratio"]),
        ({"offset": "two"}, ["kwargs.offset"]),
        ({"offset": True}, ["kwargs.offset"]),
        ({"offset": math.nan, "count": 1.5}, ["kwargs.offset", "kwargs.count"]),
    ],
)
def test_values_outside_the_annotation_have_their_key(kwargs: dict, keys: list[str]) -> None:
    assert [problem.key for problem in value_problems("kwargs", built_in, kwargs)] == keys
