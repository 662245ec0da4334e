"""What all commands share: the parser of the arguments, the exit code, and printed errors."""

import argparse
import io
import math
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from imagenet_cls.commands.own_data import load_config_or_data
from imagenet_cls.config import keys
from imagenet_cls.config.load import LoadedConfig
from imagenet_cls.config.schema import POSITIVE, Range
from imagenet_cls.errors import (
    CheckpointError,
    ConfigError,
    UsageError,
    UserError,
    explain_path_error,
)
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.parallel.exit import hard_exit, print_error, write_error_file
from imagenet_cls.parallel.signals import exit_on_signal, handle_interrupts
from imagenet_cls.text import CALLER_VARIABLE, command_line, count_of, printable

Command = Callable[[Sequence[str]], int | None]
T = TypeVar("T")


def main(command: Command, argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, after printing a UserError on stderr. Any other
    exception is a bug.

    argv: None for the arguments of this process, which ends here. Ctrl-C ends it at once, unless
    the command handles it.
    """
    open_streams()
    os.environ.setdefault(CALLER_VARIABLE, "command")
    if argv is None:
        # libraries may swallow a KeyboardInterrupt while they are imported
        handle_interrupts(exit_on_signal)
        exit_process(call_command(command, sys.argv[1:]))
    return call_command(command, argv or [])


def open_streams() -> None:
    """Make standard streams that take any text. One that is closed (`>&-`) becomes /dev/null."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # open as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # file names need not be valid text


def call_command(command: Command, argv: Sequence[str]) -> int:
    """Run a command and return its exit code. Prints a UserError, and an error of the file system
    that the user can repair.
    """
    try:
        return command(argv) or 0
    except BrokenPipeError:
        if not has_lost_reader(sys.stdout):
            raise
        # The reader of stdout (`| head`) has gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as raised:
        error = explain_path_error(raised)
        write_error_file(error)
        if not isinstance(error, UserError):
            raise
        text = "".join(traceback.format_exception(error)) if "--traceback" in argv else str(error)
        print_error(text, error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def has_lost_reader(stream: TextIO) -> bool:
    """Whether nothing reads the pipe that this stream writes to any more."""
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def exit_process(code: int) -> NoReturn:
    """Run the registered exit functions and end this process, without freeing all modules, which
    takes seconds.
    """
    handle_interrupts(signal.SIG_IGN)
    # A debugger, a profiler or coverage writes its results at a normal exit.
    is_traced = sys.gettrace() is not None or sys.getprofile() is not None
    if monitoring := getattr(sys, "monitoring", None):  # from Python 3.12 on
        # The tools with the numbers 0 to 2 are a debugger, coverage and a profiler.
        is_traced |= any(map(monitoring.get_tool, range(3)))
    if is_traced or "torch" not in sys.modules:
        sys.exit(code)
    from imagenet_cls.private_names import run_exit_functions  # imports torch

    run_exit_functions()
    hard_exit(code)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which raises UsageError for invalid arguments. argparse itself prints its
    usage, which may have many lines, and ends the process.
    """

    def error(self, message: str) -> NoReturn:
        raise UsageError(printable(message), f"See {self.prog} --help.")


def build_parser(name: str, description: str, usage: str | None = None) -> argparse.ArgumentParser:
    """The parser of a command, with --traceback. usage: without the name of the command."""
    program = command_line(name)
    usage = usage and f"{program} {usage}"
    parser = ArgumentParser(prog=program, usage=usage, description=description)
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return parser


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config file and its overrides, for `split_overrides`."""
    parser.add_argument(
        "arguments",
        type=not_empty,
        nargs="*",
        metavar="CONFIG key=value",
        help="a config file, or where the usage has DATA a dataset; and overrides",
    )
    parser.add_argument(
        "--cfg-options", nargs="+", metavar="key=value", help="overrides, as mmdetection has them"
    )


def add_allow_import(parser: argparse.ArgumentParser) -> None:
    """Add --allow-import: code that the config in a checkpoint may name, see
    `config.rules.check_trusted`.
    """
    parser.add_argument(
        "--allow-import",
        metavar="NAME",
        action="append",
        default=[],
        help="let the checkpoint use this my_module:my_factory, or import this module; may be "
        "repeated",
    )


def add_weights_arguments(parser: argparse.ArgumentParser, following: str = "") -> None:
    """Add what `weights_arguments` returns. following: the name of the words after WEIGHTS, which
    are their help, too.
    """
    parser.add_argument(
        "words",
        type=not_empty,
        nargs="+",
        metavar=f"[CONFIG] WEIGHTS {following}".strip(),
        help="WEIGHTS: a run folder (its best checkpoint), a checkpoint or a file in it, the name "
        "of a model with published weights, such as resnet50.a1_in1k, a folder as the Hugging Face "
        "Hub has it; or with --model or CONFIG a file of another program",
    )
    parser.add_argument("--model", metavar="NAME", help="the model of a file of weights")
    text = "default: the kind of weights with the best result of the run"
    parser.add_argument("--weights", choices=("raw", "ema"), help=text)
    add_allow_import(parser)


def weights_arguments(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The arguments of a `Predictor`, and the words that follow the weights. Raises UsageError."""
    config, *others = arguments.words
    if Path(config).suffix not in (".yaml", ".yml"):
        config, others = None, arguments.words
    if not others:
        raise UsageError("No weights given.", "Name them after the config.")
    options = {
        "checkpoint": others[0],
        "weights": arguments.weights,
        "allow_import": arguments.allow_import,
        "model": arguments.model,
        "config": config,
    }
    return options, others[1:]


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse arguments, options and positional ones in any order. Raises ConfigError for options of
    other projects.

    The word `auto` after `--resume` is left out, which means the same.
    """
    pairs = zip(argv, ["", *argv], strict=False)
    words = [word for word, before in pairs if (before, word) != ("--resume", "auto")]
    arguments, unknown = parser.parse_known_intermixed_args(words)
    arguments.argv = list(argv)
    given = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if errors := [f"{word}: {text}" for word in given if (text := keys.instead_of_option(word))]:
        raise ConfigError(errors)  # each says what to write instead
    if unknown:
        options = re.findall(r"--[\w-]+", parser.format_help())
        similar = did_you_mean(unknown[0].partition("=")[0], options)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{similar}")
    return arguments


def split_overrides(
    arguments: argparse.Namespace, names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the overrides (key=value) and the other arguments, which `names` describes: at most as
    many as `names`.
    """
    every = [*arguments.arguments, *(arguments.cfg_options or [])]
    overrides = [argument for argument in every if is_override(argument)]
    others = [argument for argument in every if not is_override(argument)]
    key = next((other for other in others if other in keys.value_types()), None)
    for override in overrides:
        name, _, value = override.partition("=")
        option = name.strip().replace("-", "_")
        if option in vars(arguments) and option not in keys.value_types():
            raise UsageError(
                f"{override}: there is no key of this name, but an option.",
                f"Write --{option.replace('_', '-')} {value}",
            )
    if len(others) > len(names) or key is not None:
        remedy = f"Write overrides as {key or 'key'}=value, without spaces"
        if vars(arguments).get("resume"):
            remedy += "; give a checkpoint to resume from by --resume-from"
        raise UsageError(
            f"Unexpected argument {key or others[len(names)]!r}: this command takes "
            f"{' and '.join(names)}, and overrides.",
            f"{remedy}.",
        )
    return overrides, others


def is_override(argument: str) -> bool:
    """Whether this is `key=value`. A path may have an equals sign after a slash."""
    key, equals, _ = argument.partition("=")
    return equals != "" and "/" not in key


def load_one_config(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> LoadedConfig:
    """The config of a command that takes one, or a dataset, and overrides. parser: with a usage,
    for the error without a config.
    """
    overrides, sources = split_overrides(arguments, ["one config or dataset"])
    if not sources:
        raise UsageError("No config given.", f"Usage: {parser.usage}")
    return load_config_or_data(sources[0], overrides)


def _number(text: str, allowed: Range, kind: type[int] | type[float] = int) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if number not in allowed:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a {'whole ' if kind is int else ''}number, {allowed}"
        )
    return number


def not_empty(text: str) -> str:
    """Return a path as it is. An empty one, of an unset variable, would mean the working
    directory.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give one, or leave out the option")
    return text


def path(text: str) -> Path:
    return Path(not_empty(text))


def checkpoint_path(text: str) -> Path:
    """An argparse type: a path. Raises CheckpointError if there is no such file or folder."""
    checkpoint = path(text)
    if not checkpoint.exists():
        raise CheckpointError(
            f"No checkpoint {text!r}: no such file or folder.",
            "Give the path of a checkpoint or of a run folder.",
        )
    return checkpoint


def output_folder(option: Path | None, words: Sequence[str]) -> Path:
    """The folder that a command writes: the value of --out, or the only word that is no override.
    Raises UsageError.
    """
    given = [word for word in words if word and not is_override(word)]
    if option is not None:
        given.append(str(option))
    if len(given) != 1:
        raise UsageError(
            f"{count_of(len(given), 'output folder')} given, and one is needed.",
            "Give it by --out DIR, or as the last word.",
        )
    return path(given[0])


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a whole number from `low` to `high`."""
    return partial(_number, allowed=Range(low, high))


positive = number(1)
positive_float = partial(_number, allowed=POSITIVE, kind=float)
