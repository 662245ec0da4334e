"""Draw the images that the model gets in training, without training. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import cli
from imagenet_cls.commands.show_batch import show_batch_command

if __name__ == "__main__":
    cli.main(show_batch_command)
