"""Check training on the GPUs of this machine by short runs: python tools/check_gpu.py. Needs no
data and no network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands.main import main

if __name__ == "__main__":
    main("check-gpu")
