"""Read every image of a dataset, and list the bad ones. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import cli
from imagenet_cls.commands.verify_data import verify_command

if __name__ == "__main__":
    cli.main(verify_command)
