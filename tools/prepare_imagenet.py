"""Bring ImageNet's archives, or Kaggle's, into OUT/{train,val}/CLASS: `python tools/prepare_imagenet.py SOURCE OUT`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands.program import main

if __name__ == "__main__":
    sys.exit(main("imagenet_cls.commands.prepare_imagenet:prepare_main"))
