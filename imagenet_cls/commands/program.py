"""Runs a command as a program: its exit code, its errors in a few lines, and the end of the process."""

import atexit
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from imagenet_cls.errors import UserError
from imagenet_cls.interrupts import end_by_interrupts, ignore_interrupts

Command = Callable[[Sequence[str]], int | None]
T = TypeVar("T")


def main(command: Command, argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, after printing a UserError on stderr. Any other exception is a bug.

    argv: the command's arguments. None: those of this process, which ends here; until the command asks for something
    else (`raise_interrupts`, or its own handlers), Ctrl-C ends it at once.
    """
    open_streams()
    if argv is None:
        end_by_interrupts()
        end(exit_code_of(command, sys.argv[1:]))
    return exit_code_of(command, argv or [])


def open_streams() -> None:
    """Make standard streams that take any text. One that is closed (`>&-`) becomes /dev/null."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # open as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # file names need not be valid text


def exit_code_of(command: Command, argv: Sequence[str]) -> int:
    """Run a command, print the UserError that it raises, and return the exit code."""
    try:
        return command(argv) or 0
    except UserError as error:
        return print_error(error, argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout (`| head`) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def print_error(error: UserError, argv: Sequence[str]) -> int:
    """Print an error's message, or with --traceback where it was raised. Returns its exit code."""
    if "--traceback" in argv:
        traceback.print_exception(error)
    else:
        print(error, file=sys.stderr, flush=True)
    return error.exit_code


def end(code: int) -> None:
    """End this process: run the registered exit functions, but don't free all modules, which takes seconds with torch.

    Under a debugger or a profiler the interpreter exits as usual.
    """
    ignore_interrupts()
    if sys.gettrace() is not None or sys.getprofile() is not None:
        sys.exit(code)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def track(items: Sequence[T], description: str) -> Iterable[T]:
    """Iterate, with a progress bar on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(items, description, console=console, disable=not console.is_terminal)
