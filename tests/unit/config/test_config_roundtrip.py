"""Any config is restored exactly from YAML, from JSON and from arguments."""

import json
from dataclasses import asdict
from typing import Any

from config_files import load
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from imagenet_cls.config.load import config_from_dict, dump_yaml
from imagenet_cls.config.reader import dump_inline

TRAPS = ["no", "~", "1e-4", "010", "1:30", "0x1F", "2020-01-01", "<<", "=", "a: b", "# x", "- a"]
TRAPS += ["", " ", "a\x85b", "\u2028", "\u2029 "]
# Not `${`, which begins an interpolation, and not `???`, which means a missing value.
TEXTS = st.sampled_from(TRAPS) | st.text(max_size=20).filter(
    lambda text: "${" not in text and text != "???"
)
NAMES = TEXTS.filter(lambda text: text not in ("", "<<"))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | FLOATS | TEXTS
KWARGS = st.dictionaries(
    NAMES,
    st.recursive(
        PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_size=4,
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(KWARGS, TEXTS, st.lists(TEXTS, max_size=3), st.integers(0, 2**63 - 1), st.floats(0, 1e9))
@example({}, "a " * 3000, ["#", "a #b", "'a'", "a\nb"], 3, 0.1)
def test_config_roundtrip_through_arguments_yaml_and_json(
    kwargs: dict[str, Any], text: str, texts: list[str], seed: int, number: float
) -> None:
    values = {
        "model.kwargs": kwargs,
        "model.freeze": texts,
        "expect.note": text,
        "seed": seed,
        "optimizer.lr": number,
    }
    config = load("", *(f"{key}={dump_inline(value)}" for key, value in values.items())).config
    found = [config.model.kwargs, config.model.freeze, config.expect.note, config.seed]
    assert repr([*found, config.optimizer.lr]) == repr(list(values.values()))
    # repr tells 1, 1.0 and true apart, which are equal
    assert repr(load(dump_yaml(config)).config) == repr(config)
    assert repr(config_from_dict(json.loads(json.dumps(asdict(config))))) == repr(config)
