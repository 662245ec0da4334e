"""Plot the loss over a range of learning rates. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import cli
from imagenet_cls.commands.find_lr import find_lr_command

if __name__ == "__main__":
    cli.main(find_lr_command)
