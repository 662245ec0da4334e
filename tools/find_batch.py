"""Find the largest micro-batch that fits on a device. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import cli
from imagenet_cls.commands.find_batch import find_batch_command

if __name__ == "__main__":
    cli.main(find_batch_command)
