"""What `tools/print_config.py` shows: a resolved config, where each value came from, how two configs differ.

Owns the text that is printed and the exit code. Called by the tool only; starts nothing and writes nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from imagenet_cls.commands import program
from imagenet_cls.config import reader
from imagenet_cls.config.load import Loaded, config_to_dict, dump_yaml, load_config
from imagenet_cls.config.schema import Config
from imagenet_cls.errors import UserError

ABSENT = "(absent)"


def flatten(config: Config) -> dict[str, Any]:
    """Every value by its dotted key, in the order of the schema. An empty `kwargs` is a value, `{}`."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                add(f"{prefix}.{name}" if prefix else name, item)
        else:
            flat[prefix] = value

    add("", config_to_dict(config))
    return flat


def _text(value: Any) -> str:
    """A value as YAML on one line, so that it can be pasted behind `key=`."""
    return reader.dump([value]).strip()[1:-1]


def origin_lines(loaded: Loaded) -> list[str]:
    """`key: value  # where`, one line for each value. A value that was interpolated names the line of the `${...}`."""
    pairs = {key: f"{key}: {_text(value)}" for key, value in flatten(loaded.config).items()}
    width = min(max(map(len, pairs.values())), 60)
    return [f"{text:<{width}}  # {loaded.origins.get(key, 'default')}" for key, text in pairs.items()]


def diff_lines(mine: Config, other: Config) -> list[str]:
    """`key: value of mine | value of other`, one line for each key where they differ; none for equal configs.

    Keyword arguments are compared one by one, so that `kwargs: {}` against some of them is not a line of its own.
    """
    left = {key: _text(value) for key, value in flatten(mine).items()}
    right = {key: _text(value) for key, value in flatten(other).items()}
    every_key = dict.fromkeys([*left, *right])
    return [
        f"{key}: {left.get(key, ABSENT)} | {right.get(key, ABSENT)}"
        for key in every_key
        if left.get(key, ABSENT) != right.get(key, ABSENT) and {left.get(key), right.get(key)} != {None, "{}"}
    ]


def main() -> None:
    """`tools/print_config.py`."""
    program.main(print_config_main)


def print_config_main(argv: Sequence[str]) -> int:
    """The tool: print, and return the exit code. 0: printed. 2: a config or a command line that is wrong, on stderr."""
    parser = argparse.ArgumentParser(prog="print_config.py", description="Show a config as a run would see it.")
    parser.add_argument("config", metavar="CONFIG", help="a config file, such as configs/resnet50.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as optimizer.lr=0.2")
    parser.add_argument("--origin", action="store_true", help="behind each value, the place that it came from")
    parser.add_argument("--diff", metavar="OTHER", help="only the keys that differ from this config, both values")
    args = parser.parse_intermixed_args(argv)
    try:
        loaded = load_config(args.config, args.overrides)
        if args.diff is not None:
            lines = diff_lines(loaded.config, load_config(args.diff).config)
        elif args.origin:
            lines = origin_lines(loaded)
        else:
            lines = [dump_yaml(loaded.config).rstrip("\n")]
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for line in lines:
        print(line)
    return 0
