"""Errors that a user can cause, with exit codes.

A message has at most three lines: what, where, what to do.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagenet_cls.text import first_line, for_caller, printable, shorten

# The third one: cuDNN leaves out engines whose workspace does not fit.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|(cudnn|cublas)_status_alloc_failed|unable to find an engine|"
    r"DefaultCPUAllocator",
    re.IGNORECASE,
)


class UserError(Exception):
    """Base of all errors that a user can cause. They are shown without a traceback.

    problem: what is wrong and where. remedy: what to do. Both are sentences.
    """

    exit_code = 2
    printed_elsewhere = False  # whether another rank prints the same error

    def __init__(self, problem: str, remedy: str):
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return for_caller(f"{self.problem}\n{self.remedy}")


class UsageError(UserError):
    """A command that can't be run: an unknown option, a run folder that holds a run, no
    checkpoint.
    """


@dataclass(frozen=True)
class Problem:
    """One error in a config. key: the dotted key; "" for none. message: one line, without key and
    file.
    """

    key: str
    message: str


class ConfigError(UserError):
    """An invalid config. lines: one for each problem, which also says what is allowed there."""

    def __init__(self, lines: Sequence[str]):
        super().__init__("\n".join(lines), "")
        self.lines = list(lines)

    def __str__(self) -> str:
        return for_caller(self.problem)

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.lines,)


class DataError(UserError):
    """Images, folders or annotation files that are missing, empty, broken or inconsistent."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that can't be read, verified or loaded into this model."""

    exit_code = 4


class ResourceError(UserError):
    """The machine or the network failed: memory, disk, a port, another rank."""

    exit_code = 5


class DownloadError(ResourceError):
    """A model or its published weights can't be downloaded."""


@contextmanager
def explain_content_errors(
    kind: type[UserError],
    place: Path | str | None,
    what: str = "invalid content",
    remedy: str = "Restore it, or use another one.",
) -> Iterator[None]:
    """Raise `kind` for any exception while `place` is read or used. UserErrors and out-of-memory
    errors pass through.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if out_of_memory_line(error) is not None:
            raise
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise kind(f"{place}: {what} ({reason}).", remedy) from error


# They show a missing check, so they keep their traceback.
_UNCHECKED = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
# How RuntimeErrors of `Path.resolve`, before Python 3.13, and `Path.expanduser` begin.
_PATHLIB = ("Symlink loop from ", "Could not determine home directory")


def explain_path_error(error: BaseException) -> BaseException:
    """A UserError for an error of a path that the user has to change or repair; any other error as
    it is.
    """
    explained: UserError
    if type(error) is RuntimeError and str(error).startswith(_PATHLIB):
        explained = UsageError(f"A path is invalid: {first_line(error)}", "Use another path.")
    elif not isinstance(error, OSError) or error.filename is None or isinstance(error, _UNCHECKED):
        return error
    else:
        problem = f"{shorten(printable(str(error.filename)), 300)}: {error.strerror}."
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            explained = UsageError(problem, "Use another path.")
        else:
            remedy = "Get access to it, repair the disk or file system, or use another path."
            explained = ResourceError(problem, remedy)
    explained.__cause__ = error
    return explained


class NonFiniteError(UserError):
    """Loss or gradients were NaN or infinite for too many steps in a row."""

    exit_code = 6


class Stopped(UserError):
    """The run was stopped by a signal. Exit code 128 + the number of the signal."""

    def __init__(self, problem: str, remedy: str, signal_number: int):
        super().__init__(problem, remedy)
        self.args = (problem, remedy, signal_number)  # for pickle
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


def out_of_memory_line(error: BaseException) -> str | None:
    """The line of torch's error that says that memory ran out; None for another error.

    Such errors come from torch's allocators, the CUDA driver, cuDNN, cuBLAS, nccl and inductor.
    """
    lines = str(error).splitlines() if isinstance(error, RuntimeError) else []
    return next(filter(_OUT_OF_MEMORY.search, lines), None)
