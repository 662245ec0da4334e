"""What a user can cause, and the exit code that a shell sees for it.

Owns every exception that is shown to a user without a traceback. An exception of any other type is a bug (exit code 1).
Refuses to print or exit: `program`, `ranks` and `parallel.ending` do that. Called from everywhere.

A message is at most three lines and ends in what to do: what happened, where, and the remedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class UserError(Exception):
    """Base of all errors that a user can cause. `str(error)` is what the screen shows.

    reported_by_main: rank 0, or a rank before this one on its machine, raises the same error, so that this one need not
    show it.
    """

    exit_code = 2
    reported_by_main = False


class UsageError(UserError):
    """A command line that cannot be carried out: unknown option, a run folder that is taken, no such config."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config.

    key: the dotted key, such as `optimizer.kwargs.momentum`; "" where no key is at fault.
    message: what was given, what is allowed, did you mean; one line, without the key and without the file.
    """

    key: str
    message: str


class ConfigError(UserError):
    """A config that cannot be run. Holds one line for each problem, all problems at once."""

    def __init__(self, lines: Sequence[str]):
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:  # errors travel between ranks
        return type(self), (self.lines,)


class DataError(UserError):
    """Images, folders or annotation files that are missing, empty, broken or do not fit each other."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that cannot be read, written, verified or loaded into this model."""

    exit_code = 4


class ResourceError(UserError):
    """The machine or the network gave out: memory, disk, a port, another rank."""

    exit_code = 5


class NonFiniteError(UserError):
    """Loss or gradients were NaN or infinite for too many steps in a row."""

    exit_code = 6


class Stopped(UserError):
    """The run was asked to stop, has saved, and can go on with `--resume`. 130: Ctrl-C. 140: SIGUSR2. 143: SIGTERM."""

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
