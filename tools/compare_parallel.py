"""The same few steps in one process, under DP and under DDP, and a table of what differs. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands.program import main

if __name__ == "__main__":
    sys.exit(main("imagenet_cls.commands.compare_parallel:compare_command"))
