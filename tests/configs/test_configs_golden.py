"""Networks, parameter groups and learning rates of every config are what they were when somebody looked at them.

`test_configs_published.py` compares them with figures from elsewhere; here nothing changes unnoticed. After a change
that was meant: `python tests/configs/golden.py --write`, and the diff is one line for each config.
"""

import json
from typing import Any

import pytest
from golden import CONFIGS, GOLDEN, golden_of, loaded, names

BEFORE: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", names())
def test_what_comes_of_a_config_is_as_it_was(name: str) -> None:
    before, now = BEFORE[name], golden_of(loaded(CONFIGS / name))
    for key in ("parameters", "groups", "steps_per_epoch"):
        assert now[key] == before[key], key
    assert now["ema_decay"] == pytest.approx(before["ema_decay"], rel=1e-12)
    # Cosines end within rounding of 0; the mathematics library of a machine may differ in the last digit.
    assert now["rates"] == pytest.approx(before["rates"], rel=1e-12, abs=1e-15)
    assert len(now["rates"]) == 10


def test_no_line_is_left_over() -> None:
    assert list(BEFORE) == names()
