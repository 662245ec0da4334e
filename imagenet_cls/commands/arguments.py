"""Arguments that several commands share."""

import argparse
from collections.abc import Sequence

from imagenet_cls.errors import UsageError


def add_words(parser: argparse.ArgumentParser) -> None:
    """What every command with a config takes: the config, changes to it, and how to see a traceback."""
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help="a config file, and changes to it")
    parser.add_argument(
        "--cfg-options", nargs="+", metavar="key=value", help="changes to the config, as mmdetection has them"
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def add_allow_import(parser: argparse.ArgumentParser) -> None:
    """What a checkpoint's own config may run: see `models.trust`."""
    parser.add_argument(
        "--allow-import", metavar="NAME", action="append", default=[],
        help="let the checkpoint call this my_module:my_factory, or import this module; may be repeated",
    )  # fmt: skip


def split_words(arguments: argparse.Namespace, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are changes to the config (key=value), and the others: at most as many as `names`."""
    words = [*arguments.words, *(arguments.cfg_options or [])]
    changes = [word for word in words if "=" in word]
    others = [word for word in words if "=" not in word]
    if len(others) > len(names):
        raise UsageError(
            f"can't tell what {others[len(names)]!r} is: this takes {' and '.join(names)}, and changes as key=value.\n"
            "Write key=value without spaces around the equals sign."
        )
    return changes, others
