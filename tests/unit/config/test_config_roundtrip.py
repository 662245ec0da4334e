"""Any config is restored exactly from YAML and from JSON."""

import dataclasses
import json
from typing import Any

import pytest
import yaml
from config_files import load, write
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from imagenet_cls.config.load import config_from_dict, dump_yaml, load_config
from imagenet_cls.config.reader import dump_inline

# Not `${`, which begins an interpolation, and not `???`, which means a missing value.
TEXT = st.text(max_size=20).filter(lambda text: "${" not in text and text != "???")
TRAPS = [
    "no",
    "null",
    "~",
    "1e-4",
    "010",
    "1:30",
    "0x1F",
    "2020-01-01",
    "<<",
    "=",
    "a: b",
    "# x",
    "",
    " ",
    "- a",
]
TEXTS = TEXT | st.sampled_from([*TRAPS, "a\x85b", "\u2028", "\u2029 "])
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | FLOATS | TEXTS
NAMES = st.text(min_size=1, max_size=8).filter(
    lambda text: "${" not in text and text not in ("???", "<<")
)
KWARGS = st.dictionaries(
    NAMES,
    st.recursive(
        PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_size=4,
)
SETTINGS = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@SETTINGS
@given(
    KWARGS,
    st.none() | TEXTS,
    st.lists(TEXTS, max_size=3),
    st.integers(0, 2**63 - 1),
    st.floats(0, 1e9),
)
def test_config_roundtrip_through_yaml_and_json(
    kwargs: dict[str, Any], text: str | None, texts: list[str], seed: int, number: float
) -> None:
    base = config_from_dict({"optimizer": {"lr": number}})
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, kwargs=kwargs, freeze=texts),
        expect=dataclasses.replace(base.expect, note=text, source=text),
        seed=seed,
    )
    for back in (
        load_config(write("config.yaml", dump_yaml(config))).config,
        config_from_dict(json.loads(json.dumps(dataclasses.asdict(config)))),
    ):
        assert back == config
        assert types_of(dataclasses.asdict(back)) == types_of(dataclasses.asdict(config))


@SETTINGS
@given(KWARGS, TEXTS, st.lists(TEXTS))
@example({}, "a " * 3000, ["#", "a #b", "'a'", "a\nb"])
def test_values_roundtrip_through_arguments(
    kwargs: dict[str, Any], text: str, texts: list[str]
) -> None:
    given = {"model.kwargs": kwargs, "expect.note": text, "model.freeze": texts, "seed": 3}
    arguments = [f"{key}={dump_inline(value)}" for key, value in given.items()]
    config = load("optimizer: {lr: 0.1}\n", *arguments).config
    assert (config.model.kwargs, config.expect.note, config.model.freeze) == (kwargs, text, texts)
    assert types_of(config.model.kwargs) == types_of(kwargs)


@pytest.mark.parametrize("name", ["sgd", "rmsproptf", "adamw"])
@pytest.mark.parametrize("kwargs", ["", "dampening: 0.1", "momentum: 0.5"])
def test_deleted_default_arguments_of_an_optimizer_stay_deleted(name: str, kwargs: str) -> None:
    text = f"optimizer: {{name: {name}, lr: 0.1, kwargs: {{_delete_: true, {kwargs}}}}}\n"
    config = load(text).config
    assert config.optimizer.kwargs == yaml.safe_load(f"{{{kwargs}}}")
    assert load(dump_yaml(config)).config == config
    assert config_from_dict(dataclasses.asdict(config)) == config


def types_of(value: Any) -> Any:
    """The types in a nested value, so that 1, 1.0 and true, which are equal, differ."""
    if isinstance(value, dict):
        return {key: types_of(item) for key, item in value.items()}
    return [types_of(item) for item in value] if isinstance(value, list) else type(value)
