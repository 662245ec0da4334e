"""What all commands share: the parser of the arguments, the exit code, and errors in a few lines."""

import argparse
import atexit
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from imagenet_cls.errors import UsageError, UserError
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


def build_parser(
    script: str, description: str, usage: str | None = None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """The parser of `tools/SCRIPT`, with --traceback, which `print_error` reads. usage: without the script's name."""
    usage = usage and f"{script} {usage}"
    parser = argparse.ArgumentParser(prog=script, usage=usage, description=description, epilog=epilog)
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return parser


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config file and its overrides, for `split_overrides`."""
    parser.add_argument("arguments", nargs="*", metavar="CONFIG key=value", help="a config file, and overrides")
    parser.add_argument("--cfg-options", nargs="+", metavar="key=value", help="overrides, as mmdetection has them")


def add_allow_import(parser: argparse.ArgumentParser) -> None:
    """Add --allow-import: code that the config in a checkpoint may name, see `models.build.check_trusted`."""
    parser.add_argument(
        "--allow-import", metavar="NAME", action="append", default=[],
        help="let the checkpoint use this my_module:my_factory, or import this module; may be repeated",
    )  # fmt: skip


def split_overrides(arguments: argparse.Namespace, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides (key=value) and the other arguments, which `names` describes: at most as many as `names`."""
    every = [*arguments.arguments, *(arguments.cfg_options or [])]
    overrides = [argument for argument in every if "=" in argument]
    others = [argument for argument in every if "=" not in argument]
    if len(others) > len(names):
        raise UsageError(
            f"unexpected argument {others[len(names)]!r}: this takes {' and '.join(names)}, and overrides.\n"
            "Write overrides as key=value, without spaces around the equals sign."
        )
    return overrides, others


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    return _whole_number(text, 1)


def not_negative(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return _whole_number(text, 0)


def port_number(text: str) -> int:
    """An argparse type: a TCP port."""
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
