"""A command as a program: numbers among its words, what it raises as an exit code and a few lines, and its end.

Refuses to know any command. Called by the entries in `tools/`, and by `cli`, `ranks` and what stands beside them.
"""

import argparse
import atexit
import contextlib
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from imagenet_cls.errors import UsageError, UserError
from imagenet_cls.interrupts import end_by_interrupts, ignore_interrupts

Command = Callable[[Sequence[str]], int | None]

# The libraries of setup.cfg, by the names that they are imported by.
LIBRARIES = (
    "torch", "torchvision", "timm", "omegaconf", "tensorboard", "safetensors", "rich", "matplotlib", "sklearn", "numpy",
    "PIL", "yaml",
)  # fmt: skip
_HOW_TO_INSTALL = "Run `bash scripts/setup.sh`, which makes .venv, and then `source .venv/bin/activate`."


def main(command: Command | str, argv: Sequence[str] | None = None) -> int:
    """Run a command and turn what it raises into an exit code and a few lines on stderr.

    command: or its name, `module:function`; then that is so for what importing it raises, too.

    Without `argv` it is this process's own command, as in the entries in tools/: the process ends here (`end`), and by
    a Ctrl-C at once, until the command asks for something else (`raise_interrupts`, or handlers of its own).
    """
    open_streams()
    if argv is None:
        end_by_interrupts()
    code = exit_code_of(command, list(sys.argv[1:] if argv is None else argv))
    if argv is None:
        end(code)
    return code


def open_streams() -> None:
    """Make the standard streams such that anything can be printed, and nothing is where one is closed (`>&-`)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # file names need not be valid text


def exit_code_of(command: Command | str, words: list[str]) -> int:
    """Run a command, show what a user has caused, and return the exit code. What only a bug can raise goes through."""
    try:
        if isinstance(command, str):
            module, _, name = command.partition(":")
            command = cast(Command, getattr(importlib.import_module(module), name))
        return command(words) or 0
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in LIBRARIES:
            raise
        return show(UsageError(f"{error.name} is not installed for {sys.executable}.\n{_HOW_TO_INSTALL}"), words)
    except UserError as error:
        return show(error, words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (`| head`) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def end(code: int) -> None:
    """End this process, with all that was asked for at its exit, but without taking the interpreter down.

    That frees what the kernel frees anyway, which takes two to four seconds with torch and timm: too long after a
    second Ctrl-C. Returns only under a debugger or a profiler, which has more to do.
    """
    ignore_interrupts()
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return
    # As the interpreter does: threads first, of which the idle ones of pools are told to end; then what is registered.
    if code != 128 + signal.SIGINT:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def show(error: UserError, words: Sequence[str]) -> int:
    """Print an error for a person: its message, or with --traceback where it was raised. Returns its exit code."""
    if "--traceback" in words:
        traceback.print_exception(error)
    else:
        print(error, file=sys.stderr, flush=True)
    return error.exit_code


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    return _whole_number(text, 1)


def not_negative(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return _whole_number(text, 0)


def port_number(text: str) -> int:
    """An argparse type: a port that can be named to others."""
    return _whole_number(text, 1, 65535)


def _whole_number(text: str, least: int, most: int | None = None) -> int:
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {allowed}")
    return number
