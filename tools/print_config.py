"""Show a config as a run would see it: python tools/print_config.py CONFIG [key=value ...] [--origin] [--diff OTHER]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from imagenet_cls.commands.program import main

if __name__ == "__main__":
    sys.exit(main("imagenet_cls.commands.print_config:print_config_main"))
