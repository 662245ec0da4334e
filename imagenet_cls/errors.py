"""Errors that a user can cause, with the exit codes that a shell sees. Any other exception is a bug (exit code 1).

A message has at most three lines: what is wrong, where, what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class UserError(Exception):
    """Base of all errors that a user can cause; they are shown without a traceback.

    reported_by_main: another rank reports the same error, so this one stays silent.
    """

    exit_code = 2
    reported_by_main = False


class UsageError(UserError):
    """A command that can't be run: an unknown option, a run folder that holds a run, a config that does not exist."""


@dataclass(frozen=True)
class Problem:
    """One error in a config.

    key: the dotted key, such as `optimizer.kwargs.momentum`; "" for none. message: what was given, what is allowed, did
    you mean; one line, without key and file.
    """

    key: str
    message: str


class ConfigError(UserError):
    """An invalid config. lines: one for each problem."""

    def __init__(self, lines: Sequence[str]):
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:  # to be sent to other ranks
        return type(self), (self.lines,)


class DataError(UserError):
    """Images, folders or annotation files that are missing, empty, broken or inconsistent."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that can't be read, verified or loaded into this model."""

    exit_code = 4


class ResourceError(UserError):
    """The machine or the network failed: memory, disk, a port, another rank."""

    exit_code = 5


class NonFiniteError(UserError):
    """Loss or gradients were NaN or infinite for too many steps in a row."""

    exit_code = 6


class Stopped(UserError):
    """The run was stopped by a signal, after a save. exit_code: 130 for Ctrl-C, 140 for SIGUSR2, 143 for SIGTERM."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.exit_code)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text; its type's name where the text is empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shorten(text: str, length: int) -> str:
    """The text in at most `length` characters, with `...` at the end where it was cut."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def format_value(value: Any) -> str:
    """A config value as YAML users write it, in at most 100 characters: `'many'`, `null`, `true`, `[0.1, 1.0]`."""
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, list):
        text = f"[{', '.join(map(format_value, value))}]"
    elif isinstance(value, dict):
        text = f"{{{', '.join(f'{key}: {format_value(item)}' for key, item in value.items())}}}"
    else:
        text = repr(value)
    return shorten(text, 100)
