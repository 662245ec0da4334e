"""Any config is restored exactly from YAML, from a dictionary and from JSON."""

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagenet_cls.config import keys, reader
from imagenet_cls.config.load import config_from_dict, config_to_dict, dump_yaml, load_config
from imagenet_cls.config.schema import COMPONENT_DEFAULTS, Config

# Not `${`, which begins an interpolation, and not `???`, which means a missing value.
TEXT = st.text(max_size=20).filter(lambda text: "${" not in text and text.lstrip("\\") != "???")
TRAPS = st.sampled_from(
    [
        *("no", "null", "~", "1e-4", "010", "1:30", "0x1F", "2020-01-01", "<<", "=", "a: b", "# x", "", " ", "- a"),
        *("a\x85b", "\u2028", "\u2029 "),
    ]
)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)  # others are refused
PLAIN = st.none() | st.booleans() | NUMBERS | TEXT | TRAPS
NAMES = st.text(min_size=1, max_size=8).filter(
    lambda text: "${" not in text and text.lstrip("\\") != "???" and text != "<<"
)
KWARGS = st.dictionaries(
    NAMES,
    st.recursive(
        PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
    ),
    max_size=4,
)
BASE = config_from_dict({"optimizer": {"lr": 0.1}})


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    bare, optional = keys.split_optional(hint)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**70), 2**70),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: TEXT | TRAPS,
        list[float]: st.lists(st.floats(allow_nan=False), max_size=3),
        list[int]: st.lists(st.integers(-(2**70), 2**70), max_size=3),
        list[str]: st.lists(TEXT | TRAPS, max_size=3),
    }
    if keys.is_kwargs(bare):
        return KWARGS
    found = plain[bare] if bare in plain else st.sampled_from(typing.get_args(bare))
    return st.none() | found if optional else found


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any config, valid or not: some keys drawn, the others at their defaults."""
    config = BASE
    paths = draw(st.lists(st.sampled_from(list(keys.leaves())), max_size=8, unique=True))
    for path in paths:
        value = draw(strategy_of(keys.leaves()[path]))
        if len(path) == 1:
            config = dataclasses.replace(config, **{path[0]: value})
        elif len(path) == 2:
            section = dataclasses.replace(getattr(config, path[0]), **{path[1]: value})
            config = dataclasses.replace(config, **{path[0]: section})
    return config


def with_component_defaults(config: Config) -> Config:
    """With the component's defaults, which a stored config always has."""
    own = COMPONENT_DEFAULTS["optimizer"].get(config.optimizer.name, {})
    kwargs = {**own.get("kwargs", {}), **config.optimizer.kwargs}
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, kwargs=kwargs))


SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@settings(SETTINGS, max_examples=30)
@given(configs())
def test_config_roundtrip_through_json_and_yaml(config: Config) -> None:
    as_dict = config_to_dict(with_component_defaults(config))
    stored = json.loads(json.dumps(as_dict))
    back = config_from_dict(stored)
    assert config_to_dict(back) == as_dict
    assert types_of(config_to_dict(back)) == types_of(as_dict)


@settings(SETTINGS, max_examples=20)
@given(KWARGS)
def test_dumped_kwargs_load_with_equal_types(tmp_path_factory: pytest.TempPathFactory, kwargs: dict[str, Any]) -> None:
    config = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, kwargs=kwargs))
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    loaded = load_config(path).config
    assert loaded == config
    assert types_of(loaded.model.kwargs) == types_of(kwargs)


def types_of(value: Any) -> Any:
    """The types in a nested value, so that 1, 1.0 and true, which are equal, differ."""
    if isinstance(value, dict):
        return {key: types_of(item) for key, item in value.items()}
    return [types_of(item) for item in value] if isinstance(value, list) else type(value)


def test_dump_of_other_than_plain_values_raises_type_error() -> None:
    with pytest.raises(TypeError, match="plain values"):
        reader.dump({"a": object()})
