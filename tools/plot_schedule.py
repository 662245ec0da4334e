"""Plot learning rate, momentum and training resolution of a run, without training. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import cli
from imagenet_cls.commands.plot_schedule import plot_schedule_command

if __name__ == "__main__":
    cli.main(plot_schedule_command)
