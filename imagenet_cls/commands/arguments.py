"""Arguments that several commands share, and argparse types."""

import argparse
from collections.abc import Sequence

from imagenet_cls.errors import UsageError


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config file and its overrides, for `split_overrides`, and --traceback."""
    parser.add_argument("arguments", nargs="*", metavar="CONFIG key=value", help="a config file, and overrides")
    parser.add_argument("--cfg-options", nargs="+", metavar="key=value", help="overrides, as mmdetection has them")
    add_traceback(parser)


def add_traceback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


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
