"""Check that ranks can join and all-reduce: under any launcher, or with --gpus N. With key=value
overrides.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands.main import main

if __name__ == "__main__":
    main("check-dist")
