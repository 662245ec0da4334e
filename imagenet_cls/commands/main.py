"""The start of every command, for `tools/` and the console script `imagenet-cls`."""

import sys

from imagenet_cls.commands import check_environment
from imagenet_cls.entry_points import COMMANDS, load_command
from imagenet_cls.lookup import did_you_mean
from imagenet_cls.versions import __version__


def main(name: str | None = None) -> None:
    """Run a command with the arguments of this process; without `name` the one that the first
    argument names.
    """
    if name is None:
        name = sys.argv[1] if len(sys.argv) > 1 else ""
        del sys.argv[1:2]
    if name in COMMANDS:
        check_environment()
        from imagenet_cls.commands import cli

        cli.main(lambda argv: load_command(name)(argv))
    elif name in ("", "-h", "--help"):
        print("usage: imagenet-cls COMMAND [--help] [arguments]\n\nCommands:")
        print("\n".join(f"  {command:<20} {text}" for command, (_, text) in COMMANDS.items()))
    elif name == "--version":
        print(__version__)
    else:
        problem = f"no command {name!r}{did_you_mean(name, COMMANDS)}"
        print(f"imagenet-cls: {problem}\nSee imagenet-cls --help.", file=sys.stderr)
        sys.exit(2)
