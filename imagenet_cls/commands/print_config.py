"""Print a resolved config, where each value came from, or the differences between two configs."""

import sys
from collections.abc import Sequence

from imagenet_cls.commands import cli
from imagenet_cls.commands.own_data import load_config_or_data
from imagenet_cls.config.compare import differing_values
from imagenet_cls.config.load import dump_yaml, values_by_key
from imagenet_cls.config.reader import dump_inline


def print_config_command(argv: Sequence[str]) -> None:
    parser = cli.build_parser(
        "print-config", "Print a resolved config.", "CONFIG | DATA [key=value ...] [options]"
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a config file, such as configs/resnet50.yaml, or a dataset",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as optimizer.lr=0.2"
    )
    parser.add_argument("--origin", action="store_true", help="add where each value comes from")
    parser.add_argument("--diff", metavar="OTHER", help="print only the differences to this config")
    arguments = cli.parse(parser, argv)
    loaded = load_config_or_data(arguments.config, arguments.overrides)
    if arguments.diff is not None:
        found = differing_values([loaded.config, load_config_or_data(arguments.diff, []).config])
        lines = [f"{key}: {mine} | {other}" for key, (mine, other) in found.items()]
    elif arguments.origin:
        pairs = {
            key: f"{key}: {dump_inline(value)}"
            for key, value in values_by_key(loaded.config).items()
        }
        width = min(max(map(len, pairs.values())), 60)
        lines = [
            f"{text:<{width}}  # {loaded.origins.get(key) or 'default'}"
            for key, text in pairs.items()
        ]
    else:
        lines = dump_yaml(loaded.config).splitlines()
    for line in loaded.warnings:
        print(line, file=sys.stderr)
    for line in lines:
        print(line)
