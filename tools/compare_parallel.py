"""Compare the same few steps in one process, under DP and under DDP. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import cli
from imagenet_cls.commands.compare_parallel import compare_command

if __name__ == "__main__":
    cli.main(compare_command)
