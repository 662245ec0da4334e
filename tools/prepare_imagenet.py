"""Unpack ImageNet's archives, or Kaggle's, into OUT/{train,val}/CLASS. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands.main import main

if __name__ == "__main__":
    main("prepare-imagenet")
