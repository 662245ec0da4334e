"""Print a resolved config. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import cli
from imagenet_cls.commands.print_config import print_config_command

if __name__ == "__main__":
    cli.main(print_config_command)
