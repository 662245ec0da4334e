"""Damaged texts of shipped configs, and odd overrides: each ends in a ConfigError or loads.

The same 60 in each default run, and 1,200 with `-m nightly`.
"""

import random
import shutil
from pathlib import Path

import pytest
from golden import CONFIGS

from imagenet_cls.config import keys
from imagenet_cls.config.load import dump_yaml, load_config
from imagenet_cls.errors import ConfigError

SHIPPED = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
INSERTED = [
    "[",
    "}",
    ": ",
    ",",
    '"',
    "\t",
    "\n",
    "\n  ",
    "- ",
    "? ",
    "&a ",
    "*a",
    "!",
    "|",
    "%",
    "@",
]
INSERTED += ["#", "\x00", "\x07", "\u2028", "\ufeff", "é", "---\n", "...", "${"]
VALUES = [
    "",
    "0",
    "-1.5",
    "1e400",
    "true",
    "a",
    "[]",
    "[0]",
    "[0, 1]",
    "[a, null]",
    "{a: 1}",
    "a:b",
]


@pytest.mark.parametrize("count", [60, pytest.param(1200, marks=pytest.mark.nightly)])
def test_damaged_config_loads_or_is_a_config_error(tmp_path: Path, count: int) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    draw = random.Random(0)
    for _ in range(count):
        path = draw.choice(SHIPPED)
        text = (CONFIGS / path).read_text()
        at = draw.randrange(len(text))
        damaged = [text[:at] + draw.choice(INSERTED) + text[at:], text[:at] + text[at + 1 :], text]
        file = tmp_path / "configs" / path.with_name("damaged.yaml")
        file.write_text(draw.choice(damaged))
        overrides = [f"{draw.choice(list(keys.value_types()))}={draw.choice(VALUES)}"]
        try:
            config = load_config(file, overrides).config
        except ConfigError as error:
            assert all("\n" not in line and len(line) < 1000 for line in error.lines), error.lines
        else:
            file.write_text(dump_yaml(config))
            assert load_config(file).config == config
