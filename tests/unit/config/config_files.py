"""Config files for tests, in the working directory."""

from pathlib import Path

import pytest

from imagenet_cls.config.load import LoadedConfig, load_config
from imagenet_cls.errors import ConfigError

LR = "optimizer: {lr: 0.1}\n"


def write(name: str, text: str | bytes) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def load(text: str | bytes, *overrides: str) -> LoadedConfig:
    """The config of `x.yaml` with this text."""
    return load_config(write("x.yaml", text), overrides)


def errors_of(text: str | bytes, *overrides: str) -> list[str]:
    """The lines of the error that loading `x.yaml` with this text ends in."""
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    assert caught.value.exit_code == 2
    assert all("\n" not in line and len(line) < 500 for line in caught.value.lines)
    return caught.value.lines
