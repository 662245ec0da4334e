"""Pack a dataset into WebDataset shards. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import cli
from imagenet_cls.commands.pack import pack_command

if __name__ == "__main__":
    cli.main(pack_command)
