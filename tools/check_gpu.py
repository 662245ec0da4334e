"""Check training on the GPUs of this machine by short runs: python tools/check_gpu.py. Needs no
data and no network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands import cli
from imagenet_cls.commands.check_gpu import check_gpu_command

if __name__ == "__main__":
    cli.main(check_gpu_command)
